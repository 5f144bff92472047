# `make demo` and `make test` set up what they need; nothing else has to be run before them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: setup demo test test-all faults contract mutation trl emulated renew kernels packages lint docs release clean

setup: $(VENV)/.ready

# torch first: DeepSpeed's build asks for it. No compiled ops: torch's fused optimizers are used. Liger's kernels lie apart,
# for the tests that run them: where they are installed, plans take them, and tests show those of users without them.
$(VENV)/.ready: pyproject.toml constraints.txt frugal/planning/memory/_caching_allocator.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools torch
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt --upgrade --target $(VENV)/kernels liger-kernel triton
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" launch/demo.sh

# Files of tests run beside each other: most of the time goes into waiting for processes of one core to start. In the
# order of tests/conftest.py: xdist's own begins with files of many tests, and would leave the slowest for the end.
# A worker that dies ends the run with the name of its test: xdist loses count of the files that another takes over.
pytest_in = PATH="$(CURDIR)/$(1):$$PATH" $(1)/python -m pytest -n auto --maxprocesses 4 --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 0
PYTEST := $(call pytest_in,$(BIN))

test: setup
	$(MAKE) --no-print-directory -j3 packages lint kernels
	$(PYTEST)

# Also what `make test` leaves out to stay within a quarter of an hour; then the files that compare what PyTorch computes
# once more, with kernels as on a processor without vector instructions.
PLAIN_KERNELS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
test-all: setup
	$(MAKE) --no-print-directory -j3 packages lint kernels
	$(PYTEST) -m ""
	$(PLAIN_KERNELS) $(PYTEST) tests/dryrun/test_truth.py \
	  $$(grep -rl --include='test_*.py' 'from tests.engine.gradients import' tests | sort)

# Out of memory at each place of a step, on each rank, under each strategy; crashes at each point of a save.
faults: setup
	$(PYTEST) -m "" tests/faults

# Other versions: `make contract TORCH=2.15.0 DEEPSPEED=0.19.7 TRANSFORMERS=5.24.0 PYTHON=python3.12`, in an environment
# of its own, with torch's build for CPUs where pip finds one, else its CUDA build over emulated libraries. First the names
# that are missing and the mirrored functions that changed, with their differences to the DeepSpeed of $(VENV): what is to
# be done. Then simulation (where DeepSpeed is what is simulated), exactness, dry runs against measurements, faults.
TORCH        ?= 2.13.0
DEEPSPEED    ?= 0.19.8
TRANSFORMERS ?= 5.23.0
CONTRACT     := .venv-contract
contract: export EMULATED_GPU_COUNT := 0
contract: setup
	$(PYTHON) -m venv --clear $(CONTRACT)
	sed -E '/^(torch|triton)==/d' constraints.txt > $(CONTRACT)/constraints.txt
	$(BIN)/python -m bench.emulated_gpu.setup --folder $(CONTRACT) --only-torch torch==$(TORCH)
	DS_BUILD_OPS=0 $(CONTRACT)/bin/pip install --quiet -c $(CONTRACT)/constraints.txt setuptools -e '.[dev]'
	DS_BUILD_OPS=0 $(CONTRACT)/bin/pip install --quiet --no-deps --no-build-isolation \
	  deepspeed==$(DEEPSPEED) transformers==$(TRANSFORMERS)
	$(CONTRACT)/bin/python -m frugal.deepspeed_adapter.contract $(wildcard $(VENV)/lib/python*/site-packages/deepspeed)
	$(call pytest_in,$(CONTRACT)/bin) tests/test_internals.py tests/deepspeed_adapter/test_contract.py
	$(call pytest_in,$(CONTRACT)/bin) tests/deepspeed_adapter/test_simulate.py tests/deepspeed_adapter/test_zero3_graph.py
	$(call pytest_in,$(CONTRACT)/bin) tests/engine/test_exactness.py tests/engine/test_not_finite.py tests/dryrun/test_truth.py
	$(call pytest_in,$(CONTRACT)/bin) -m "" tests/faults

# Whether the tests of planning notice when its arithmetic is wrong; with WORDS only some of the mutants.
mutation: setup
	$(BIN)/python -m bench.planning.mutation $(WORDS)

# A plan in TRL's SFTTrainer; TRL is no dependency of frugal, and what it needs is there.
trl: setup
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-trl trl==1.16.0
	PYTHONPATH=.venv-trl $(BIN)/python -m pytest -m "" -n0 tests/integrations

# torch's CUDA build on cards that are emulated (docs/emulated-gpu.md), in an environment of its own: 1.5 GB.
EMULATED := .venv-emulated
emulated: setup
	$(BIN)/python -m bench.emulated_gpu.setup --folder $(EMULATED)

# After a change to planning: the plans in ds_configs/ and what README.md and docs/ show.
renew: setup
	$(BIN)/python ds_configs/generate.py
	$(BIN)/python -m tests.readme
	$(BIN)/python -m tests.screenshots

# Of DeepSpeed, those that tests need: minutes on the first time.
kernels: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.kernels

# Programs that tests start and pip does not have.
packages:
	.ci/packages

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# dist/ as it could be published: sdist and a wheel of which each fits any Linux of these years. Both are checked, and the
# wheel is installed into an empty environment of each Python in PYTHONS, where it plans without the checkout.
PYTHONS ?= $(PYTHON)
release: setup
	.ci/release $(PYTHONS)

# The documentation as a site in build/site; a broken link or anchor is an error.
docs: setup
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(CONTRACT) $(EMULATED) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
