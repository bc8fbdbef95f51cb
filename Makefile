# make quickstart   train a small decoder and watch it learn
# make test         lint, types and tests
# make test-all     also the proofs that take minutes
# TORCH_BACKEND=cpu|auto|cu128|... lets uv choose the build of torch; without it pip takes the package index's

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test test-all
quickstart: $(VENV)/.installed
	$(BIN)/onward quickstart
	@echo; echo "The command onward is in $(BIN); to use it by name: source $(BIN)/activate"

test: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

test-all: test
	$(BIN)/pytest -m long

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Onward needs Python 3.11 or newer: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
ifdef TORCH_BACKEND
	$(PIP) uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend $(TORCH_BACKEND) --constraint constraints.txt torch
endif
	$(PIP) --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@touch $@
