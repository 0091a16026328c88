#!/usr/bin/env bash
# Runs all experiments of docs/evidence.md, with up to three seeds each.
#
# First world: repeats the demo's comparison from three checkpoints with the served judge, the oracle and PAPO. It
# also compares the algorithms, varies the penalty, and shows how a policy exploits a narrow judge and how a weak
# policy learns.
# Second world: compares the algorithms from three checkpoints without planted flaws. It also varies the judge's
# task, the penalty, the learning rate, the KL term and the number of steps, distils from a teacher, simulates
# judges that overlook flaws, and trains and serves two judges.
# Third world (tools): compares the outcome reward and FAPO at four costs per call, tries other advantages and a rule
# instead of a judge, separates the cost from GRPO's normalisation, and serves a judge and trains it further.
# Public tasks (public): compares both rewards in reasoning-gym's gcd, from three initial policies, and in gymnasium's
# FrozenLake.
#
# WORLDS="first second tools public" selects the worlds. If you stop the script and start it again, it does not repeat
# finished runs. At the end, docs/make_evidence.py writes docs/evidence/.
source "$(dirname "$0")/toy_runs.sh"
OUT=$(realpath -m "${OUT:-outputs/evidence}")
LANES=${LANES:-$(getconf _NPROCESSORS_ONLN)}  # nproc would print OMP_NUM_THREADS, which is 1 here.
WORLDS=${WORLDS:-first second tools public}
SEEDS="0 1 2"
# The number of paragraphs is fixed, so additional steps cannot earn anything, and the whole prefix is kept.
VPPO=(--advantage recipes/advantages.py:vppo --advantage-kwargs '{"prefix_cut": 0}')
SPARED=(--advantage recipes/advantages.py:spare_good_prefix)
JUDGE_OF_WRONG=("${JUDGE[@]:0:5}" "${JUDGE[5]/\{/\{\"judge_wrong\": true, }")
SCHEDULE=recipes/lambda_schedule.py
LORA=(--lora-rank 16 --lora-alpha 32 --lr 1e-3)
mkdir -p "$OUT"

once() {  # once NAME COMMAND...: runs COMMAND in the background with the log NAME.log, unless NAME is finished
  [ -f "$OUT/$1.done" ] && return
  while [ "$(jobs -rp | wc -l)" -ge "$LANES" ]; do wait -n; done
  mkdir -p "$(dirname "$OUT/$1")"
  { "${@:2}" >"$OUT/$1.log" 2>&1 || { echo "error: $1 failed; read $OUT/$1.log"; exit 1; }
    touch "$OUT/$1.done"; stage "$1"; } &
  STARTED+=($!)
}
STARTED=()
all_done() {  # Waits for all runs. If one has failed, perhaps long ago, the script ends.
  local run
  for run in "${STARTED[@]}"; do wait "$run"; done
  STARTED=()
}
world() {  # world NAME KIND SEED MODELS [FLAGS]: writes the world's rows and trains these models
  for model in $4; do
    once "$1/$model" python -m toy.warm_start --kind "$2" --models "$model" --seed "$3" --out-dir "$OUT/$1" "${@:5}"
  done
}
policy() {  # policy WORLD ALGORITHM SEED [FLAGS]: trains a policy
  once "$1/$2_seed$3" train_policy "$OUT/$1" "$3" "$OUT/$1/$2_seed$3" --resume auto --val-greedy "${@:4}"
}
unfinished() {  # unfinished WORLD ALGORITHM...: succeeds if a run of one of these algorithms is missing
  local seed name
  for seed in $SEEDS; do
    for name in "${@:2}"; do [ -f "$OUT/$1/${name}_seed$seed.done" ] || return 0; done
  done
  return 1
}
end_judge() {  # Stops the judge's server when all runs are done.
  all_done
  kill $SERVER; wait $SERVER || true
}
served() {  # served WORLD [prefix_judge vppo_judge]: runs FAPO and these algorithms with the trained judge
  local seed
  unfinished "$1" fapo_judge "${@:2}" || return 0
  serve_judge "$OUT/$1/trained_judge/checkpoints/step_60" "$OUT/$1/genrm_logs"
  LANES=$((LANES + 2))  # one for the server, and one because runs wait for the server half of the time
  for seed in $SEEDS; do
    policy "$1" fapo_judge "$seed" "${JUDGE[@]}"
    [ $# -gt 1 ] || continue
    policy "$1" prefix_judge "$seed" "${JUDGE_OF_WRONG[@]}" "${SPARED[@]}"
    policy "$1" vppo_judge "$seed" "${JUDGE_OF_WRONG[@]}" "${VPPO[@]}"
  done
  end_judge
  LANES=$((LANES - 2))
}

first_world() {
  for warm in 0 1 2; do world "warm$warm" standard "$warm" "judge policy"; done
  world weak weak_policy 0 policy
  all_done
  for warm in 0 1 2; do
    name=warm$warm
    once "$name/trained_judge" train_judge "$OUT/$name" 0 "$OUT/$name/trained_judge" --val-greedy
    for seed in $SEEDS; do
      policy "$name" rule "$seed" "${RULE[@]}"
      policy "$name" fapo_oracle "$seed" "${ORACLE[@]}"
      policy "$name" papo_oracle "$seed" "${ORACLE[@]}" --advantage recipes/advantages.py:papo
    done
    all_done
    served "$name"
  done
  for warm in 0 1 2; do  # Compare the algorithms. The page's numbers come from a different kind of processor.
    name=algo$warm
    world "$name" standard "$warm" "judge policy"
    all_done
    for seed in $SEEDS; do
      policy "$name" rule "$seed" "${RULE[@]}"
      policy "$name" fapo_oracle "$seed" "${ORACLE[@]}"
      policy "$name" prefix_oracle "$seed" "${ORACLE[@]}" "${SPARED[@]}"
      policy "$name" vppo_oracle "$seed" "${ORACLE[@]}" "${VPPO[@]}"
      policy "$name" papo_oracle "$seed" "${ORACLE[@]}" --advantage recipes/advantages.py:papo
      [ $warm = 0 ] || continue
      policy "$name" dr_grpo_oracle "$seed" "${ORACLE[@]}" --advantage dr_grpo
      policy "$name" terms_oracle "$seed" "${ORACLE[@]}" --advantage recipes/advantages.py:terms \
        --advantage-kwargs '{"weights": {"acc": 1, "flawed_positive": -0.5}}'
      policy "$name" gspo_oracle "$seed" "${ORACLE[@]}" --loss gspo
      policy "$name" cispo_oracle "$seed" "${ORACLE[@]}" --loss cispo
      policy "$name" lora_oracle "$seed" "${ORACLE[@]}" "${LORA[@]}"
    done
  done
  all_done
  once algo0/trained_judge train_judge "$OUT/algo0" 0 "$OUT/algo0/trained_judge" --val-greedy
  all_done
  served algo0 prefix_judge vppo_judge
  for seed in $SEEDS; do
    policy weak rule "$seed" "${RULE[@]}"  # This checkpoint gives more wrong answers than correct ones.
    policy weak fapo_oracle "$seed" "${ORACLE[@]}"
    forbid "$seed"
    for penalty in 0.667 1.333; do  # These values of lambda are from the paper's Table 5, which lists 1 - lambda.
      policy warm0 "penalty$penalty" "$seed" "${ORACLE[@]}" --reward-kwargs "{\"penalty\": $penalty}"
    done
  done
  world narrow narrow_judge 0 "judge policy"  # The judge has seen only forgotten carries.
  all_done
  once narrow/trained_judge train_judge "$OUT/narrow" 0 "$OUT/narrow/trained_judge" --val-greedy
  all_done
  served narrow
}

forbid() {  # forbid SEED: scores flawed positives like wrong answers, from the first step or after step 30
  policy weak penalty2 "$1" "${ORACLE[@]}" --reward-kwargs '{"penalty": 2.0}'
  policy weak later2 "$1" --reward-fn "$SCHEDULE:by_step" --reward-kwargs '{"first": 30, "penalty": 2.0}'
}

own() {  # own CHECKPOINT ALGORITHM SEED [FLAGS]: trains a policy in the second world
  once "own$1/$2_seed$3" train_own "$OUT/own$1" "$3" "$OUT/own$1/$2_seed$3" "${OWN[@]}" "${@:4}"
}
OWN=(--resume auto --samples-per-step 128)
told() {  # told CHECKPOINT NAME SEED JSON [FLAGS]: trains a policy with these settings of the oracle
  own "$1" "$2" "$3" "${ORACLE[@]}" --reward-kwargs "$4" "${@:5}"
}
compare() {  # compare SEED CHECKPOINT: runs the four main algorithms
  own "$2" rule "$1" "${RULE[@]}"
  own "$2" fapo_oracle "$1" "${ORACLE[@]}"
  own "$2" prefix_oracle "$1" "${ORACLE[@]}" "${SPARED[@]}"
  own "$2" vppo_oracle "$1" "${ORACLE[@]}" "${VPPO[@]}"
}
compare_more() {  # compare_more SEED CHECKPOINT: runs two further algorithms
  own "$2" papo_oracle "$1" "${ORACLE[@]}" --advantage recipes/advantages.py:papo
  own "$2" steps_oracle "$1" "${STEPS[@]}"
}
# be_fair SEED: runs FAPO with other penalties, and with a bonus for the correct prefix of a wrong answer. The methods
# that use the position of the first error also run with the oracle queried on correct answers only.
be_fair() {
  told 0 penalty2 "$1" '{"penalty": 2.0}'
  told 0 prefix_right "$1" '{"judge_wrong": false}' "${SPARED[@]}"
  told 0 vppo_right "$1" '{"judge_wrong": false}' "${VPPO[@]}"
  told 0 place_oracle "$1" '{"place": 1.0}'
  told 0 penalty0.5 "$1" '{"penalty": 0.5}'
}
schedule() {  # schedule NAME SEED FUNCTION JSON: trains from checkpoint 0 with a schedule of lambda
  own 0 "$1" "$2" --reward-fn "$SCHEDULE:$3" --reward-kwargs "$4"
}
schedules() {  # schedules SEED: varies lambda with the step or with the majority in the group
  schedule later "$1" by_step '{"first": 20}'
  schedule majority "$1" by_majority '{}'
  schedule later2 "$1" by_step '{"first": 20, "penalty": 2.0}'
  schedule linear "$1" by_step '{"first": 0, "ramp": 20}'
}
overlook() {  # overlook SEED: runs FAPO with judges that find only a fraction of the flawed solutions
  local recall
  for recall in 0.7 0.5 0.9; do told 1 "fapo_recall$recall" "$1" "{\"recall\": $recall}"; done
}
ablate() {  # ablate SEED: tries other learning rates, a KL term and larger groups
  own 0 rule_slow "$1" "${RULE[@]}" --lr 1e-4
  own 0 rule_fast "$1" "${RULE[@]}" --lr 4e-4
  own 0 rule_kl "$1" "${RULE[@]}" --kl-coef 0.05
  own 0 rule_group16 "$1" "${RULE[@]}" --group-size 16 --train-batch-size 8 --mini-batch-size 4
  own 0 fapo_group16 "$1" "${ORACLE[@]}" --group-size 16 --train-batch-size 8 --mini-batch-size 4
}
longer() {  # longer SEED: runs the four main algorithms with five times as many steps
  own 0 rule_long "$1" "${RULE[@]}" --total-steps 200
  own 0 fapo_long "$1" "${ORACLE[@]}" --total-steps 200
  own 0 prefix_long "$1" "${ORACLE[@]}" "${SPARED[@]}" --total-steps 200
  own 0 vppo_long "$1" "${ORACLE[@]}" "${VPPO[@]}" --total-steps 200
}
distill() {  # distill SEED CHECKPOINT: a teacher scores each token, without rewards (docs/changes/distill.diff)
  local teacher=$OUT/teacher$2/policy
  # Longer warm-starting hardly improves checkpoint 2, so FAPO's final policy is its teacher.
  [ "$2" != 2 ] || teacher=$OUT/own2/fapo_oracle_seed0/checkpoints/step_40
  [ -d "$OUT/changed/recipes" ] || {
    rm -rf "$OUT/changed" "$OUT/changed.partial"
    mkdir "$OUT/changed.partial"
    cp -r ./*.py toy tools cluster docs recipes "$OUT/changed.partial"
    patch -s -p1 -d "$OUT/changed.partial" <docs/changes/distill.diff
    mv "$OUT/changed.partial" "$OUT/changed"
  }
  once "own$2/distill_seed$1" in_copy train_own "$OUT/own$2" "$1" "$OUT/own$2/distill_seed$1" "${OWN[@]}" \
    "${RULE[@]}" --advantage recipes/advantages.py:terms --advantage-kwargs '{"weights": {"acc": 0}}' \
    --max-idle-steps 0 --teacher "$teacher"
}
in_copy() { (cd "$OUT/changed" && "$@"); }
# own_judges: for checkpoint 1, trains one judge on the first world's flaws and one on the policies' own flaws,
# and runs FAPO with each judge.
own_judges() {
  once flaws1/critic_rows python recipes/critic_rows.py --out-dir "$OUT/flaws1" \
    --runs "$OUT"/own1/{rule,fapo_oracle,prefix_oracle,vppo_oracle}_seed{0,1}
  all_done
  own_judge first_judge --train-file "$OUT/own1/fapo_critic_train.parquet"
  own_judge trained_judge --train-file "$OUT/flaws1/fapo_critic_train.parquet"
  all_done
  own_served first_judge fapo_first_judge
  own_served trained_judge fapo_judge
}
own_judge() {  # own_judge NAME FLAGS: trains a judge and evaluates it on solutions of policies
  once "own1/$1" train_judge "$OUT/own1" 0 "$OUT/own1/$1" --val-greedy --max-response-length 160 \
    --val-file "$OUT/flaws1/fapo_critic_test.parquet" "${@:2}"
}
own_served() {  # own_served JUDGE ALGORITHM: runs FAPO with this judge, and once more with tripled steps
  local seed ask=("${JUDGE[@]:0:5}" "${JUDGE[5]/: 96/: 160}")
  if ! unfinished own1 "$2" && [ -f "$OUT/own1/${2}_long_seed0.done" ]; then return 0; fi
  serve_judge "$OUT/own1/$1/checkpoints/step_60" "$OUT/own1/genrm_logs"
  LANES=$((LANES + 1))  # one more for the server
  for seed in $SEEDS; do own 1 "$2" "$seed" "${ask[@]}"; done
  own 1 "${2}_long" 0 "${ask[@]}" --total-steps 120
  end_judge
  LANES=$((LANES - 1))
}
second_world() {  # The most informative runs come first, in case the script is stopped.
  local seed start
  for start in 0 1 2; do  # The repository contains these policies, so only the rows are missing.
    once "own$start/rows" python -m toy.warm_start --kind own_flaws --seed "$start" --models \
      --out-dir "$OUT/own$start"
  done
  all_done
  for seed in 0 1; do
    for start in 1 0 2; do compare $seed $start; done
  done
  all_done
  world own1 own_flaws 1 judge
  world teacher0 own_flaws 0 policy --stop-at 0.7  # The teachers are checkpoints that were trained for longer.
  world teacher1 own_flaws 1 policy --stop-at 0.8
  all_done
  own_judges
  for seed in $SEEDS; do
    for start in 0 1 2; do
      compare $seed $start
      compare_more $seed $start
      distill $seed $start
    done
    longer $seed
    be_fair $seed
    schedules $seed
    ablate $seed
    overlook $seed
  done
  all_done
}

shop() {  # shop CHECKPOINT NAME SEED COST [FLAGS]: trains a policy with a tool whose look-ups cost COST
  once "shop$1/$2_seed$3" train_shop "$OUT/shop$1" "$3" "$OUT/shop$1/$2_seed$3" --resume auto --val-every 0 \
    --save-every 0 --reward-kwargs "{\"call_cost\": $4}" "${@:5}"
}
OUTCOME=(--reward-fn toy/shop_world.py:compute_score_outcome)
FLOOR=(--advantage recipes/advantages.py:floored)
UNDIVIDED=("${FLOOR[@]}" --advantage-kwargs '{"floor": 2}')  # No std is as large, so all are divided by 2.
other_costs() {  # other_costs CHECKPOINT: compares the outcome reward and FAPO at other costs
  local cost
  for cost in 0 0.01 0.1; do
    shop "$1" "outcome_cost$cost" 0 $cost "${OUTCOME[@]}"
    shop "$1" "fapo_cost$cost" 0 $cost
  done
}
other_algorithms() {  # other_algorithms CHECKPOINT: tries other advantages, and a rule instead of a judge
  shop "$1" grounded_rule 0 0.03 --reward-fn toy/shop_world.py:compute_score_grounded_rule
  shop "$1" prefix 0 0.03 "${SPARED[@]}"
  shop "$1" vppo 0 0.03 "${VPPO[@]}"
}
undivided() {  # undivided SEED CHECKPOINT COST [END]: the outcome reward minus a cost, all groups divided by 2
  shop "$2" "outcome_undivided${4-_cost$3}" "$1" "$3" "${OUTCOME[@]}" "${UNDIVIDED[@]}"
}
normalised() {  # normalised SEED CHECKPOINT COST [END]: the same with a smaller floor under the std, and Dr. GRPO
  shop "$2" "outcome_floor${4-_cost$3}" "$1" "$3" "${OUTCOME[@]}" "${FLOOR[@]}"
  shop "$2" "outcome_dr_grpo${4-_cost$3}" "$1" "$3" "${OUTCOME[@]}" --advantage dr_grpo
}
varied() {  # varied CHECKPOINT: other divisors, learning rates and numbers of steps at small costs
  local cost
  shop "$1" outcome_undivided8_cost0.01 0 0.01 "${OUTCOME[@]}" "${FLOOR[@]}" --advantage-kwargs '{"floor": 8}'
  for cost in 0.003 0.01; do
    shop "$1" "outcome_half_cost$cost" 0 $cost "${OUTCOME[@]}" --lr 1e-4
    shop "$1" "outcome_dr_grpo_half_cost$cost" 0 $cost "${OUTCOME[@]}" --advantage dr_grpo --lr 1e-4
    shop "$1" "outcome_dr_grpo_twice_cost$cost" 0 $cost "${OUTCOME[@]}" --advantage dr_grpo --lr 4e-4
    shop "$1" "outcome_dr_grpo_fast_cost$cost" 0 $cost "${OUTCOME[@]}" --advantage dr_grpo --lr 8e-4
  done
  shop "$1" outcome_long_cost0.003 0 0.003 "${OUTCOME[@]}" --total-steps 120
  shop "$1" outcome_undivided_long_cost0.003 0 0.003 "${OUTCOME[@]}" "${UNDIVIDED[@]}" --total-steps 120
  shop "$1" outcome_floor_long_cost0.003 0 0.003 "${OUTCOME[@]}" "${FLOOR[@]}" --total-steps 120
  shop "$1" outcome_dr_grpo_long_cost0.003 0 0.003 "${OUTCOME[@]}" --advantage dr_grpo --total-steps 120
}
shop_judged() {  # shop_judged: serves the shipped judge of this world, and runs FAPO with it
  local seed start
  if ! { unfinished shop0 fapo_judge || unfinished shop1 fapo_judge || unfinished shop2 fapo_judge; }; then return 0; fi
  serve_judge toy/models/shop_judge "$OUT/shop_judge/genrm_logs"
  LANES=$((LANES + 1))  # one more for the server
  for seed in $SEEDS; do
    for start in 0 1 2; do
      shop $start fapo_judge "$seed" 0.03 --reward-fn toy/shop_judge.py:compute_score_fapo \
        --router-address "127.0.0.1:$PORT" --samples-per-step 128
    done
  done
  end_judge
  LANES=$((LANES - 1))
}
shop_judge_trained() {  # shop_judge_trained: trains this judge further, on rows of the policies' own answers
  local rows="$OUT/shop_judge/rows"
  once shop_judge/critic_rows python recipes/critic_rows.py --held-out 400 --out-dir "$rows" \
    --runs "$OUT"/shop{0,1,2}/fapo_judge_seed0
  all_done
  once shop_judge/trained_judge train_judge "$OUT/shop_judge" 0 "$OUT/shop_judge/trained_judge" --val-greedy \
    --model toy/models/shop_judge --train-file "$rows/fapo_critic_train.parquet" \
    --val-file "$rows/fapo_critic_test.parquet" --max-response-length 160
  all_done
}
tool_world() {  # The most informative runs come first, in case the script is stopped.
  local seed start
  for start in 0 1 2; do  # The repository contains these policies, so only the rows are missing.
    once "shop$start/rows" python -m toy.warm_start --kind shop --seed "$start" --models --out-dir "$OUT/shop$start"
  done
  all_done
  for seed in $SEEDS; do
    for start in 0 1 2; do
      shop $start outcome "$seed" 0.03 "${OUTCOME[@]}"
      shop $start fapo "$seed" 0.03
    done
  done
  for seed in $SEEDS; do
    for start in 0 1 2; do
      shop $start outcome_cost0.003 "$seed" 0.003 "${OUTCOME[@]}"
      undivided "$seed" $start 0.003
      normalised "$seed" $start 0.003
    done
  done
  for start in 0 1 2; do
    other_costs $start
    other_algorithms $start
    undivided 0 $start 0.03 ""
    normalised 0 $start 0.03 ""
    normalised 0 $start 0.01
    undivided 0 $start 0
    undivided 0 $start 0.1
  done
  all_done  # A second start of an unfinished run would fail.
  for seed in $SEEDS; do
    for start in 0 1 2; do
      shop $start outcome_cost0.01 "$seed" 0.01 "${OUTCOME[@]}"
      undivided "$seed" $start 0.01
    done
  done
  varied 0
  all_done
  shop_judged
  shop_judge_trained
}

public_tasks() {
  local seed start
  once gcd/rows python prepare_data.py --tasks 'reasoning_gym:gcd:{"max_value": 30}' --out-dir data/gcd
  once lake/policy python -m recipes.frozen_lake --out-dir data/lake
  all_done
  for seed in $SEEDS; do
    for start in 0 1 2; do
      once "gcd$start/seed$seed" env "START=$start" bash recipes/public_flaws.sh "$seed" "$OUT/gcd$start/seed$seed" \
        --resume auto
    done
    all_done  # The first runs also train the initial policies.
  done
  for seed in 0 1; do
    once "lake/seed$seed" bash recipes/public_lake.sh "$seed" "$OUT/lake/seed$seed" --resume auto
  done
  all_done
  python -m recipes.gcd_steps --report "$OUT"/gcd[012]/seed[012] --report-out docs/evidence/public_tasks.jsonl
  python -m recipes.frozen_lake --report "$OUT"/lake/seed[01]/penalty[01] --report-out docs/evidence/frozen_lake.csv
}

echo "Running $LANES runs at a time in these worlds: $WORLDS. Finished runs are not repeated."
echo "On two cores with AVX-512, the first world takes 2 to 3 hours, the second 3 to 4 (134 runs), tools 3 to 4,"
echo "and public half an hour to an hour."
[[ " $WORLDS " != *" first "* ]] || first_world
[[ " $WORLDS " != *" second "* ]] || second_world
[[ " $WORLDS " != *" tools "* ]] || tool_world
[[ " $WORLDS " != *" public "* ]] || public_tasks
[[ " $WORLDS " != *@(" first "|" second "|" tools ")* ]] || python docs/make_evidence.py --runs "$OUT"
