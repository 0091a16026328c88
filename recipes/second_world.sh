#!/usr/bin/env bash
# A run in the second world, which has no planted flaws, from one of the three shipped checkpoints, as in
# docs/evidence.md: forty steps, two minutes on a core with AVX-512. Further flags go to the trainer, where
# the last one wins, so that you can compare your own reward function or advantage with the results there:
#   bash recipes/second_world.sh 0 outputs/own0_fapo                 # FAPO from start 0, with the oracle as the judge
#   bash recipes/second_world.sh 1 outputs/own1_mine --seed 2 --reward-fn mine.py:score --advantage mine
#   python -m toy.report --runs outputs/own1_fapo outputs/own1_mine    # a table of several
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} == [012] && -n ${2:-} ]] || {
  echo "usage: bash recipes/second_world.sh START OUT_DIR [FLAGS OF THE TRAINER], with START 0, 1 or 2" >&2
  exit 2
}
WORLD=data/own$1
[ -f "$WORLD/toy_train.parquet" ] ||
  python -m toy.warm_start --kind own_flaws --seed "$1" --models --out-dir "$WORLD"  # its rows, no models
train_own "$WORLD" 0 "$2" "${@:3}"
python -m toy.report --runs "$2" || true  # a run without an evaluation at its start has no table
