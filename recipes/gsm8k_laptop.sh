#!/usr/bin/env bash
# GSM8K without a GPU: trains a small instruct model (a folder or a Hub name) using GRPO, the outcome reward and a
# small format reward (gsm8k_reward.py). recipes/README.md reports results and times.
#
#   bash recipes/gsm8k_laptop.sh HuggingFaceTB/SmolLM2-135M-Instruct [OUT_DIR] [FURTHER FLAGS]
#   SOURCE_DIR=~/files bash recipes/gsm8k_laptop.sh ~/models/SmolLM2-135M-Instruct  # offline
#
# The recipe selects problems of at most LONGEST characters, two thirds of which need one or two sums, and puts a
# worked example before each problem. Before and after training, it evaluates the first HELD_OUT such problems of the
# test set.
[[ ${1:--} != -* && ${2:-} != -* ]] || {
  echo "usage: bash recipes/gsm8k_laptop.sh MODEL [OUT_DIR] [FURTHER FLAGS]; flags need OUT_DIR, which may be ''" >&2
  exit 2
}
MODEL=$1
[ ! -d "$MODEL" ] || MODEL=$(realpath "$MODEL")
RUN=${2:+$(realpath -m "$2")}
WHERE=()
[ -z "${SOURCE_DIR:-}" ] || WHERE=(--source-dir "$(realpath -m "$SOURCE_DIR")")
source "$(dirname "$0")/paths.sh"

python prepare_data.py --tasks gsm8k --out-dir "$DATA" "${WHERE[@]}"
python - "$DATA" "${LONGEST:-140}" "${HELD_OUT:-64}" <<'END'
import json, sys
from prepare_data import PROMPT, read_rows
from pathlib import Path
data, longest, held_out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
question = "Tom has 5 boxes with 12 pens each. He gives 8 pens away. How many pens are left?"
solution = "He has 5*12 = 60 pens.\n60-8 = 52 pens are left.\n\\boxed{52}"
example = [dict(role="user", content=PROMPT.format(question=question, what="")),
           dict(role="assistant", content=solution)]
for split, most in (("train", None), ("test", held_out)):
    rows = read_rows(data / f"gsm8k_{split}.parquet", ["prompt"])
    rows = [row for row in rows if len(row["extra_info"]["question"]) <= longest][:most]
    lines = [json.dumps(row | {"prompt": example + row["prompt"]}) + "\n" for row in rows]
    (data / f"gsm8k_laptop_{split}.jsonl").write_text("".join(lines))
END

python grpo_trainer.py --model "$MODEL" --out-dir "${RUN:-$OUT/gsm8k_laptop}" --lora-rank 16 --device cpu \
  --train-file "$DATA/gsm8k_laptop_train.jsonl" --val-file "$DATA/gsm8k_laptop_test.jsonl" \
  --reward-fn recipes/gsm8k_reward.py:compute_score --reward-kwargs '{"format_share": 0.2}' \
  --total-steps 20 --train-batch-size 4 --mini-batch-size 2 --group-size 4 --max-response-length 64 \
  --overlong-buffer 0 --lr 5e-4 --adam-betas 0.9 0.95 --lr-warmup-steps 2 --weight-decay 0 \
  --val-every 0 --val-top-p 1 --val-greedy --save-every 0 --samples-per-step 16 \
  --num-threads 1 --num-workers 1 "${@:3}"
