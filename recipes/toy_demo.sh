#!/usr/bin/env bash
# FAPO in miniature, end to end. The demo trains a judge with GRPO and serves it with vLLM behind the router. From
# the same checkpoint, it trains two policies, one with the outcome reward and one with FAPO. To use a different
# seed, run SEED=1 bash recipes/toy_demo.sh.
source "$(dirname "$0")/toy_runs.sh"
refuse_taken_port
SEED=${SEED:-0}
RUNS=outputs/demo_seed$SEED
rm -rf "$RUNS"  # results of an earlier demo
mkdir -p "$RUNS"

stage "1. The toy world: problems, and two warm-started models of 1 M parameters"
[ -f data/toy/judge/model.safetensors ] && [ -f data/toy/policy/model.safetensors ] ||
  python prepare_data.py --tasks toy --out-dir data/toy

stage "2. Training the judge with GRPO and, at the same time, a policy with the outcome reward only"
train_policy data/toy "$SEED" "$RUNS/baseline" "${RULE[@]}" >"$RUNS/baseline.log" 2>&1 &
BASELINE=$!
train_judge data/toy "$SEED" "$RUNS/judge"
wait $BASELINE || { cat "$RUNS/baseline.log"; exit 1; }
python -m toy.report --runs "$RUNS" --so-far

stage "3. Serving the judge with vLLM behind the router, and training the same policy with FAPO"
train_policy data/toy "$SEED" "$RUNS/fapo" "${JUDGE[@]}" --val-every 20 &  # The first samples wait for the server.
FAPO=$!
serve_judge "$RUNS/judge/checkpoints/step_60" "$RUNS/genrm_logs"
until grep -q '"step": 20,.*"val/' "$RUNS/fapo/metrics.jsonl" 2>/dev/null; do
  kill -0 $FAPO 2>/dev/null || wait $FAPO
  sleep 1
done
stage "4. An interim table, after a third of FAPO's steps"
python -m toy.report --runs "$RUNS" --so-far
wait $FAPO

stage "5. The final tables and the web page"
python -m toy.report --runs "$RUNS"
python -m tools.view_run "$RUNS"
stage "done"
echo 'In the last table, compare "flawed positives" and "fully correct" of the two trained policies.'
echo 'On the page, click a point of a curve to read the samples of that step.'
