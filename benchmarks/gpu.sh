#!/usr/bin/env bash
# Speed, MFU and memory on one GPU in under ten minutes, as a dated report: benchmarks/gpu.sh [--out FOLDER] [--cases TEXT]
# benchmarks/gpu.sh --tiny does the same with small models on a CPU, to see that everything runs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${TITANLIKE_PYTHON:-python}" "$root/benchmarks/gpu.py" "$@"
