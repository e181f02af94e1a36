# `make` alone lists the targets. Each target installs what it needs first; an up-to-date install costs nothing.

PYTHON ?= python3
# Installed before everything else, so that the range in pyproject.toml does not pull the newest build with all of CUDA.
# Another one: make install TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
PROMPT ?= def quicksort(items):
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST = $(BIN)/pytest --numprocesses auto --dist worksteal

export PROMPT
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images set it. Then each of pytest's workers, and each of the hundred processes that tests start, compiles all sources.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install serve generate test test-slow test-all check format clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install into it; TORCH="torch==2.12.0" chooses the torch

serve: $(STAMP) ## start the server; ARGS="--port 8000 --model PATH"
	$(BIN)/specmamba serve $(ARGS)

generate: $(STAMP) ## continue PROMPT="..." in the terminal; ARGS="--max-tokens 64"
	@$(BIN)/specmamba generate --prompt="$$PROMPT" $(ARGS)

test: $(STAMP) ## the tests that every change must pass, on all cores; ARGS="-k layering -x"
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP) ## the others: see docs/testing.md
	$(PYTEST) -m slow $(ARGS)

test-all: $(STAMP) ## all tests
	$(PYTEST) $(ARGS)

check: $(STAMP) ## format, lint, types, import order, packaging
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest tests/project/test_layering.py tests/project/test_packaging.py tests/project/test_repository.py

format: $(STAMP) ## format the code and fix what ruff can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## remove build results and caches; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# A torch that was asked for by name is installed even when the stamp is fresh.
ifneq ($(origin TORCH),file)
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specmamba needs Python 3.11 or newer: make install PYTHON=python3.11")'
	@echo "installing into $(VENV) (a minute or two the first time)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
ifeq ($(origin TORCH),file)
	@$(BIN)/python -c 'import tomllib, torch; from packaging.requirements import Requirement; \
	needs = map(Requirement, tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]); \
	exit(not all(need.specifier.contains(torch.__version__) for need in needs if need.name == "torch"))' 2>/dev/null \
	|| $(BIN)/pip install --quiet '$(TORCH)'
else
	@$(BIN)/pip install --quiet '$(TORCH)'
endif
	@$(BIN)/pip install --quiet --editable '.[dev,bench]'
	@touch $@
