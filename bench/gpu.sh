#!/usr/bin/env bash
# The GPU checks in one command, under 8 minutes on one large GPU, without a network:
#   bench/gpu.sh [DIR]      DIR: where the OPT-13B-shaped checkpoint is made or reused (26 GB; default: a temporary folder)
# First `pytest -m cuda tests` (the checkpoint is made meanwhile), then bench/gpu/__main__.py: kernels, attention workers
# on the GPU, jobs with streamed weights. JSON lines go to
# bench/results/gpu.jsonl, or to $OUT (a file, or a folder to put gpu.jsonl in); a table comes last.
# PYTHON: the interpreter (default python3). Exit code: 0 only if the tests and every run passed.
set -u
cd "$(dirname "$0")/.."
started=$SECONDS
python=${PYTHON:-python3}
out=${OUT:-$PWD/bench/results/gpu.jsonl}
[ -d "$out" ] && out=$out/gpu.jsonl
case $out in */*) ;; *) out=$PWD/$out ;; esac

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "bench/gpu.sh: $python sees no CUDA GPU; nothing was run" >&2
    exit 3
fi
if ! "$python" -c 'import greenlet, gguf, highspy, psutil, pulp, pytest, tqdm, transformers, xdist'; then
    echo "bench/gpu.sh: $python lacks a package that the engine or its tests need; nothing was run" >&2
    exit 3
fi
dir=${1:-}
if [ -z "$dir" ]; then
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
fi

"$python" -m bench.gpu "$dir" --make-only &
maker=$!
# Only files that have such tests are collected; they are dealt out one by one, as few files have most of them.
timeout 270 "$python" -m pytest -m cuda -n 10 --dist load $(grep -rl "mark\.cuda" tests --include="test_*.py")
tests=$?
wait "$maker" || exit 4
"$python" -m bench.gpu "$dir" --out "$out" --seconds $((460 - (SECONDS - started)))
runs=$?
echo "tests: exit code $tests; runs: exit code $runs; $((SECONDS - started)) s in all"
[ "$tests" -eq 0 ] && [ "$runs" -eq 0 ]
