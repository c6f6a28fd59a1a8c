# Two commands for a stranger: `make train` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Builds of torch for CUDA bring their Triton, those for CPUs none. This is torch 2.11's: kernels are
# compiled ahead of time for sm_90 with it in CI.
TRITON ?= triton==3.6.0
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A file of versions to install no others than; empty takes the newest.
CONSTRAINTS ?=
EXTRAS ?= dev,docs
# Each worker of `make test-gpu` takes some 4 GiB of the GPU's memory.
GPU_PYTHON ?= $(BIN)/python
GPU_WORKERS ?= 12
RECORD ?= docs/development/suite_runs.jsonl

# Workers, ranks and runs of the command import the same files: they keep the bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-oldest test-gpu lint format docs clean

train: $(STAMP)
	$(BIN)/moe-graphs train $(ARGS)

test: $(STAMP) lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# With whole runs of several processes, as CI, and with every combination of what tests vary.
test-all: override ARGS += --long --full-grids
test-all: test

# The tests of transformers, PEFT and TRL with the oldest versions that the extras take.
OLDEST := tests/integrations/test_hf_callback.py tests/integrations/test_hf_outputs.py tests/integrations/test_hf_packed_loading.py \
  tests/integrations/test_hf_peft.py tests/integrations/test_hf_peft_experts.py \
  tests/integrations/test_hf_peft_linear.py \
  tests/integrations/test_hf_pickled.py tests/integrations/test_hf_trl.py
test-oldest:
	$(MAKE) VENV=$(VENV)-oldest CONSTRAINTS=tests/oldest.txt EXTRAS=dev $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OLDEST) $(ARGS)

# Every test that needs a GPU, with whichever extras are installed; tests of several GPUs wait for them.
# Another Python that has torch: `make test-gpu GPU_PYTHON=python3`. The run leaves a line in RECORD.
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
	$(GPU_PYTHON) -m pytest -m "gpu or multigpu" -n $(GPU_WORKERS) --dist worksteal -p no:benchmark \
	  --record-run $(RECORD) --record-suite "make test-gpu $(ARGS)" $(if $(COMMIT),--record-commit $(COMMIT)) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation into `site/`, with every warning an error; `make docs ARGS=serve` shows it and follows changes.
docs: $(STAMP)
	$(BIN)/python -m mkdocs $(if $(filter serve,$(ARGS)),,build --strict) $(ARGS)

# torch first, by itself: the pin decides which build is taken, everything else accepts it.
$(STAMP): pyproject.toml Makefile $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python -m pip install --quiet "$(TRITON)"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]" $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest runs site .pytest_cache .ruff_cache .mypy_cache
