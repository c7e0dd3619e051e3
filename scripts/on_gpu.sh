#!/usr/bin/env bash
# Run `idiolect` on a machine that has torch but not this package: bash scripts/on_gpu.sh run ...
set -euo pipefail
cd "$(dirname "$0")/.."
# .gpu/site holds pydantic for that machine's Python, unpacked; set IDIOLECT_DATA to the datasets.
export PYTHONPATH="src:.gpu/site" PYTHONUNBUFFERED=1
exec python3 -m idiolect "$@"
