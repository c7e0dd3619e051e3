#!/usr/bin/env bash
# Run `idiolect` on a machine that has torch but not this package: bash scripts/on_gpu.sh run ...
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.gpu/site" IDIOLECT_DATA="${IDIOLECT_DATA:-/tmp/data}" PYTHONUNBUFFERED=1
exec python3 -m idiolect "$@"
