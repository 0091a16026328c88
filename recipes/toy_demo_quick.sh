#!/usr/bin/env bash
# FAPO in miniature without a judge: the exact oracle says which right answers are flawed, so no server is needed.
# SEED=1 bash recipes/toy_demo_quick.sh takes another seed.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv/bin ] && export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1
SEED=${SEED:-0}
RUNS=outputs/demo_quick_seed$SEED
rm -rf "$RUNS"  # of an earlier demo
mkdir -p "$RUNS"

# 1. The toy world: problems, and a warm-started policy of 1 M parameters.
[ -f data/toy/policy/model.safetensors ] || python prepare_data.py --tasks toy --toy-models policy --out-dir data/toy

# 2. Two policies from one start, side by side: the rule only, and FAPO with the oracle as the judge (paper eq. 8).
policy() {  # policy NAME [FURTHER FLAGS]
  python grpo_trainer.py --model data/toy/policy --out-dir "$RUNS/$1" --seed "$SEED" \
    --train-file data/toy/toy_train.parquet --val-file data/toy/toy_test.parquet data/toy/toy_total_test.parquet \
    --reward-fn toy_world.py:compute_score_fapo_oracle --num-reward-workers 1 \
    --total-steps 60 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 64 --overlong-buffer 0 \
    --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 --val-every 30 --val-top-p 1 --val-greedy --num-threads 1 \
    --samples-per-step 16 "${@:2}"
}
policy baseline --baseline >"$RUNS/baseline.log" 2>&1 &
BASELINE=$!
policy fapo
wait $BASELINE || { cat "$RUNS/baseline.log"; exit 1; }

# 3. The figure, the table and the page.
python toy_world.py --runs "$RUNS"
python view_run.py "$RUNS"
