#!/usr/bin/env bash
# Packs what travels to a machine with a GPU into one folder, and prints its size in MiB (at most 60): this commit
# without tests, pages and warm-started models, the toy data with its policy, a trained judge without its optimizer,
# and the archives of build.sh. By default, data and judge are those of `make demo`.
#   bash benchmarks/gpu_kit/pack.sh FOLDER [JUDGE] [DATA]
set -euo pipefail
tree=$(realpath -m "${1:?pass the folder to write}")
default=outputs/demo_seed0/judge/checkpoints/step_60
cd "$(dirname "$0")/../.."
judge=${2:-$default}
data=${3:-data/toy}
[ ! -e "$tree" ] || { echo "error: $tree exists; pass a new folder" >&2; exit 2; }
for file in "$judge/config.json" "$data/toy_train.parquet"; do
  [ -f "$file" ] || { echo "error: $file is missing; run make demo" >&2; exit 2; }
done
mkdir -p "$tree/$default" "$tree/data/toy"
git archive HEAD -- . ':!tests' ':!docs' ':!*.md' ':!toy/models' | tar -x -C "$tree"
cp -r "$data/." "$tree/data/toy"
cp -r "$judge/." "$tree/$default"
rm -rf "$tree"/data/toy/{judge,fapo_critic_*} "$tree/$default/optimizer"
cp benchmarks/gpu_kit/kit?.tar.xz "$tree/benchmarks/gpu_kit" 2>/dev/null || echo "no archives yet: run build.sh"
size=$(du -sm --apparent-size "$tree" | cut -f1)
echo "$tree: $size MiB"
[ "$size" -le 60 ] || { echo "error: more than 60 MiB" >&2; exit 1; }
