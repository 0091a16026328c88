#!/usr/bin/env bash
# FAPO with LoRA adapters for a 1.5B policy on one 24 GB GPU, which the policy shares with its vLLM server and a
# small judge. The memory below is that of a judge with the shape of Qwen2.5-0.5B. This command trains one on the same
# GPU (planned with `python -m tools.plan_run`, not run). Then set JUDGE_MODEL=outputs/small_judge/checkpoints/step_200.
#
#   python grpo_trainer.py --model Qwen/Qwen2.5-0.5B-Instruct --out-dir outputs/small_judge \
#     --train-file data/fapo_critic_train.parquet --val-file data/fapo_critic_test.parquet \
#     --reward-fn compute_score.py:compute_score_fapo_genrm \
#     --policy-gpu-share 0.65 --rollout-gpu-share 0.3 --max-tokens-per-micro-batch 8192 --gradient-checkpointing \
#     --max-prompt-length 5120 --max-response-length 3072 --overlong-buffer 1024 --temperature 1.2 --resume auto
#
# Data: python prepare_data.py --tasks dapo aime24 critic --out-dir data
#
# Memory, as estimated with TRAINER="-m tools.plan_run" and the flags --gpus 1 --gpu-gb 24:
#      6.24 GB  policy server: 3.55 GB of weights, room for 26,239 tokens (longest sequence: 4,096): it fits
#      3.84 GB  genrm: 0.99 GB of weights, room for 74,743 tokens (longest sequence: 8,192): it fits
#      3.70 GB  weights
#      0.15 GB  gradients
#      0.30 GB  Adam
#      4.03 GB  update: activations of a micro-batch
#      8.17 GB  approximate peak, of 12.5 GB on the GPU of rank 0: it fits
# Disk: 5 GB in OUT (adapters and their optimizer, and the last checkpoint merged), 5 GB for the models,
# and 18 GB for three checkpoints of the judge, one of which is being written.
source "$(dirname "$0")/paths.sh"

python ${TRAINER:-grpo_trainer.py} --model Qwen/Qwen2.5-Math-1.5B --out-dir "$OUT/fapo_1.5b_24gb" \
  --train-file "$DATA/math-dapo_train.parquet" --val-file "$DATA/aime24_test.parquet" \
  --reward-fn compute_score.py:compute_score_fapo \
  --reward-kwargs '{"penalty": 1.0, "genrm_max_tokens": 3072, "judge_test": true}' \
  --genrm "${JUDGE_MODEL:?set it to the folder or Hub name of a judge}" --genrm-gpu-share 0.16 \
  --genrm-vllm-args="--max-model-len 8192" --policy-gpu-share 0.52 --rollout-gpu-share 0.26 \
  --lora-rank 32 --lora-alpha 64 --max-tokens-per-micro-batch 4096 --gradient-checkpointing \
  --train-batch-size 64 --mini-batch-size 16 --max-prompt-length 1024 --max-response-length 3072 \
  --overlong-buffer 1024 --lr 1e-5 --val-n 8 --val-every 20 --resume auto "$@"
