#!/bin/sh
# GPU-marked tests, then the benchmarks, on one CUDA device, within 10 minutes. From the repository's root:
#     sh benchmarks/gpu.sh            PYTHON=... chooses the interpreter; default .venv/bin/python
# Every part has its own limit, and what a benchmark measured before its limit is in benchmarks/results/.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "benchmarks/gpu.sh needs a CUDA device and a CUDA build of torch; $PYTHON sees none." >&2
    exit 2
}

failed=""
timeout 130 "$PYTHON" -m pytest -m gpu -q || failed="$failed gpu-tests"
timeout 60 "$PYTHON" benchmarks/latent.py --device cuda --chunk-tokens 1024 || failed="$failed latent"
timeout 180 "$PYTHON" benchmarks/update.py --device cuda --budget 15 --total-budget 120 --chunk-tokens 4096 ||
    failed="$failed update"
timeout 110 "$PYTHON" benchmarks/long_run.py --device cuda --chunk-tokens 8192 || failed="$failed long-run"
timeout 110 "$PYTHON" benchmarks/long_run.py --device cuda --model latent || failed="$failed long-run-latent"

if [ -n "$failed" ]; then
    echo "failed or cut off:$failed" >&2
    exit 1
fi
