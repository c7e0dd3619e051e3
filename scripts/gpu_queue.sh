#!/usr/bin/env bash
# Do many runs on one GPU at once: bash scripts/gpu_queue.sh RUNS WORKERS SECONDS
# On a CPU, one worker a core: IDIOLECT="idiolect" OMP_NUM_THREADS=1 bash scripts/gpu_queue.sh ...
# RUNS has a line for each run: the name of its folder, then the arguments of `idiolect run`.
# MPS=1 starts NVIDIA's multi-process service, under which three small runs together did 1.4 times as
# many rounds. But under it a run that is interrupted, as here after SECONDS, may end all others with
# "illegal memory access" (eight did): only for runs that are done before. Runs end after SECONDS; what was
# interrupted goes on from its checkpoint when the queue is run again. A run that is done leaves its
# checkpoints behind no longer: they are many gigabytes, and only newcomers would want them.
set -uo pipefail
export END=$(($(date +%s) + $3)) RUNS=${IDIOLECT_RUNS:-/tmp/runs} IDIOLECT=${IDIOLECT:-bash scripts/on_gpu.sh}
mkdir -p "$RUNS"
[ "${MPS:-0}" = 1 ] && nvidia-cuda-mps-control -d
one() {
  local name=$1 begun left code
  shift
  [ -e "$RUNS/$name.done" ] && return 0
  begun=$(date +%s)
  left=$((END - begun))
  [ "$left" -gt 5 ] || return 0
  [ -d "$RUNS/$name" ] && set -- "$@" --resume
  timeout -s INT "$left" $IDIOLECT run "$@" --out "$RUNS/$name" >"$RUNS/$name.log" 2>&1
  code=$?
  [ "$code" = 0 ] && touch "$RUNS/$name.done" && rm -rf "$RUNS/$name/checkpoints" "$RUNS/$name/personal"
  echo "$name: exit $code after $(($(date +%s) - begun)) s"
}
export -f one
grep -v '^#' "$1" | grep . | xargs -d '\n' -P "$2" -I{} bash -c 'one {}'
