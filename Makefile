# Every target sets up by itself: a virtual environment in .venv with pinned packages, then the jars for Spark
# and for the local broker. Stamp files in .venv remember what is done, so a second run needs no network.
# Needs Python 3.10+ and Java 17+: PYTHON=/path/to/python and JAVA_HOME choose them.

VENV := .venv
BIN := $(VENV)/bin
# Continuous integration gets plain text: no colours, no cursor movements.
PYTEST_FLAGS ?= $(if $(CI),--color=no -q,)
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long fast check lint format bench chaos lock clean

# Checked while reading this file and reported with $(error): one line on stderr and exit 2, before anything is made.
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
PREFLIGHT := $(shell PYTHON='$(PYTHON)' JAVA_HOME='$(JAVA_HOME)' sh scripts/preflight.sh 2>&1 && echo ok)
ifneq ($(lastword $(PREFLIGHT)),ok)
$(error $(PREFLIGHT))
endif
HOST_PYTHON := $(firstword $(PREFLIGHT))
endif

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.jars ## virtual environment, pinned packages, jars

demo: setup ## run the main example: deposits, exactly once
	$(BIN)/onceflow demo deposits

test: setup ## all tests but the longest
	$(PYTEST) -m "not long"

test-long: setup ## the longest tests: more of the same, and what takes its time
	$(PYTEST) -m long

fast: setup ## the tests that need neither broker nor Spark, but those of the demos
	$(PYTEST) -m "not long" tests/unit tests/protocol $(wildcard tests/model)

check: lint test ## what has to hold before a change is merged: format, lint, types, tests

lint: setup ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## format the code and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## measure throughput and latency on this machine
	$(BIN)/onceflow bench

chaos: setup ## break everything around running flows: make chaos SECONDS=600 SEED=7
	$(BIN)/onceflow chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

lock: setup ## renew requirements/dev.txt from pyproject.toml
	$(HOST_PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/pip install --quiet uv
	$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --no-emit-package onceflow \
		requirements/dev.in --output-file requirements/dev.txt

clean: ## remove what the targets made here (downloaded jars stay in the user's cache)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.packages: requirements/dev.txt
	$(HOST_PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.jars: $(VENV)/.installed src/onceflow/host/jars.py
	$(BIN)/onceflow setup
	@touch $@
