#!/usr/bin/env bash
# All that is measured on a GPU, in the order of its worth: bash scripts/gpu_session.sh sane|bench|more|check|experiments|rest|papers|choice|field|referee [SECONDS]
# IDIOLECT_DATA names the datasets, IDIOLECT_RUNS where runs go (/tmp/runs), OUT where figures go.
# `bench` and `more` want the GPU alone; the others may share it (MPS=1: see the warning in gpu_queue.sh).
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.gpu/site" PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/out}
mkdir -p "$OUT"
sane() {  # captured rounds against the sequential backend: nothing is worth measuring before that
  python3 benchmarks/gpu_speed.py --only "fedavg, double" "fedavg, dnn, single" "pfedme, dnn, single" --json "$OUT/sane.json" &&
    python3 -c "import json, os; f = json.load(open(os.environ['OUT'] + '/sane.json')); del f['about']; print(f); assert all(isinstance(v, float) and v < 1e-5 for v in f.values())"
}
bench() {
  python3 -m idiolect.bench dnn-20 dnn-1000 pfl-cifar10 pfedme-20 lenet5-20 mlr-20 persfl --device cuda \
    --no-peers --data-dir "$IDIOLECT_DATA" --out "$OUT/h200.json"
}
more() {
  python3 -m idiolect.bench padding --device cuda --no-peers --precision --grow --seconds 3 --out "$OUT/h200-more.json"
  python3 benchmarks/portfolio.py experiments/portfolio/cifar10-ds1.toml
  cp benchmarks/results/portfolio.json "$OUT"
}
check() {
  python3 benchmarks/gpu_check.py --json "$OUT/check.json"
}
# Runs beside each other share the chip: with twice as many workers each took three times as long, and a run that
# finds no room halves its blocks, which are other shapes, for which kernels are chosen and compiled anew.
queue() {  # FILE WORKERS SECONDS
  OMP_NUM_THREADS=1 bash scripts/gpu_queue.sh "$@"
}
experiments() {  # SECONDS
  local end=$(($(date +%s) + $1))
  left() { echo $((end - $(date +%s))); }
  queue experiments/pfml/gpu.txt 6 "$(left)"
  queue <(grep -E '^kt-[a-z0-9]+-(all|two)-' experiments/ktpfl/gpu.txt) 4 "$(left)"
  queue <(grep -E '^kt-[a-z0-9]+-(20|100)-' experiments/ktpfl/gpu.txt) 3 "$(left)"
  queue <(grep -E '(sweeps|public)' experiments/ktpfl/gpu.txt) 4 "$(left)"
}
rest() {  # SECONDS
  queue experiments/portfolio/gpu.txt 4 "$1"
}
papers() {  # SECONDS [MORE]: what the papers' pages lack; archives for `run_papers.py keep` in $OUT
  python3 scripts/run_papers.py "$1" "$OUT" --gpu 2 --cpu 14 --pace 1.2 "${@:2}"
}
choice() {  # validation accuracy, mean of rounds 6 to 10, of the settings that pFedKDH's text leaves open; CIFAR-10
  python3 -m idiolect run experiments/field/pfedkdh-open.toml --device cuda --set data.source=cifar10 --set training.epochs=3 \
    --set backend.width=0 --set backend.kernels=first --out /tmp/choice >"$OUT/choice.log" 2>&1
  cp /tmp/choice/result.json /tmp/choice/metrics.parquet "$OUT"
  python3 - "$OUT/choice.log" <<'END'
import re, sys
found = {}
for label, number, score in re.findall(r"(Fed[^:]*): round (\d+)/10.*?accuracy ([\d.]+)%", open(sys.argv[1]).read()):
    found.setdefault(label, {})[int(number)] = float(score)
for label, own in found.items():
    print(f"{label}: {sum(own[n] for n in range(6, 11)) / 5:.2f}")
END
}
field() {  # SECONDS [WORKERS [PRECISION [MORE]]]: the outside tables; figures in $OUT/tables.json
  python3 scripts/run_field.py "$1" "$OUT" --workers "${2:-2}" --precision "${3:-tf32}" "${@:4}"
  python3 scripts/run_field.py costs "$OUT"
}
referee() {  # SECONDS [MORE]: the whole suite for one method, or with --reckon what it would take; wants the GPU alone
  python3 benchmarks/referee.py fedavg-ft --size whole --device cuda --seconds "$1" --json "$OUT/referee-whole.json" "${@:2}"
}
"$@"
