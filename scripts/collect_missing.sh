#!/usr/bin/env bash
# Put finished runs of experiments/gpu-missing.txt into results/ and the pages: bash scripts/collect_missing.sh RUNS
# A run that is not finished is passed by. PYTHON is the interpreter (python).
set -euo pipefail
cd "$(dirname "$0")/.."
runs=$1 python=${PYTHON:-python}
at() {  # SCRIPT NAME FOLDER...: folders of one run
  local script=$1 name=$2 folder
  shift 2
  for folder in "$@"; do
    [ -e "$runs/$folder/result.json" ] && [ -e "$runs/$folder.done" ] || continue
    "$python" "scripts/reproduce_$script.py" collect "$runs/$folder=$name"
    echo "$folder: kept as $name"
  done
}
at pfml pfml-cifar10-u5 pfml-cifar10-u5-pfml pfml-cifar10-u5-fedavg pfml-cifar10-u5-pfedme
at pfml pfml-cifar10-u10 pfml-cifar10-u10-pfedme
at pfml pfml-mnist-mlr-loss pfml-mnist-mlr-loss
at pfml pfml-synthetic-mlr-loss pfml-synthetic-mlr-loss
at ktpfl emnist-letters-20 kt-emnist-letters-20-ktpfl
at ktpfl emnist-letters-100 kt-emnist-letters-100
for public in mnist emnist own; do at ktpfl "fmnist-public-$public" "kt-fmnist-public-$public"; done
for data in fmnist cifar10; do at ktpfl "$data-20-60" "kt-$data-20-60"; done
for data in fmnist cifar10 emnist; do at ktpfl "$data-sweeps-30" "kt-$data-sweeps-30-a"; done
at persfl cifar10-ds1-raw cifar10-ds1-raw
at persfl mnist-ds2-augmented mnist-ds2-augmented-pfedme
at persfl cifar10-ds2-augmented cifar10-ds2-augmented-perfedavg cifar10-ds2-augmented-pfedme
at persfl cifar10-ds2 cifar10-ds2-last
at persfl cifar10-ds3 cifar10-ds3-last
for page in pfml ktpfl persfl; do "$python" "scripts/reproduce_$page.py" write; done
"$python" scripts/reproduction_index.py
