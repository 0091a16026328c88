#!/usr/bin/env bash
# Trains in the world with a tool (toy/shop_world.py) from one of the three shipped checkpoints, 0, 1 or 2. Any other
# number is a seed for a fresh checkpoint, which is trained first in data/shopN. The forty steps take two minutes on a
# core with AVX-512, and a fresh checkpoint about five. FAPO gives the full reward only to correct answers whose prices
# were looked up, and each look-up costs 0.03. Additional flags override the flags in this recipe:
#   bash recipes/toy_tools.sh 0 outputs/shop0_fapo
#   bash recipes/toy_tools.sh 0 outputs/shop0_outcome --reward-fn toy/shop_world.py:compute_score_outcome
#   bash recipes/toy_tools.sh 5 outputs/shop5_fapo    # from a fresh checkpoint
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} =~ ^(0|[1-9][0-9]*)$ && -n ${2:-} ]] || {
  echo "usage: bash recipes/toy_tools.sh CHECKPOINT OUT_DIR [TRAINER FLAGS]; CHECKPOINT is 0, 1, 2 or another seed" >&2
  exit 2
}
WORLD=data/shop$1
START=()
if [[ $1 == [012] ]]; then
  [ -f "$WORLD/shop_train.parquet" ] ||
    python -m toy.warm_start --kind shop --seed "$1" --models --out-dir "$WORLD"  # only the rows, not the models
else
  START=(--model "$WORLD/policy")
  [ -f "$WORLD/policy/model.safetensors" ] ||
    python -m toy.warm_start --kind shop --seed "$1" --models policy --out-dir "$WORLD"
fi
train_shop "$WORLD" 0 "$2" "${START[@]}" "${@:3}"
