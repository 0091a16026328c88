#!/usr/bin/env bash
# An environment of another library: FrozenLake of gymnasium (frozen_lake.py). The recipe first trains an initial policy
# on the games of a player who makes random safe moves. From this policy, it trains with the outcome reward (penalty 0)
# and with FAPO, whose judge is an exact check of each move. docs/public_tasks.md reports the results.
#   bash recipes/public_lake.sh 0 outputs/lake0   # SEED OUT_DIR [TRAINER FLAGS]; each of the two runs took 7 to 11
#   minutes on two cores that were busy with other jobs
#   python -m recipes.frozen_lake --report outputs/lake[01]/penalty[01] --report-out docs/evidence/frozen_lake.csv
set -euo pipefail
[[ ${1:-} =~ ^[0-9]+$ && -n ${2:-} ]] || {
  echo "usage: bash recipes/public_lake.sh SEED OUT_DIR [TRAINER FLAGS]" >&2
  exit 2
}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv/bin ] && export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1

[ -d data/lake/policy ] || python -m recipes.frozen_lake --out-dir data/lake
for penalty in 0 1; do
  python grpo_trainer.py --model data/lake/policy --out-dir "$2/penalty$penalty" --seed "$1" --device cpu \
    --train-file data/lake/lake_train.parquet --val-file data/lake/lake_test.parquet \
    --rollout-fn recipes/frozen_lake.py:play \
    --reward-fn recipes/frozen_lake.py:compute_score --reward-kwargs "{\"penalty\": $penalty}" \
    --total-steps 40 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 256 \
    --overlong-buffer 0 --lr 3e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 \
    --val-every 10 --val-temperature 0 --save-every 0 --num-threads 1 --num-workers 1 "${@:3}"
done
python -m recipes.frozen_lake --report "$2"/penalty* --report-out "$2/lake.csv"
