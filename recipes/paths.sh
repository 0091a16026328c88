# Recipes source this file to read from DATA (default: data) and to write to OUT (default: outputs). A Ray job runs in a
# temporary copy of this folder without data/. It therefore needs both variables, as paths on a file system that all
# nodes share.
set -euo pipefail
case $PWD in */runtime_resources/*)
  how="a Ray job needs this variable; submit env DATA=/absolute/path OUT=/absolute/path bash recipes/..."
  : "${DATA:?$how}" "${OUT:?$how}" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -d .venv/bin ] || export PATH="$PWD/.venv/bin:$PATH"
DATA=$(realpath -m "${DATA:-data}") OUT=$(realpath -m "${OUT:-outputs}")
