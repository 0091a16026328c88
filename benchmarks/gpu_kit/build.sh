#!/usr/bin/env bash
# Builds kit1.tar.xz (Ray, tyro), kit2.tar.xz (vLLM with machine code for one GPU architecture) and kit3.tar.xz (TRL,
# Liger) in this file's folder. The archives contain the packages that a machine with a GPU and torch, but no network,
# lacks. They come from the package registry. A build takes minutes and 2 GB of disk space.
#   bash benchmarks/gpu_kit/build.sh [PYTHON3.12] [ARCHITECTURE: 90 is an H100 or H200]
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python3.12}
rm -rf site? kit?.tar.xz

for part in 1 2 3; do
  sed -n "/^\[$part\]/,/^\[/{/^[[#]/!p}" packages.txt >"site$part.txt"
  "$python" -m pip install -q --no-deps --no-compile --only-binary=:all: --target "site$part" -r "site$part.txt"
  rm "site$part.txt"
done

# Remove Ray's Java and C++ parts, web page and libraries; vLLM's Rust server and headers; and kernels for other
# GPUs and for model features that the checks do not use (experts, MLA, FP4).
(cd site1/ray && rm -rf jars cpp dashboard/client rllib llm serve tune train data air core/libjemalloc.so \
  _private/runtime_env/agent/thirdparty_files)
(cd site2/vllm && rm -rf vllm-rs third_party/deep_gemm third_party/fmha_sm100 _moe_C*.so _flashmla*.so \
  vllm_flash_attn/_vllm_fa2_C*.so _qutlass*.so benchmarks entrypoints/serve/instrumentator/static \
  kernels/helion/configs model_executor/layers/fused_moe/configs \
  model_executor/layers/quantization/utils/configs)
rm -rf site2/mistral_common/data/*.json* site2/tvm_ffi/{include,src} site?/bin
"$python" slim_so.py "${2:-90}" site2/vllm/_C_stable_libtorch.abi3.so site2/vllm/vllm_flash_attn/*.so
find site? \( -name '*.so*' -o -name raylet -o -name gcs_server \) -type f \
  -exec strip --strip-unneeded {} + || true
find site? \( -name __pycache__ -o -name tests -o -name '*.pyi' -o -name '*.a' \) -prune -exec rm -rf {} +

for part in 1 2 3; do
  tar -C "site$part" --sort=name --mtime=@0 --owner=0 --group=0 -c . | xz --x86 --lzma2=preset=9 >"kit$part.tar.xz"
done
rm -rf site?
ls -l kit?.tar.xz
