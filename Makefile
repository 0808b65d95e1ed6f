# `make train` and `make test` do their own set-up, and are quick the second time.
# Another Python gets a virtual environment of its own: make test PYTHON=python3.13

PYTHON ?= python3
VENV ?= .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help train test check bench docs clean

help:
	@echo 'make train   train a network on handwritten digits (ARGS="--epochs 5 --plot confusion.png")'
	@echo 'make test    run the tests                         (ARGS="-k linear")'
	@echo 'make check   run ruff and pyright'
	@echo 'make bench   measure the cost of calls against JAX, Equinox and Flax NNX'
	@echo 'make docs    build the documentation into site/'
	@echo 'make clean   remove the virtual environment and everything that was built'

train: $(VENV)/.installed-examples
	$(BIN)/python examples/digits.py $(ARGS)

test: $(VENV)/.installed-tests
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow' $(ARGS)

check: $(VENV)/.installed-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed-benchmarks
	$(BIN)/python -m benchmarks.dispatch $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis

# A stamp is written last, so that an interrupted set-up starts again instead of looking finished.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.made
	@echo 'installing pytreemod[$*] into $(VENV)'
	$(PIP_INSTALL) --editable '.[$*]'
	@touch $@

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@
