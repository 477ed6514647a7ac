# One command a job; each target installs what it lacks. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# tests that run at once, a file each; JOBS=0 for one after the other, in this process
JOBS   ?= 2
PIP    := $(BIN)/python -m pip --disable-pip-version-check
export PYTHONDONTWRITEBYTECODE ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo up test check format bench bench-gateway bench-peers bench-scaler bench-wakes sim clients fuzz canaries clean

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ingle needs Python 3.11 or newer; say: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.engine: $(BIN)/python pyproject.toml constraints.txt
	@echo "setting up $(VENV) …" >&2
	@$(PIP) install --quiet -c constraints.txt -e '.[engine]' openai
	@# uPlot, for the page's charts: the wheel alone, since what its Python part needs is nothing to us
	@$(PIP) install --quiet -c constraints.txt --no-deps uplot-python
	@touch $@

$(VENV)/.dev: $(VENV)/.engine
	@$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.model: $(VENV)/.engine
	@$(BIN)/ingle model pull smollm2-135m-instruct >&2
	@$(BIN)/python -m kernels.cpu >&2
	@touch $@

setup: $(VENV)/.engine $(VENV)/.model  ## .venv with ingle in it, the demo model in the cache

demo: setup     ## the main job end to end: create, chat over HTTPS, sleep, wake, stop
	@$(BIN)/python -m tests.e2e.demo

up: setup       ## the platform, kept running; prints URL, key and dashboard
	@$(BIN)/ingle up --demo

test: setup $(VENV)/.dev  ## every test that pip alone can serve
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev  ## formatting, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev  ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup $(VENV)/.dev  ## the benchmarks, beside the peers that are installed
	@$(BIN)/python -m tests.bench $(ARGS)
	@$(BIN)/python -m tests.bench.gateway
	@$(BIN)/python -m tests.bench.scaler

bench-wakes: setup $(VENV)/.dev  ## from a request to its first token, from each rung of warmth
	@$(BIN)/python -m tests.bench.wakes $(ARGS)

bench-scaler: $(VENV)/.dev  ## a week's bursty trace under our scaler, beside a naive rule and Knative's; simulated time
	@$(BIN)/python -m tests.bench.scaler $(ARGS)

bench-gateway: setup $(VENV)/.dev  ## what the gateway adds, beside a bare proxy and, if installed, LiteLLM's
	@$(BIN)/python -m tests.bench.gateway $(ARGS)

bench-peers: $(VENV)/.engine  ## install the peers into environments of their own, then run the benchmarks
	@$(PYTHON) -m tests.bench.install
	@$(MAKE) --no-print-directory bench

sim: $(VENV)/.dev  ## the controller, scaler, holding and routing under simulated trouble: make sim SEEDS=500
	@$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),100) $(ARGS)

clients: setup $(VENV)/.dev  ## OpenAI clients of many makers against the platform, each in an environment of its own
	@$(BIN)/python -m tests.contract.clients $(ARGS)

fuzz: setup $(VENV)/.dev  ## 5,200 requests made from the replica's own OpenAPI document: none may end in a 5xx
	@$(BIN)/python -m tests.contract.fuzz $(ARGS)

canaries: setup $(VENV)/.dev  ## 500 rounds of 64 requests at once: does anything of one reach another?
	@$(BIN)/python -m tests.contract.canaries $(ARGS)

clean:          ## remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
