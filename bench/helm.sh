#!/usr/bin/env bash
# flexengine helm against HELM's own HuggingFaceClient, on scenarios that need no network, with the demo model:
#   bench/helm.sh [options of python -m bench.helm]
# Needs flexengine[helm] and the demo model, and no network. JSON lines go to bench/results/helm.jsonl, or to --out.
# PYTHON: the interpreter. Exit code: 0 only if all texts and tokens are the same, and all metrics equal to 4 digits.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m bench.helm "$@"
