# Everything here works from a bare clone with Python 3.11, make and git; the first call makes .venv from pinned versions.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SIZE   ?= small

.PHONY: demo test test-fast check docs format clean
export TOKENIZERS_PARALLELISM = false

demo: $(READY)            ## train a real draft for a real small model, end to end (about 15 minutes on 2 cores)
	$(BIN)/headstart demo --size $(SIZE)

test: $(READY)            ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-fast: $(READY)       ## the tests that need seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not slow"

check: $(READY)           ## lint, format, types, layers, generated docs
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/make_docs.py --check

docs: $(READY)            ## regenerate the docs that come from code
	$(BIN)/python tools/make_docs.py

format: $(READY)
	$(BIN)/ruff format src tests tools
	$(BIN)/ruff check --fix src tests tools

$(READY): pyproject.toml requirements/dev.lock requirements/oracle.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/dev.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/oracle.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
