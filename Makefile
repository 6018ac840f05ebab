# Each target does its own set-up: a virtual environment in .venv, made once. Another place: make VENV=...
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The environments of real engines, 6 GB: made once, kept by `clean`. Those that exist already can be named instead.
ENGINES ?= .engines
RIVALS  ?= .rivals
PREFIXROUTE_VLLM_ENV   ?= $(abspath $(ENGINES))/vllm
PREFIXROUTE_SGLANG_ENV ?= $(abspath $(ENGINES))/sglang

COMPILED ?= .venv-compiled

.PHONY: help demo test test-browser test-engines compiled test-compiled check
.PHONY: bench bench-analyze bench-compare bench-route bench-ingest bench-engines bench-replication bench-scale bench-plan bench-gateways bench-hostile clean clean-engines

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

test: $(VENV)/.dev              ## the test suite, a process for each core, and the core's line coverage (95 % at least)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --cov --cov-report= $(ARGS)
	$(BIN)/python tests/house/core_coverage.py 95

test-browser: $(VENV)/.dev      ## the analyser's page in a headless Chromium (apt-get install chromium, or PREFIXROUTE_BROWSER=...)
	$(BIN)/python -m pytest -m browser tests/analyze/test_analyze_browser.py $(ARGS)

test-engines: $(VENV)/.dev      ## the live suite: real vLLM and SGLang on this CPU, made once in .engines (ARGS=..., ENGINES=DIR)
	$(if $(filter file,$(origin PREFIXROUTE_VLLM_ENV)),examples/launch/setup_vllm.sh $(PREFIXROUTE_VLLM_ENV))
	$(if $(filter file,$(origin PREFIXROUTE_SGLANG_ENV)),examples/launch/setup_sglang.sh $(PREFIXROUTE_SGLANG_ENV))
	PREFIXROUTE_VLLM_ENV=$(PREFIXROUTE_VLLM_ENV) PREFIXROUTE_SGLANG_ENV=$(PREFIXROUTE_SGLANG_ENV) \
		$(BIN)/python -m pytest live_tests $(ARGS)

compiled:                       ## the compiled build, in an environment of its own (.venv-compiled); needs a C compiler
	test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	rm -rf $(COMPILED)/wheel
	HATCH_BUILD_HOOKS_ENABLE=1 $(COMPILED)/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps \
		--wheel-dir $(COMPILED)/wheel .
	$(COMPILED)/bin/python -m pip --disable-pip-version-check install --quiet --force-reinstall --no-deps $(COMPILED)/wheel/*.whl
	$(COMPILED)/bin/python -m pip --disable-pip-version-check install --quiet "prefixroute[test] @ file://$$(ls $(abspath $(COMPILED))/wheel/*.whl)"
	$(COMPILED)/bin/prefixroute --version

test-compiled: compiled         ## the test suite against the compiled build (ARGS=...)
	$(COMPILED)/bin/pytest --numprocesses auto --dist worksteal -m 'not interpreted and not browser' $(ARGS)

check: $(VENV)/.dev             ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house/test_import_rules.py

bench: $(VENV)/.dev             ## how far a decision is from the machine, against the committed baseline; 1 minute (ARGS=--update)
	$(BIN)/python benchmarks/bench.py $(ARGS)

# Their wheels take 500 MB: so they have an environment of their own.
$(RIVALS)/.rivals: pyproject.toml
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[bench-rivals]'
	touch $@

bench-compare: $(RIVALS)/.rivals ## ours against the rivals from PyPI and against the C floor; 10 minutes (ARGS=--quick)
	$(RIVALS)/bin/python benchmarks/compare.py $(ARGS)

bench-analyze: $(VENV)/.dev     ## the log analyser against its bars: 1 GB of chats, sampled curves, verdicts; 5 minutes (ARGS=...)
	$(BIN)/python benchmarks/analyze.py $(ARGS)

bench-route: $(VENV)/.dev       ## what a decision costs (ARGS=...)
	$(BIN)/python benchmarks/route.py $(ARGS)

bench-ingest: $(VENV)/.dev      ## what an engine's events cost, by page size; 2 minutes (ARGS=--quick)
	$(BIN)/python benchmarks/ingest.py $(ARGS)

bench-engines: $(VENV)/.dev     ## three traces over four real engines, with and without routing; 25 minutes (ARGS=...)
	$(BIN)/python benchmarks/engines.py $(ARGS)

bench-scale: $(VENV)/.dev       ## how costs grow, 4 to 1,024 endpoints, and what upkeep takes; 15 minutes (ARGS=--quick)
	$(BIN)/python benchmarks/upkeep.py $(ARGS)
	$(BIN)/python benchmarks/scale.py $(ARGS)

bench-replication: $(VENV)/.dev ## what replication takes: bytes, staleness, memory, idle CPU; 5 minutes (ARGS=--quick)
	$(BIN)/python benchmarks/digest.py $(ARGS)
	$(BIN)/python benchmarks/gossip.py $(ARGS)

bench-plan: $(VENV)/.dev       ## planning against its bars: placement, exact, online, prefill; 5 minutes
	$(BIN)/python benchmarks/plan_place.py $(ARGS)
	$(BIN)/python benchmarks/plan_prefill.py

bench-gateways: $(VENV)/.dev   ## what a sidecar adds to a request, beside other gateways (ARGS='--env DIR' where they are)
	$(BIN)/python benchmarks/gateways.py $(ARGS)

bench-hostile: $(VENV)/.dev    ## what a flood of datagrams costs a node that serves; 1 minute
	$(BIN)/python benchmarks/hostile.py $(ARGS)

clean:                          ## remove what the targets made, but for the engines
	rm -rf $(VENV) $(COMPILED) $(RIVALS) .mypy_cache .ruff_cache .hypothesis .coverage build dist demo-out

clean-engines:                  ## remove the engine environments that test-engines made
	rm -rf $(ENGINES)
