# Each target does its own set-up: a virtual environment in .venv, made once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check bench coverage clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("prefixroute needs Python 3.10 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready            ## four emulated nodes, unrouted then routed, on the same requests
	$(BIN)/prefixroute demo $(ARGS)

test: $(VENV)/.ready            ## the whole test suite
	$(BIN)/python -m pytest $(ARGS)

coverage: $(VENV)/.ready        ## line coverage of the core, 95 % at least
	$(BIN)/python -m pytest --cov --cov-report=term $(ARGS)
	$(BIN)/python tests/core_coverage.py 95

check: $(VENV)/.ready           ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_import_rules.py

bench: $(VENV)/.ready           ## decision cost
	$(BIN)/python benchmarks/route.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .coverage build dist
