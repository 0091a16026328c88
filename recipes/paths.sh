# Where the paper's recipes read and write, sourced by them: DATA (default: data) and OUT (default: outputs).
# A Ray job runs in a copy of this folder, without data/, that is deleted afterwards: there both must be
# named, on a file system that all nodes see.
set -euo pipefail
case $PWD in */runtime_resources/*)
  how="a Ray job needs it: env DATA=/absolute/path OUT=/absolute/path bash recipes/..."
  : "${DATA:?$how}" "${OUT:?$how}" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DATA=$(realpath -m "${DATA:-data}") OUT=$(realpath -m "${OUT:-outputs}")
