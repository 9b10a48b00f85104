#!/usr/bin/env bash
# flexengine lm-eval against lm-evaluation-harness's own hf model, on local tasks with the demo model:
#   bench/lm_eval.sh [options of python -m bench.lm_eval]
# Needs flexengine[lm-eval], accelerate and the demo model, and no network. JSON lines go to bench/results/lm_eval.jsonl,
# or to --out. PYTHON: the interpreter. Exit code: 0 only if the metrics of both sides are equal to 4 digits.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1
"${PYTHON:-python3}" -m bench.lm_eval "$@"
