#!/usr/bin/env bash
# Runs one stage on a machine with a GPU and without a network, from the repository's folder. The archives kit?.tar.xz
# of build.sh are unpacked first. The three stages fit into 15 minutes, so problems can be fixed in between:
#   bash benchmarks/gpu_kit/run.sh fapo | speed | trl [FLAGS]     at most 260, 280 and 230 s; see stages.py
#   bash benchmarks/gpu_kit/run.sh checks servers sleep           these checks of check_gpu.py (at most 560 s)
# "... speed --device cpu --size tiny" tests the kit without a GPU. The output is also written to
# $OUT/STAGE.jsonl (default: outputs/gpu_kit).
set -uo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
stage=${1:?pass fapo, speed, trl or checks}
site=${SITE:-$HOME/kit}
python=${PYTHON:-python3}
OUT=${OUT:-outputs/gpu_kit}
declare -A limits=([fapo]=260 [speed]=280 [trl]=230 [checks]=560)
[ -n "${limits[$stage]:-}" ] || { echo "error: run.sh $stage: unknown stage; pass fapo, speed, trl or checks"; exit 2; }
mkdir -p "$OUT" "$site"
for archive in "$kit"/kit?.tar.xz; do
  name=$(basename "$archive")
  if [ -e "$archive" ] && [ ! -e "$site/.$name" ]; then
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' \
      "$archive" "$site" && touch "$site/.$name"
  fi
done
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 RAY_ADDRESS=local
export VLLM_NO_USAGE_STATS=1
export VLLM_USE_FLASHINFER_SAMPLER=0  # The kit has no FlashInfer, which vLLM imports for its sampler by default.
command=("$kit/stages.py" "$@")
[ "$stage" != checks ] || command=(benchmarks/check_gpu.py --only "${@:2}")
timeout -k 10 "$((${limits[$stage]} - SECONDS))" "$python" "${command[@]}" 2>"$OUT/$stage.log" | tee "$OUT/$stage.jsonl"
status=$?
[ "$stage" != checks ] || cp outputs/check_gpu/*.log "$OUT" 2>/dev/null
[ "$status" = 0 ] || tail -n 20 "$OUT/$stage.log"
exit "$status"
