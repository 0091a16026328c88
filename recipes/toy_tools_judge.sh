#!/usr/bin/env bash
# Trains in the world with a tool with a judge model instead of the oracle: serves the shipped judge with vLLM, and
# trains the policy with FAPO. The oracle only measures. The arguments are those of toy_tools.sh:
#   bash recipes/toy_tools_judge.sh 0 outputs/shop0_judged
# Another judge; if the folder is missing and its name is judge, a judge is trained first (about twenty minutes on a
# core; see toy/models/README.md for what it finds):
#   MODEL=data/shop_judge/judge bash recipes/toy_tools_judge.sh 0 outputs/shop0_judged
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} =~ ^(0|[1-9][0-9]*)$ && -n ${2:-} ]] || {
  echo "usage: bash recipes/toy_tools_judge.sh CHECKPOINT OUT_DIR [TRAINER FLAGS]; see toy_tools.sh" >&2
  exit 2
}
MODEL=${MODEL:-toy/models/shop_judge}
MODEL=${MODEL%/}
[[ -f $MODEL/config.json || $MODEL == */judge ]] || {
  echo "error: MODEL=$MODEL: the folder contains no model, and a judge is trained only in a folder named judge;" \
    "pass MODEL=$MODEL/judge" >&2
  exit 2
}
[ -f "$MODEL/config.json" ] ||
  python -m toy.warm_start --kind shop_judge --models judge --out-dir "${MODEL%/*}"
serve_judge "$MODEL" "$2/genrm_logs"
bash recipes/toy_tools.sh "$1" "$2" --reward-fn toy/shop_judge.py:compute_score_fapo \
  --router-address "127.0.0.1:$PORT" "${@:3}"
