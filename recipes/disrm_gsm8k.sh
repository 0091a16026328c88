#!/usr/bin/env bash
# GSM8K with the score of a discriminative reward model as the reward. reward/acc measures the accuracy.
#
#   bash recipes/disrm_gsm8k.sh POLICY REWARD_MODEL [OUT_DIR] [FURTHER FLAGS]
#   bash recipes/disrm_gsm8k.sh Qwen/Qwen2.5-0.5B-Instruct Skywork/Skywork-Reward-V2-Qwen3-0.6B
#
# POLICY and REWARD_MODEL are folders or Hub names. POLICY can be any instruct model. REWARD_MODEL can be any
# sequence classifier with one label that vLLM can serve and whose tokenizer has a chat template. Policy, policy
# server and reward model share one 24 GB GPU. Small models also work without a GPU.
# It has not been run as a whole yet, only one step with two toy models. To check memory and placement, set
# TRAINER="-m tools.plan_run".
# If reward/score rises but reward/acc does not, the policy is hacking the reward model.
[[ ${1:--} != -* && ${2:--} != -* && ${3:-} != -* ]] || {
  echo "usage: bash recipes/disrm_gsm8k.sh POLICY REWARD_MODEL [OUT_DIR] [FURTHER FLAGS]; flags need OUT_DIR" >&2
  exit 2
}
POLICY=$1 REWARD_MODEL=$2
[ ! -d "$POLICY" ] || POLICY=$(realpath "$POLICY")
[ ! -d "$REWARD_MODEL" ] || REWARD_MODEL=$(realpath "$REWARD_MODEL")
RUN=${3:+$(realpath -m "$3")}
WHERE=()
[ -z "${SOURCE_DIR:-}" ] || WHERE=(--source-dir "$(realpath -m "$SOURCE_DIR")")
source "$(dirname "$0")/paths.sh"

python prepare_data.py --tasks gsm8k --out-dir "$DATA" "${WHERE[@]}"
python ${TRAINER:-grpo_trainer.py} --model "$POLICY" --out-dir "${RUN:-$OUT/disrm_gsm8k}" \
  --train-file "$DATA/gsm8k_train.parquet" --val-file "$DATA/gsm8k_test.parquet" \
  --genrm "$REWARD_MODEL" --reward-model-task classify --genrm-vllm-args="--max-model-len 2048" \
  --policy-gpu-share 0.5 --rollout-gpu-share 0.2 --genrm-gpu-share 0.25 \
  --total-steps 100 --train-batch-size 64 --mini-batch-size 16 --group-size 8 \
  --max-response-length 512 --overlong-buffer 128 --max-tokens-per-micro-batch 4096 --gradient-checkpointing \
  --val-top-p 1 --val-every 20 --save-every 20 --resume auto "${@:4}"
