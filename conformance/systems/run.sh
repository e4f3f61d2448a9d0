#!/bin/sh
# Test one real released package: conformance/systems/run.sh SYSTEM [pytest arguments]
#
# It runs in .venv-systems/SYSTEM, which is created on first use and recreated when requirements.txt changes. That file
# pins everything that is imported, and pip resolves nothing, so dependencies that are never imported (servers, data
# sets, CUDA) stay out. torch is installed first, with its dependencies, because a CUDA build has its own.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 SYSTEM [pytest arguments]" >&2; exit 2; }
system=$1
shift
cd "$(dirname "$0")/../.."
pins=conformance/systems/$system/requirements.txt
[ -f "$pins" ] || { echo "$0: no system '$system': $pins does not exist" >&2; exit 2; }
venv=.venv-systems/$system
if ! cmp -s "$pins" "$venv/installed"; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet -c "$pins" "$(grep '^torch==' "$pins")"
    "$venv/bin/python" -m pip install --quiet --no-deps -r "$pins"
    "$venv/bin/python" -m pip install --quiet --no-deps -e .
    cp "$pins" "$venv/installed"
fi
PATH=$PWD/$venv/bin:$PATH  # packages that build extensions when they are imported look for ninja there
TORCH_EXTENSIONS_DIR=$PWD/$venv/extensions
export PATH TORCH_EXTENSIONS_DIR
rm -f "$TORCH_EXTENSIONS_DIR"/*/lock  # of a build that was killed: torch would wait for it forever
status=0
"$venv/bin/python" -m pytest "conformance/systems/$system" "$@" || status=$?
if [ "$status" = 5 ] && ! [ -e /dev/nvidia0 ]; then
    echo "$system was not judged: it needs a GPU"  # exit status 5: every test was skipped
    exit 0
fi
exit "$status"
