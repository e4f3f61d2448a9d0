#!/bin/sh
# Test the built wheel in a downstream repository: examples/downstream.sh WHEEL [pytest arguments]
#
# The repository is a copy of examples/downstream outside this checkout, because pytest run inside would find our settings
# and sources. It gets a new environment, because ours has an editable install and the dependencies of our own tests.
# torch is installed first and pinned: see Makefile.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 WHEEL [pytest arguments]" >&2; exit 2; }
wheel=$(realpath "$1")
shift
[ -f "$wheel" ] || { echo "$0: no wheel at $wheel; build it with make wheel" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
unset PYTHONPATH
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
trap 'exit 1' HUP INT TERM

cp -R "$root/examples/downstream" "$away/shardload"
"${PYTHON:-python3}" -m venv "$away/venv"
python=$away/venv/bin/python
install() { "$python" -m pip install --quiet -c "$root/constraints.txt" "$@"; }
install "torch==${TORCH:-2.13.0}"
install "${wheel}[transformers]" "$away/shardload[test]"

cd "$away/shardload"
"$python" -I -c "
import sys, pytest_fsdp_meta
assert pytest_fsdp_meta.__file__.startswith(sys.prefix), f'imported {pytest_fsdp_meta.__file__} instead of the wheel'"
"$python" -m pytest "$@"
