#!/usr/bin/env bash
# A discriminative reward model in the toy world: a classifier is trained, served by vLLM's /classify, and a
# policy learns from its score; then from it and the judge at once. SEED=1 bash recipes/toy_disrm.sh [FLAGS]
# The flags go to both runs of the trainer.
source "$(dirname "$0")/toy_runs.sh"
SEED=${SEED:-0} CLASSIFIER_STEPS=${CLASSIFIER_STEPS:-400}
RUNS=outputs/disrm_seed$SEED
rm -rf "$RUNS"  # of an earlier run
mkdir -p "$RUNS"

stage "1. The toy world, and a classifier that tells sound solutions from all others"
[ -f data/toy/judge/model.safetensors ] || python prepare_data.py --tasks toy --out-dir data/toy
python recipes/toy_classifier.py --out-dir "$RUNS/classifier" --seed "$SEED" --steps "$CLASSIFIER_STEPS"

stage "2. A policy that is paid its score"
train_policy data/toy "$SEED" "$RUNS/scalar" \
  --genrm "$RUNS/classifier" --reward-model-task classify \
  --reward-fn recipes/toy_disrm_reward.py:compute_score_classifier \
  --genrm-cpus 1 --genrm-vllm-args="--max-model-len 512" "$@"

stage "3. Two reward models at once, for a few steps: the judge that writes, as it ships, and the classifier"
train_policy data/toy "$SEED" "$RUNS/both" \
  --genrm judge=data/toy/judge classifier="$RUNS/classifier" --reward-model-task generate classify \
  --reward-model-tokenizer "$RUNS/classifier" --reward-fn recipes/toy_disrm_reward.py:compute_score_both \
  --reward-kwargs '{"prompt_style": "brief", "genrm_temperature": 0, "genrm_max_tokens": 96}' \
  --genrm-cpus 1 --genrm-vllm-args="--max-model-len 512" --total-steps 5 --val-every 0 "$@"

stage "4. The page"
python -m tools.view_run "$RUNS"
