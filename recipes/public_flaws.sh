#!/usr/bin/env bash
# Flawed positives in a public task: reasoning-gym's gcd, with the questions and the verifier of that package. The
# policy writes out Euclid's algorithm, and an exact program checks each line (gcd_steps.py). The recipe first trains
# an initial policy. From this policy, it trains with the outcome reward and with FAPO. docs/public_tasks.md reports
# the results.
#   bash recipes/public_flaws.sh 0 outputs/gcd0          # SEED OUT_DIR [TRAINER FLAGS]
#   START=1 bash recipes/public_flaws.sh 0 outputs/gcd1  # another initial policy: the seed of its training
# A pretrained chat model (a folder or a Hub name) as the policy, which is first trained to write such solutions:
#   BASE=HuggingFaceTB/SmolLM2-135M-Instruct bash recipes/public_flaws.sh 0 outputs/gcd_smollm2 \
#     --total-steps 30 --train-batch-size 8 --mini-batch-size 4 --lr 1e-5
set -euo pipefail
[[ ${1:-} =~ ^[0-9]+$ && -n ${2:-} ]] || {
  echo "usage: bash recipes/public_flaws.sh SEED OUT_DIR [TRAINER FLAGS]" >&2
  exit 2
}
BASE=${BASE:-}
[ ! -d "$BASE" ] || BASE=$(realpath "$BASE")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv/bin ] && export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1
DATA=data/gcd
POLICY=$DATA/policy${START:=0}
[ -z "$BASE" ] || POLICY=$DATA/$(basename "$BASE")_$START

[ -f $DATA/reasoning_gym_gcd_test.parquet ] ||
  python prepare_data.py --tasks 'reasoning_gym:gcd:{"max_value": 30}' --out-dir $DATA
if [ -n "$BASE" ] && [ -d "$POLICY" ]; then
  before=$(cat "$POLICY.base" 2>/dev/null || echo "an unknown model")
  [ "$before" = "$BASE" ] || {
    echo "error: BASE=$BASE: $POLICY was trained from $before; delete it, or write its base to $POLICY.base" >&2
    exit 1
  }
elif [ -n "$BASE" ]; then
  mkdir -p $DATA
  echo "$BASE" >"$POLICY.base"
fi
[ -d "$POLICY" ] || python -m recipes.gcd_steps --out-dir "$POLICY" --seed "$START" --base "$BASE"
for reward in outcome fapo; do
  python grpo_trainer.py --model "$POLICY" --out-dir "$2/$reward" --seed "$1" --device cpu \
    --train-file $DATA/reasoning_gym_gcd_train.parquet --val-file $DATA/reasoning_gym_gcd_test.parquet:4 \
    --reward-fn "recipes/gcd_steps.py:compute_score_$reward" \
    --total-steps 40 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 112 \
    --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 \
    --val-every 0 --val-top-p 1 --save-every 0 --num-threads 1 --num-workers 1 "${@:3}"
done
python -m recipes.gcd_steps --report "$2"
