#!/usr/bin/env bash
# Trains in the second world, which has no planted flaws, from one of the three shipped checkpoints, as in
# docs/evidence.md. The forty steps take two minutes on a core with AVX-512. Further flags go to the trainer,
# where the last one wins: compare your own reward function or advantage with the results on that page.
#   bash recipes/second_world.sh 0 outputs/own0_fapo             # FAPO from checkpoint 0; the oracle is the judge
#   bash recipes/second_world.sh 1 outputs/own1_mine --seed 2 --reward-fn mine.py:score --advantage mine
#   python -m toy.report --runs outputs/own1_fapo outputs/own1_mine    # a table of several runs
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} == [012] && -n ${2:-} ]] || {
  echo "usage: bash recipes/second_world.sh START OUT_DIR [FLAGS OF THE TRAINER], with START 0, 1 or 2" >&2
  exit 2
}
WORLD=data/own$1
[ -f "$WORLD/toy_train.parquet" ] ||
  python -m toy.warm_start --kind own_flaws --seed "$1" --models --out-dir "$WORLD"  # only the rows, not the models
train_own "$WORLD" 0 "$2" "${@:3}"
python -m toy.report --runs "$2" || true  # toy.report needs an evaluation before the first step
