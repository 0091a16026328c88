# The paper's recipes source this file: they read from DATA (default: data) and write to OUT (default: outputs).
# A Ray job runs in a temporary copy of this folder, without data/, so it needs both variables, as paths on a
# file system that all nodes see.
set -euo pipefail
case $PWD in */runtime_resources/*)
  how="a Ray job needs it: env DATA=/absolute/path OUT=/absolute/path bash recipes/..."
  : "${DATA:?$how}" "${OUT:?$how}" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DATA=$(realpath -m "${DATA:-data}") OUT=$(realpath -m "${OUT:-outputs}")
