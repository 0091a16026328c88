#!/usr/bin/env bash
# Runs the GPU checks without a network, from the repository's folder. build.sh writes the archives kit?.tar.xz to
# this file's folder. Each of the three stages takes less than ten minutes, so problems can be fixed in between:
#   bash benchmarks/gpu_kit/run.sh base     precision; tokens/s, MFU and memory of each kind of update
#   bash benchmarks/gpu_kit/run.sh servers  vLLM: agreement, weight sync, restart, sleep, KV-cache capacity
#   bash benchmarks/gpu_kit/run.sh runs     two-step runs on one GPU: shares, colocate, LoRA, offload (FSDP2)
# "... base cpu" tests the kit without a GPU. Logs and tables are written to $OUT (default: outputs/gpu_kit).
set -uo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
stage=${1:-base}
where=${2:-cuda}
site=${SITE:-$HOME/kit}
export OUT=${OUT:-outputs/gpu_kit}
python=${PYTHON:-python3}
mkdir -p "$OUT" "$site"
for part in 1 2; do
  if [ -e "$kit/kit$part.tar.xz" ] && [ ! -e "$site/.$part" ]; then
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' \
      "$kit/kit$part.tar.xz" "$site" && touch "$site/.$part"
  fi
done
export PYTHONPATH=$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 RAY_ADDRESS=local VLLM_NO_USAGE_STATS=1
export VLLM_USE_FLASHINFER_SAMPLER=0  # The kit has no FlashInfer, which vLLM imports for its sampler by default.

check() {  # SECONDS CHECK ...
  timeout "$1" "$python" benchmarks/check_gpu.py --only "${@:2}" 2>&1 | tee "$OUT/$stage.md"
  cp outputs/check_gpu/*.log "$OUT/" 2>/dev/null
}

case $stage in
base)
  nvidia-smi
  if [ "$where" = cpu ]; then
    flags=(--device cpu --size tiny --tokens 1024 --length 256)
  else
    check 300 precision rollouts update
    flags=(--size 1.5b --profile)
  fi
  timeout 280 "$python" "$kit/mfu.py" "${flags[@]}" 2>&1 | tee "$OUT/mfu.md"
  cp outputs/mfu_profile.txt "$OUT/" 2>/dev/null ;;
servers)
  check 560 servers sleep
  tail -n 60 outputs/check_gpu/*/server_0.log >"$OUT/server.log" 2>&1 ;;
runs)
  check 580 shares colocate lora offload ;;
*)
  echo "run.sh $stage: unknown stage; pass base, servers or runs"
  exit 2 ;;
esac
