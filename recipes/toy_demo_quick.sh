#!/usr/bin/env bash
# FAPO in miniature without a server: an exact oracle is the judge. To use a different seed, run
# SEED=1 bash recipes/toy_demo_quick.sh.
source "$(dirname "$0")/toy_runs.sh"
SEED=${SEED:-0}
RUNS=outputs/demo_quick_seed$SEED
rm -rf "$RUNS"  # results of an earlier demo
mkdir -p "$RUNS"

stage "1. The toy world: problems, and a warm-started policy of 1 M parameters"
[ -f data/toy/policy/model.safetensors ] ||
  python prepare_data.py --tasks toy --out-dir data/toy

stage "2. Training two policies from one checkpoint, with the outcome reward and with FAPO and the oracle"
SHORT=(--total-steps 45 --val-every 0)
train_policy data/toy "$SEED" "$RUNS/baseline" "${RULE[@]}" "${SHORT[@]}" >"$RUNS/baseline.log" 2>&1 &
BASELINE=$!
train_policy data/toy "$SEED" "$RUNS/fapo" "${ORACLE[@]}" "${SHORT[@]}"
wait $BASELINE || { cat "$RUNS/baseline.log"; exit 1; }

stage "3. The table and the web page"
python -m toy.report --runs "$RUNS"
python -m tools.view_run "$RUNS"
stage "done"
echo 'In the table, compare "flawed positives" and "fully correct" of the two trained policies.'
echo 'On the page, click a point of a curve to read the samples of that step.'
