SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INPUTS := pyproject.toml constraints.txt constraints-dev.txt Makefile scripts/setup.sh

# Name another interpreter with `make PYTHON=/path/to/python3.11 setup`.
PYTHON ?=
# More arguments for the program that a target runs: `make serve ARGS="--port 9000"`.
ARGS ?=

# name=folder for each trained adapter that comes with the examples.
DEMO_ADAPTERS := $(foreach config,$(wildcard examples/adapters/*/adapter_config.json),\
	$(notdir $(patsubst %/,%,$(dir $(config))))=$(patsubst %/,%,$(dir $(config))))

# OpenMP threads that spin while they wait take the cores from those that work.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup serve check test test-plain bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install everything (the targets below do it by themselves)

serve: $(STAMP) ## Serve the default model and the demo adapters on port 8000
	@exec $(BIN)/loramux serve $(if $(DEMO_ADAPTERS),--lora-modules $(DEMO_ADAPTERS)) $(ARGS)

check: $(STAMP) ## Formatting, lint, types and the import contract
	@echo "==> ruff format" && $(BIN)/ruff format --check .
	@echo "==> ruff check" && $(BIN)/ruff check .
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> import contract" && $(BIN)/lint-imports --no-logo

# Of tests/unit: these do not depend on speed, so several run at once. What starts engines and servers
# has the machine alone.
TOGETHER := adapters benchmarks client kernels lora memory metrics models registry runner scheduler \
	server sources

test: $(STAMP) ## All tests; with ARGS="-k name" or a path only those
ifneq ($(ARGS),)
	@$(BIN)/pytest --timeout=300 $(ARGS)
else
	@echo "==> compiling the kernels of a CPU (once)" && $(BIN)/python scripts/compile_kernels.py
	@$(BIN)/pytest --timeout=300 -n logical --maxprocesses=4 --dist=loadfile $(TOGETHER:%=tests/unit/%)
	@$(BIN)/pytest --timeout=300 $(TOGETHER:%=--ignore=tests/unit/%)
	@$(MAKE) --no-print-directory test-plain
endif

# On what a CPU without numba runs; without the 200 adapters, which test the memory and take long.
test-plain: $(STAMP) ## The engine's tests on the kernels of a CPU without numba (part of test)
	@LORAMUX_KERNELS=cpu $(BIN)/pytest --timeout=300 -k "not two_hundred" \
		tests/unit/engine/test_build.py tests/unit/engine/test_engine.py \
		tests/unit/engine/test_llm.py tests/unit/runner/test_runner.py

bench: $(STAMP) ## Engine throughput on this machine
	@$(BIN)/loramux bench engine $(ARGS)

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(INPUTS)
	@PYTHON="$(PYTHON)" bash scripts/setup.sh $(VENV)
	@touch $@
