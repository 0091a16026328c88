#!/usr/bin/env bash
# FAPO with LoRA adapters for a 7B policy on one 80 GB GPU, which the policy shares with its vLLM server and the
# judge. The batch is a quarter of the paper's, and the learning rate is ten times the paper's.
# Data: python prepare_data.py --tasks dapo aime24 aime25 gpqa --out-dir data
# GPQA is gated. Accept its terms on the Hub and set HF_TOKEN, or leave out gpqa and append the flags
# --val-file data/aime24_test.parquet data/aime25_test.parquet
#
# Memory, as estimated with TRAINER="-m tools.plan_run" and the flags --gpus 1 --gpu-gb 80:
#     24.00 GB  policy server: 15.23 GB of weights, room for 127,330 tokens (longest sequence: 10,240): it fits
#     17.60 GB  genrm: 8.04 GB of weights, room for 56,435 tokens (longest sequence: 28,672): it fits
#     17.73 GB  weights
#      0.32 GB  gradients
#      0.65 GB  Adam
#      8.29 GB  update: activations of a micro-batch
#     27.00 GB  approximate peak, of 36.0 GB on the GPU of rank 0: it fits
# Disk: 19 GB in OUT (adapters and their optimizer, and the last checkpoint merged), 23 GB for the models.
source "$(dirname "$0")/paths.sh"

python ${TRAINER:-grpo_trainer.py} --model Qwen/Qwen2.5-Math-7B --max-positions 32768 --out-dir "$OUT/fapo_7b_one_gpu" \
  --train-file "$DATA/math-dapo_train.parquet" --val-file "$DATA/aime24_test.parquet" \
  "$DATA/aime25_test.parquet" "$DATA/gpqa-diamond_test.parquet:4" \
  --reward-fn compute_score.py:compute_score_fapo \
  --reward-kwargs '{"penalty": 1.0, "genrm_max_tokens": 16384, "judge_test": true}' \
  --genrm dyyyyyyyy/FAPO-GenRM-4B --genrm-gpu-share 0.22 \
  --genrm-vllm-args="--max-model-len 28672 --max-num-seqs 64" --max-in-flight 16 \
  --policy-gpu-share 0.45 --rollout-gpu-share 0.3 --rollout-vllm-args="--max-num-seqs 128" \
  --lora-rank 32 --lora-alpha 64 --max-tokens-per-micro-batch 10240 --gradient-checkpointing \
  --train-batch-size 128 --lr 1e-5 --val-n 8 --val-every 20 --resume auto "$@"
