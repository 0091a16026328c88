#!/usr/bin/env bash
# A run in the world with a tool (toy/shop_world.py), from a start that ships: forty steps, two minutes on a
# core with AVX-512. FAPO pays for right answers whose prices were looked up; each look-up costs 0.03. Further
# flags go to the trainer, where the last one given wins:
#   bash recipes/toy_tools.sh 0 outputs/shop0_fapo
#   bash recipes/toy_tools.sh 0 outputs/shop0_outcome --reward-fn toy/shop_world.py:compute_score_outcome
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} == [012] && -n ${2:-} ]] || {
  echo "usage: bash recipes/toy_tools.sh START OUT_DIR [FLAGS OF THE TRAINER], with START 0, 1 or 2" >&2
  exit 2
}
WORLD=data/shop$1
[ -f "$WORLD/shop_train.parquet" ] ||
  python -m toy.warm_start --kind shop --seed "$1" --models --out-dir "$WORLD"  # its rows, no models
python grpo_trainer.py --model "toy/models/shop$1" --out-dir "$2" --seed 0 \
  --train-file "$WORLD/shop_train.parquet" --val-file "$WORLD/shop_test.parquet" \
  --rollout-fn toy/shop_world.py:with_prices --reward-fn toy/shop_world.py:compute_score_fapo_oracle \
  --reward-kwargs '{"call_cost": 0.03}' \
  --total-steps 40 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 96 \
  --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 \
  --val-every 20 --val-top-p 1 --num-threads 1 --samples-per-step 16 --num-reward-workers 1 "${@:3}"
