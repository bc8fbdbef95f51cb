# make quickstart   train a small decoder and watch it learn; QUICKSTART="--time 20s" passes options
# make quick        lint, type checks and the tests that fail most often
# make test         lint, type checks and tests
# make test-all     also the slow tests and the cases that `make test` leaves out
# make clients      other clients of the server's API, for tests that are skipped without them; some need node
# make page-pictures  the pictures of the server's page in docs/; needs Chromium, and runs/quickstart
# make docs         the documentation as a site in build/site/html
# make package      the wheel and the source package in build/dist; the wheel's command is run once
# TORCH_BACKEND=cpu|auto|cu128|... lets uv choose the build of torch; by default, pip installs the package index's build

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

CLIENTS := build/clients
CLIENT_FILES := $(addprefix tests/serving/clients/,requirements.txt package.json)

PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal
QUICK := $(addprefix tests/test_,fields.py files.py imports.py language_model.py mistaken_calls.py public_names.py) \
  $(addprefix tests/model/test_,attend.py cache.py decoder.py latent.py numerics.py) tests/config \
  $(addprefix tests/generation/test_,scheduler.py sampler.py) tests/training/test_loss.py \
  tests/training/test_run_config.py tests/data/test_tokens.py tests/checkpoint/test_folder.py \
  tests/text/test_tokenizer.py tests/evaluation/test_score.py tests/planning/test_parameters.py

.PHONY: quickstart lint quick test test-all clients page-pictures docs package
quickstart: $(VENV)/.installed
	$(BIN)/onward quickstart $(QUICKSTART)
	@echo; echo "The command onward is in $(BIN); to use it by name: source $(BIN)/activate"

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

quick: lint
	$(PYTEST) -x $(QUICK)

test: lint
	$(PYTEST)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(PYTEST) --device cuda tests/model tests/compiled tests/generation tests/training; fi

test-all: test
	$(PYTEST) -m long

clients: $(CLIENTS)/.installed

page-pictures: $(VENV)/.tested
	PYTHONPATH=tests $(BIN)/python tests/support/page_picture.py runs/quickstart docs/page

docs: $(VENV)/.installed
	@$(BIN)/python -c 'import zensical' 2> /dev/null || $(PIP) --editable '.[docs]'
	$(BIN)/python -m docs.site.build build/site

package: $(VENV)/.installed
	$(PIP) build
	rm -rf build/dist build/wheel
	$(BIN)/python -m build --outdir build/dist
	$(PIP) --no-deps --no-index --target build/wheel build/dist/*.whl
	cd build && PYTHONPATH=wheel ../$(BIN)/python -P -m onward help nucleus > /dev/null

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

$(CLIENTS)/.installed: $(CLIENT_FILES)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/serving/clients/requirements.txt
	cp tests/serving/clients/package.json $(CLIENTS)
	if command -v npm > /dev/null; then cd $(CLIENTS) && npm install --silent --no-audit --no-fund; fi
	@touch $@
