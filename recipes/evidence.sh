#!/usr/bin/env bash
# The evidence: the demo's comparison over three warm starts and three seeds each, with the served judge, the oracle and PAPO;
# other penalties; a judge that can be played; a weak start. About two hours on two cores. What is finished is not run again, so
# it can be stopped and started anew. Ends with docs/make_evidence.py, which writes docs/evidence/.
source "$(dirname "$0")/toy_runs.sh"
OUT=${OUT:-outputs/evidence}
LANES=${LANES:-$(getconf _NPROCESSORS_ONLN)}  # nproc would say what OMP_NUM_THREADS says
SEEDS="0 1 2"
mkdir -p "$OUT"

once() {  # once NAME COMMAND...: runs it, in a lane of its own, unless it was finished before; its output goes to NAME.log
  [ -f "$OUT/$1.done" ] && return
  while [ "$(jobs -rp | wc -l)" -ge "$LANES" ]; do wait -n; done
  mkdir -p "$(dirname "$OUT/$1")"
  { "${@:2}" >"$OUT/$1.log" 2>&1 || { echo "error: $1 failed; see $OUT/$1.log"; exit 1; }
    touch "$OUT/$1.done"; stage "$1"; } &
}
all_done() { while [ -n "$(jobs -rp)" ]; do wait -n; done; }
world() {  # world NAME KIND SEED MODELS: its files, and its models
  for model in $4; do
    once "$1/$model" python prepare_data.py --tasks toy --toy-kind "$2" --toy-models "$model" --seed "$3" --out-dir "$OUT/$1"
  done
}
served() {  # served NAME SEEDS: FAPO with the judge of that world, trained and served
  local seed unfinished=""
  for seed in $2; do [ -f "$OUT/$1/fapo_judge_seed$seed.done" ] || unfinished=1; done
  [ "$unfinished" ] || return 0
  serve_judge "$OUT/$1/trained_judge/checkpoints/step_60" "$OUT/$1/genrm_logs"
  LANES=$((LANES + 2))  # the server is a job, too, and each run waits for it half of the time
  for seed in $2; do
    once "$1/fapo_judge_seed$seed" train_policy "$OUT/$1" "$seed" "$OUT/$1/fapo_judge_seed$seed" "${JUDGE[@]}" --resume auto
  done
  while [ "$(jobs -rp | wc -l)" -gt 1 ]; do wait -n; done
  LANES=$((LANES - 2))
  kill $SERVER; wait $SERVER || true
}

for warm in 0 1 2; do world "warm$warm" standard "$warm" "judge policy"; done
world weak weak_policy 0 policy
all_done
for warm in 0 1 2; do
  name=warm$warm
  once "$name/trained_judge" train_judge "$OUT/$name" 0 "$OUT/$name/trained_judge"
  for seed in $SEEDS; do
    once "$name/rule_seed$seed" train_policy "$OUT/$name" "$seed" "$OUT/$name/rule_seed$seed" "${RULE[@]}" --resume auto
    once "$name/fapo_oracle_seed$seed" train_policy "$OUT/$name" "$seed" "$OUT/$name/fapo_oracle_seed$seed" "${ORACLE[@]}" --resume auto
    once "$name/papo_oracle_seed$seed" train_policy "$OUT/$name" "$seed" "$OUT/$name/papo_oracle_seed$seed" "${ORACLE[@]}" \
      --advantage papo --resume auto
  done
  all_done
  served "$name" "$SEEDS"
done
for seed in $SEEDS; do  # from a start at which wrong answers outnumber right ones
  for pay in rule fapo_oracle; do
    flags=("${ORACLE[@]}") && [ "$pay" = fapo_oracle ] || flags=("${RULE[@]}")
    once "weak/${pay}_seed$seed" train_policy "$OUT/weak" "$seed" "$OUT/weak/${pay}_seed$seed" "${flags[@]}" --resume auto
  done
done
for penalty in 0.667 1.333; do  # lambda, as in paper Table 5 (there as 1 - lambda)
  for seed in $SEEDS; do
    once "warm0/penalty${penalty}_seed$seed" train_policy "$OUT/warm0" "$seed" "$OUT/warm0/penalty${penalty}_seed$seed" "${ORACLE[@]}" \
      --reward-kwargs "{\"penalty\": $penalty}" --resume auto
  done
done
world narrow narrow_judge 0 "judge policy"  # a judge that was shown forgotten carries only
all_done
once narrow/trained_judge train_judge "$OUT/narrow" 0 "$OUT/narrow/trained_judge"
all_done
served narrow "$SEEDS"
python docs/make_evidence.py --runs "$OUT"
