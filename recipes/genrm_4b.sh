#!/usr/bin/env bash
# The paper's judge, GenRM-4B (Table 1 and eq. 7), trained with GRPO on FAPO-Critic.
# Data: python prepare_data.py --tasks critic --out-dir data
#
# Hardware: one node with eight 80 GB GPUs, for four policy ranks and four policy servers. To check memory and
# placement, set TRAINER="-m tools.plan_run".
# Disk: 2.4 TB in OUT for 50 checkpoints of 48 GB, and 8 GB for the model. All checkpoints are kept because the
# authors chose an early one for its short critiques. --keep-checkpoints 2 reduces the space to 150 GB.
source "$(dirname "$0")/paths.sh"

python ${TRAINER:-grpo_trainer.py} --model Qwen/Qwen3-4B-Instruct-2507 --out-dir "$OUT/genrm_4b" \
  --train-file "$DATA/fapo_critic_train.parquet" --val-file "$DATA/fapo_critic_test.parquet" \
  --reward-fn compute_score.py:compute_score_fapo_genrm \
  --policy-ranks 4 --rollout vllm --rollout-servers 4 \
  --total-steps 500 --train-batch-size 512 --group-size 16 --mini-batch-size 32 \
  --max-prompt-length 5120 --max-response-length 8192 --overlong-buffer 4096 --overlong-factor 1.0 \
  --temperature 1.2 --lr 1e-6 --adam-betas 0.9 0.999 --lr-warmup-steps 10 --weight-decay 0.1 \
  --max-grad-norm 1.0 --clip-low 0.2 --clip-high 0.28 --clip-c 10 --entropy-coef 0 \
  --val-every 10 --val-n 1 --val-temperature 0.6 --val-top-p 0.95 \
  --gradient-checkpointing --save-every 10 --keep-checkpoints 0 --resume auto "$@"
