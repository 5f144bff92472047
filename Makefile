# `make demo` and `make test` set up what they need; nothing else has to be run before them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: setup demo test test-all faults mutation renew lint clean

setup: $(VENV)/.ready

# torch first: DeepSpeed's build asks for it. No compiled ops: torch's fused optimizers are used.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools torch
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" launch/demo.sh

# Files of tests run beside each other: most of the time goes into waiting for processes of one core to start.
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test: setup lint
	.ci/packages
	$(PYTEST)

# Also what `make test` leaves out to stay within a quarter of an hour.
test-all: setup lint
	.ci/packages
	$(PYTEST) -m ""

# Out of memory at each place of a step, on each rank, under each strategy; crashes at each point of a save.
faults: setup
	$(PYTEST) -m "" tests/faults

# Whether the tests of planning notice when its arithmetic is wrong; with WORDS only some of the mutants.
mutation: setup
	$(BIN)/python -m bench.mutation $(WORDS)

# After a change to planning: the decisions in ds_configs/ and what README.md shows.
renew: setup
	$(BIN)/python ds_configs/generate.py
	$(BIN)/python -m tests.readme

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
