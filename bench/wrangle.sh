#!/usr/bin/env bash
# Data wrangling on real tables, against transformers row by row:
#   bench/wrangle.sh [DIR] [options of python -m bench.wrangle]
# DIR: where the tables are kept (default: a temporary folder). They are those of the sdist of py-entitymatching, which is
# only read, never installed. JSON lines go to bench/results/wrangle.jsonl, or to --out. PYTHON: the interpreter.
# Exit code: 0 only if all answers are those of transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
dir=${1:-}
case $dir in "" | --*) dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT ;; *) shift ;; esac
mkdir -p "$dir"
ls "$dir"/py[-_]entitymatching-*.tar.gz >/dev/null 2>&1 ||
    "$python" -m pip download -q --no-deps --no-binary py-entitymatching -d "$dir" "py-entitymatching==0.4.2"
"$python" -m bench.wrangle "$dir" "$@"
