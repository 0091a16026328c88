#!/usr/bin/env bash
# The paper's 32B FAPO run (Table 1). The run starts its own judge. With JUDGE=HOST:PORT, it uses a running judge.
# Data: python prepare_data.py --tasks dapo aime24 aime25 gpqa --out-dir data
# GPQA is gated. Accept its terms on the Hub and set HF_TOKEN, or leave out gpqa and append the flags
# --val-file data/aime24_test.parquet data/aime25_test.parquet
#
# Hardware: four nodes with eight 80 GB GPUs each (docs/cluster.md). The run has 16 policy ranks, six policy servers
# with two GPUs each, and four judges. Between updates, weights and optimizer states are in host memory (210 to 430 GB
# on the nodes with ranks). The node of rank 0 needs another 130 GB for each checkpoint, and each node with policy
# servers 66 GB in /dev/shm. On two nodes, pass --policy-ranks 8 --rollout-servers 3 --genrm-servers 2. To check memory
# and placement, set TRAINER="-m tools.plan_run".
# Disk: 1.2 TB in OUT (two checkpoints of 390 GB, and a third while it is being written), 74 GB for the models
# (66 GB with JUDGE).
# Pass --model as a folder on the shared file system. A Hub name is downloaded on each node, unless HF_HOME was
# set to a shared folder on each node before `ray start`.
source "$(dirname "$0")/paths.sh"

WHERE=(--genrm dyyyyyyyy/FAPO-GenRM-4B --genrm-servers 4)
[ -z "${JUDGE:-}" ] || WHERE=(--router-address "$JUDGE")

python ${TRAINER:-grpo_trainer.py} --model Qwen/Qwen2.5-32B --out-dir "$OUT/fapo_32b" \
  --train-file "$DATA/math-dapo_train.parquet" --val-file "$DATA/aime24_test.parquet" \
  "$DATA/aime25_test.parquet" "$DATA/gpqa-diamond_test.parquet:4" \
  --reward-fn compute_score.py:compute_score_fapo \
  --reward-kwargs '{"penalty": 1.0, "genrm_max_tokens": 16384, "judge_test": true}' "${WHERE[@]}" \
  --policy-ranks 16 --policy-offload --rollout vllm --rollout-servers 6 --rollout-tensor-parallel 2 \
  --total-steps 600 --train-batch-size 512 --group-size 8 --mini-batch-size 32 \
  --max-prompt-length 2048 --max-response-length 20480 --overlong-buffer 4096 --overlong-factor 1.0 \
  --temperature 1.0 --lr 1e-6 --adam-betas 0.9 0.999 --lr-warmup-steps 10 --weight-decay 0.1 \
  --max-grad-norm 1.0 --clip-low 0.2 --clip-high 0.28 --clip-c 10 --entropy-coef 0 \
  --val-every 10 --val-n 32 --val-temperature 1.0 --val-top-p 0.7 \
  --gradient-checkpointing --save-every 20 --resume auto "$@"
