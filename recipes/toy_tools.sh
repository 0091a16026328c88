#!/usr/bin/env bash
# Trains in the world with a tool (toy/shop_world.py), from one of the three shipped checkpoints. The forty steps take
# two minutes on a core with AVX-512. FAPO gives the full reward only to correct answers whose prices were looked up,
# and each look-up costs 0.03. Additional flags override the flags in this recipe:
#   bash recipes/toy_tools.sh 0 outputs/shop0_fapo
#   bash recipes/toy_tools.sh 0 outputs/shop0_outcome --reward-fn toy/shop_world.py:compute_score_outcome
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} == [012] && -n ${2:-} ]] || {
  echo "usage: bash recipes/toy_tools.sh CHECKPOINT OUT_DIR [TRAINER FLAGS]; CHECKPOINT is 0, 1 or 2" >&2
  exit 2
}
WORLD=data/shop$1
[ -f "$WORLD/shop_train.parquet" ] ||
  python -m toy.warm_start --kind shop --seed "$1" --models --out-dir "$WORLD"  # only the rows, not the models
train_shop "$WORLD" 0 "$2" "${@:3}"
