# Everything works from a fresh clone: the first target that needs it makes the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Else each of the tests' processes compiles the package anew, and each worker the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-faults suite browser lint format bench bench-population walk docs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## personal models for four real hospitals and for ten users' digits, in about a minute
	$(BIN)/idiolect demo hospitals
	$(BIN)/idiolect demo digits

check: lint  ## lint, types and the tests that find most, in under a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/test_layers.py tests/methods --ignore tests/methods/personalise
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/test_laws.py -k "fedavg or ktpfl"

test: $(READY) browser  ## everything that CI runs: lint and types beside the tests
	@$(MAKE) --no-print-directory -j 2 lint suite

# Three on two cores: tests of real federations, browsers and notebooks wait much of their time.
suite: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -q --durations 15

test-faults: $(READY)  ## kills, lies, full disks and intruders on a real federation: some twenty minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults -q

browser:  ## the browser that opens the reports in the tests, where it may be installed
	@scripts/browser.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-population: $(READY)  ## does a round cost more where there are more clients?
	$(BIN)/python benchmarks/population.py

bench: $(READY)  ## plain loops, backends and installed peers, in one run
	$(BIN)/idiolect bench --out benchmarks/results/cpu.json

walk: $(READY)  ## the modules that a FedAvg run and a deployed round enter, in order
	$(BIN)/python scripts/walk.py

site: $(READY)  ## the docs as a site, in site/index.html; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(READY)  ## write anew the pages made from code and figures: methods, reproduction index, performance
	$(BIN)/python scripts/reproduction_index.py
	$(BIN)/python scripts/method_table.py
	$(BIN)/python scripts/performance_tables.py
	$(BIN)/python scripts/board.py

clean:
	rm -rf $(VENV) runs site
