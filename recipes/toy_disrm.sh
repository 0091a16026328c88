#!/usr/bin/env bash
# A discriminative reward model in the toy world: trains a classifier, serves it with vLLM's /classify, and trains
# three policies with it. For the first policy, the classifier's score is the reward. For the second, the classifier
# is FAPO's judge. The third uses both the classifier and the generative judge, for a few steps.
#   SEED=1 bash recipes/toy_disrm.sh [TRAINER FLAGS]
# All seeds share one classifier, and the flags apply to all training runs. docs/classifier.md reports the results.
source "$(dirname "$0")/toy_runs.sh"
SEED=${SEED:-0} CLASSIFIER_STEPS=${CLASSIFIER_STEPS:-600}
CLASSIFIER=outputs/disrm/classifier
RUNS=outputs/disrm/seed$SEED
rm -rf "$RUNS"  # results of an earlier run
mkdir -p "$RUNS"

stage "1. The toy world, and training a classifier that recognises sound solutions"
[ -f data/toy/judge/model.safetensors ] || python prepare_data.py --tasks toy --out-dir data/toy
[ -f "$CLASSIFIER/tokenizer.json" ] ||
  python recipes/toy_classifier.py --out-dir "$CLASSIFIER" --steps "$CLASSIFIER_STEPS"

stage "2. Training two policies: with the classifier's score, and with FAPO and the classifier as the judge"
for name in classifier flagged; do
  train_policy data/toy "$SEED" "$RUNS/$name" \
    --genrm "$CLASSIFIER" --reward-model-task classify \
    --reward-fn "recipes/toy_disrm_reward.py:compute_score_$name" \
    --genrm-cpus 1 --genrm-vllm-args="--max-model-len 512" "$@"
done

stage "3. Two reward models at once, for a few steps: the shipped judge and the classifier"
train_policy data/toy "$SEED" "$RUNS/both" \
  --genrm judge=data/toy/judge classifier="$CLASSIFIER" --reward-model-task generate classify \
  --reward-model-tokenizer "$CLASSIFIER" --reward-fn recipes/toy_disrm_reward.py:compute_score_both \
  --reward-kwargs '{"prompt_style": "brief", "genrm_temperature": 0, "genrm_max_tokens": 96}' \
  --genrm-cpus 1 --genrm-gpu-share 0.4 --genrm-vllm-args="--max-model-len 512" --total-steps 10 --val-every 0 "$@"

stage "4. The web page"
python -m tools.view_run "$RUNS"
