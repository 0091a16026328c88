# This file defines the toy worlds' training runs as functions, for other recipes to source.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv/bin ] && export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1
PORT=${PORT:-$((20000 + RANDOM % 10000))}  # A random port lets several demos run on one machine.
# Models of 1 M parameters need no GPU, and several runs at a time would compete for one.
! nvidia-smi -L >/dev/null 2>&1 ||
  echo "GPU found: judges are served on it; policies of 1 M parameters train on the CPU (a GPU run: docs/training.md)"
stage() { echo "--- $1 (after $((SECONDS / 60)) min $((SECONDS % 60)) s)"; }

refuse_taken_port() {  # Without this check, another run's judge could answer.
  ! (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null || {
    echo "error: PORT=$PORT: the port is taken, perhaps by another demo; run PORT=$((PORT + 1)) bash $0" >&2
    exit 1
  }
}

stop_all() {  # Stops the background jobs when the script ends. Each run is a child of its job's shell.
  for job in $(jobs -p); do
    [ "$job" = "${SERVER:-}" ] || kill $(<"/proc/$job/task/$job/children") || true  # Containers may lack pkill.
    kill "$job" || true
  done 2>/dev/null
  wait
}
trap stop_all EXIT

train_judge() {  # train_judge TOY_WORLD SEED OUT_DIR [FLAGS]: trains a judge with GRPO (paper eq. 7)
  python grpo_trainer.py --model "$1/judge" --out-dir "$3" --seed "$2" --device cpu \
    --train-file "$1/fapo_critic_train.parquet" --val-file "$1/fapo_critic_test.parquet" \
    --reward-fn compute_score.py:compute_score_fapo_genrm \
    --total-steps 60 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 96 \
    --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 \
    --val-every 0 --val-top-p 1 --num-threads 1 --samples-per-step 16 "${@:4}"
}

serve_judge() {  # serve_judge CHECKPOINT LOG_DIR: starts a router and a vLLM server (on half a GPU if there is one)
  refuse_taken_port
  python genrm_server.py --model "$1" --port "$PORT" --cpus 1 --gpu-share 0.5 --max-model-len 512 --log-dir "$2" &
  SERVER=$!
  # The shell polls /health itself, because a new Python process every second would slow down the server's start.
  until (exec 3<>"/dev/tcp/127.0.0.1/$PORT" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 &&
    read -rt 5 answer <&3 && [[ $answer == *" 200 "* ]]) 2>/dev/null; do
    kill -0 $SERVER || { echo "error: the judge's server did not start; read the logs in $2"; exit 1; }
    sleep 1
  done
}

train_policy() {  # train_policy TOY_WORLD SEED OUT_DIR [FLAGS]
  python grpo_trainer.py --model "$1/policy" --out-dir "$3" --seed "$2" --device cpu \
    --train-file "$1/toy_train.parquet" --val-file "$1/toy_test.parquet" "$1/toy_total_test.parquet" \
    --total-steps 60 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 64 \
    --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 \
    --val-every 30 --val-top-p 1 --num-threads 1 --samples-per-step 16 \
    --num-reward-workers 1 "${@:4}"
}

# The policy's reward is the outcome reward (the oracle only adds metrics), FAPO's reward with the oracle as a
# perfect judge, the same with a score for each step, or FAPO's reward with the served judge (paper eq. 8).
RULE=(--reward-fn toy/toy_world.py:compute_score_baseline)
ORACLE=(--reward-fn toy/toy_world.py:compute_score_fapo_oracle)
STEPS=(--reward-fn toy/toy_world.py:compute_score_steps_oracle --advantage recipes/advantages.py:steps)
JUDGE=(--reward-fn toy/toy_world.py:compute_score_fapo --router-address "127.0.0.1:$PORT" --reward-kwargs
  '{"prompt_style": "brief", "genrm_temperature": 0, "genrm_max_tokens": 96, "keep_critique": true}')

train_own() {  # train_own .../own[012] SEED OUT_DIR [FLAGS]: FAPO from a checkpoint of the second world
  train_policy "$1" "$2" "$3" --model "toy/models/${1##*/}" --max-response-length 112 \
    --total-steps 40 --val-every 0 --save-every 0 "${ORACLE[@]}" "${@:4}"
}

train_shop() {  # train_shop .../shop[012] SEED OUT_DIR [FLAGS]: FAPO in the world with a tool
  python grpo_trainer.py --model "toy/models/${1##*/}" --out-dir "$3" --seed "$2" --device cpu \
    --train-file "$1/shop_train.parquet" --val-file "$1/shop_test.parquet" \
    --rollout-fn toy/shop_world.py:with_prices --reward-fn toy/shop_world.py:compute_score_fapo_oracle \
    --reward-kwargs '{"call_cost": 0.03}' \
    --total-steps 40 --train-batch-size 16 --mini-batch-size 8 --group-size 8 --max-response-length 96 \
    --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 5 --weight-decay 0 \
    --val-every 20 --val-top-p 1 --num-threads 1 --samples-per-step 16 --num-reward-workers 1 "${@:4}"
}
