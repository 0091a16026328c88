#!/usr/bin/env bash
# Trains in the second world, which has no planted flaws, from one of the three shipped checkpoints. The forty
# steps take two minutes on a core with AVX-512. Additional flags override the flags in this recipe, so you can
# compare your own reward function or advantage with the results in docs/evidence.md.
#   bash recipes/second_world.sh 1 outputs/own1_fapo             # FAPO from checkpoint 1, with the oracle as the judge
#   bash recipes/second_world.sh 1 outputs/own1_mine --seed 2 --reward-fn mine.py:score --advantage mine.py:credit
#   python -m toy.report --runs outputs/own1_fapo outputs/own1_mine    # compares several runs in a table
source "$(dirname "$0")/toy_runs.sh"
[[ ${1:-} == [012] && -n ${2:-} ]] || {
  echo "usage: bash recipes/second_world.sh CHECKPOINT OUT_DIR [TRAINER FLAGS]; CHECKPOINT is 0, 1 or 2" >&2
  exit 2
}
WORLD=data/own$1
[ -f "$WORLD/toy_train.parquet" ] ||
  python -m toy.warm_start --kind own_flaws --seed "$1" --models --out-dir "$WORLD"  # only the rows, not the models
train_own "$WORLD" 0 "$2" "${@:3}"
python -m toy.report --runs "$2" || true  # This fails if there was no evaluation before training.
