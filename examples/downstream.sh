#!/bin/sh
# Uses the kit as built, in a repository that is not this one: examples/downstream.sh WHEEL [pytest arguments]
#
# The repository is a copy of examples/downstream outside this checkout, because from within pytest would find this one's
# settings and sources; its environment is new, because in ours the kit is installed as an editable one, with everything
# that our own tests need. torch comes first and pinned: see Makefile.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 WHEEL [pytest arguments]" >&2; exit 2; }
wheel=$(realpath "$1")
shift
[ -f "$wheel" ] || { echo "$0: there is no wheel $wheel; make wheel builds it" >&2; exit 2; }
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
assert pytest_fsdp_meta.__file__.startswith(sys.prefix), f'judged {pytest_fsdp_meta.__file__}, which is not the wheel'"
"$python" -m pytest "$@"
