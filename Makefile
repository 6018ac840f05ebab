# Each target does its own set-up: a virtual environment in .venv, made once. Another place: make VENV=...
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help demo test check bench bench-replication clean

help:                           ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/'

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "prefixroute needs Python 3.10 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo             ## four emulated nodes, unrouted then routed, on the same requests (ARGS=...)
	$(BIN)/prefixroute demo $(ARGS)

test: $(VENV)/.dev              ## the test suite, and the core's line coverage (95 % at least)
	$(BIN)/python -m pytest --cov --cov-report= $(ARGS)
	$(BIN)/python tests/core_coverage.py 95

check: $(VENV)/.dev             ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_import_rules.py

bench: $(VENV)/.dev             ## what a decision costs (ARGS=...)
	$(BIN)/python benchmarks/route.py $(ARGS)

bench-replication: $(VENV)/.dev ## what replication takes: bytes, staleness, memory, idle CPU; 5 minutes (ARGS=--quick)
	$(BIN)/python benchmarks/digest.py $(ARGS)
	$(BIN)/python benchmarks/gossip.py $(ARGS)

clean:                          ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .coverage build dist demo-out
