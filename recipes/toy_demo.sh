#!/usr/bin/env bash
# FAPO in miniature, end to end: a judge is trained with GRPO, served by vLLM behind the router, and two policies are trained
# side by side from the same start, one with the rule only, one with FAPO. SEED=1 bash recipes/toy_demo.sh takes another seed.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv/bin ] && export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1
SEED=${SEED:-0}
RUNS=outputs/demo_seed$SEED
PORT=${PORT:-30123}
rm -rf "$RUNS"  # of an earlier demo
mkdir -p "$RUNS"
stage() { echo "--- $1 (after $((SECONDS / 60)) min $((SECONDS % 60)) s)"; }

stage "1. The toy world: problems, and two warm-started models of 1 M parameters"
[ -f data/toy/judge/model.safetensors ] && [ -f data/toy/policy/model.safetensors ] ||
  python prepare_data.py --tasks toy --out-dir data/toy

stage "2. The judge learns with GRPO to find the first wrong step (paper eq. 7)"
python grpo_trainer.py --model data/toy/judge --out-dir "$RUNS/judge" --seed "$SEED" \
  --train-file data/toy/fapo_critic_train.parquet --val-file data/toy/fapo_critic_test.parquet \
  --reward-fn compute_score.py:compute_score_fapo_genrm \
  --total-steps 60 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 96 --overlong-buffer 0 \
  --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 --val-every 0 --val-top-p 1 --val-greedy --num-threads 1 \
  --samples-per-step 16

stage "3. The trained judge becomes a service: one vLLM server behind the router"
python genrm_server.py --model "$RUNS/judge/checkpoints/step_60" --port "$PORT" --cpus 1 --max-model-len 512 --log-dir "$RUNS/genrm_logs" &
SERVER=$!
trap 'kill $SERVER 2>/dev/null; wait' EXIT
until python -c "import requests; requests.get('http://127.0.0.1:$PORT/health', timeout=5).raise_for_status()" 2>/dev/null; do
  kill -0 $SERVER || { echo "error: the judge did not start; see $RUNS/genrm_logs"; exit 1; }
  sleep 1
done

# Both policies are looked at by the judge; only FAPO is paid by it (paper eq. 8).
stage "4. Two policies from one start, side by side: the rule only, and FAPO"
policy() {  # policy NAME [FURTHER FLAGS]
  python grpo_trainer.py --model data/toy/policy --out-dir "$RUNS/$1" --seed "$SEED" \
    --train-file data/toy/toy_train.parquet --val-file data/toy/toy_test.parquet data/toy/toy_total_test.parquet \
    --reward-fn toy_world.py:compute_score_fapo --router-address "127.0.0.1:$PORT" \
    --reward-kwargs '{"prompt_style": "brief", "genrm_temperature": 0, "genrm_max_tokens": 96, "keep_critique": true}' \
    --total-steps 60 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 64 --overlong-buffer 0 \
    --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 --val-every 30 --val-top-p 1 --val-greedy --num-threads 1 \
    --samples-per-step 16 "${@:2}"
}
policy baseline --baseline >"$RUNS/baseline.log" 2>&1 &
BASELINE=$!
policy fapo
wait $BASELINE || { cat "$RUNS/baseline.log"; exit 1; }

stage "5. The figure, the tables and the page"
python toy_world.py --runs "$RUNS"
python view_run.py "$RUNS"
stage "done"
