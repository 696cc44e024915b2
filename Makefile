# Everything here works from a bare clone with Python 3.11, make and git; the first call makes .venv from pinned versions.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VENV016  ?= .venv-vllm016
READY016 := $(VENV016)/.ready
SIZE   ?= small

.PHONY: demo test test-fast test-vllm016 check bench docs format clean
export TOKENIZERS_PARALLELISM = false

demo: $(READY)            ## train a real draft for a real small model, end to end (8 to 15 minutes on 2 cores)
	$(BIN)/headstart demo --size $(SIZE)

test: $(READY)            ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-fast: $(READY)       ## the tests that need seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-vllm016: $(READY) $(READY016)  ## capture in the real vLLM 0.16.0, in an environment of its own (8 GB; not part of CI)
	HEADSTART_VLLM016=$(abspath $(VENV016)/bin/python) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/vllm016 \
		-o junit_family=xunit1 --junitxml=$(VENV016)/report.xml  # with the largest differences that were found

check: $(READY)           ## lint, format, types, layers, generated docs
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/make_docs.py --check
	$(BIN)/python tools/make_architectures.py --check

bench: $(READY)           ## training and capture against the peers and this machine's limit (quiet machine, 20 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/train_step.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/states.py

docs: $(READY)            ## regenerate the docs that come from code
	$(BIN)/python tools/make_docs.py
	$(BIN)/python tools/make_architectures.py

format: $(READY)
	$(BIN)/ruff format src tests tools benchmarks
	$(BIN)/ruff check --fix src tests tools benchmarks

$(READY): pyproject.toml requirements/dev.lock requirements/oracle.txt requirements/vllm.lock tools/vllm_env.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/dev.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/oracle.txt -r requirements/vllm.lock
	$(BIN)/python tools/vllm_env.py
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

$(READY016): requirements/vllm016.lock
	$(PYTHON) -m venv $(VENV016)
	$(VENV016)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/vllm016.lock
	touch $(READY016)

clean:
	rm -rf $(VENV) $(VENV016) .pytest_cache .ruff_cache build dist
