#!/usr/bin/env bash
# The paper's 7B FAPO run (Table 1). The run starts its own judge. With JUDGE=HOST:PORT, it uses a running judge.
# Data: python prepare_data.py --tasks dapo aime24 aime25 gpqa --out-dir data
# GPQA is gated. Accept its terms on the Hub and set HF_TOKEN, or leave out gpqa and append the flags
# --val-file data/aime24_test.parquet data/aime25_test.parquet
#
# Hardware: one node with eight 80 GB GPUs, for four policy ranks, two policy servers and two judges. For several
# nodes, see docs/cluster.md. To check memory and placement, set TRAINER="-m tools.plan_run".
# Disk: 280 GB in OUT (two checkpoints of 91 GB, and a third while it is being written), 23 GB for the models
# (15 GB with JUDGE).
source "$(dirname "$0")/paths.sh"

WHERE=(--genrm dyyyyyyyy/FAPO-GenRM-4B --genrm-servers 2)
[ -z "${JUDGE:-}" ] || WHERE=(--router-address "$JUDGE")

python ${TRAINER:-grpo_trainer.py} --model Qwen/Qwen2.5-Math-7B --max-positions 32768 --out-dir "$OUT/fapo_7b" \
  --train-file "$DATA/math-dapo_train.parquet" --val-file "$DATA/aime24_test.parquet" \
  "$DATA/aime25_test.parquet" "$DATA/gpqa-diamond_test.parquet:4" \
  --reward-fn compute_score.py:compute_score_fapo \
  --reward-kwargs '{"penalty": 1.0, "genrm_max_tokens": 16384, "judge_test": true}' "${WHERE[@]}" \
  --policy-ranks 4 --rollout vllm --rollout-servers 2 \
  --total-steps 200 --train-batch-size 512 --group-size 8 --mini-batch-size 32 \
  --max-prompt-length 2048 --max-response-length 8192 --overlong-buffer 4096 --overlong-factor 1.0 \
  --temperature 1.0 --lr 1e-6 --adam-betas 0.9 0.999 --lr-warmup-steps 10 --weight-decay 0.1 \
  --max-grad-norm 1.0 --clip-low 0.2 --clip-high 0.28 --clip-c 10 --entropy-coef 0 \
  --val-every 10 --val-n 32 --val-temperature 1.0 --val-top-p 0.7 \
  --gradient-checkpointing --save-every 20 --resume auto "$@"
