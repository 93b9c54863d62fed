# Every target sets up by itself: a virtual environment in .venv with pinned packages, then the jars for Spark
# and for the local broker. Stamp files in .venv remember what is done, so a second run needs no network.
# Needs Python 3.10+ and Java 17+: PYTHON=/path/to/python and JAVA_HOME choose them.

VENV := .venv
BIN := $(VENV)/bin
# Continuous integration gets plain text: no colours, no cursor movements.
PYTEST_FLAGS ?= $(if $(CI),--color=no -q,)
# Containers often ask for no bytecode on disk. With it pytest rewrites its plugins only once, and setup can leave it to
# each module's first import: most modules of the packages are never imported.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)
# TEST_JOBS processes share the tests, file by file, each with a broker and a Spark of its own: one works while another
# one waits. There are two, unless you choose another number (make test TEST_JOBS=1).
JOBS = $(or $(TEST_JOBS),2)
PARALLEL = $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

# `make test-spark` runs tests with another version of Spark, `make test-long` the short form with an old one.
SPARK ?= 3.5
MARKS ?= not long
SPARK_VENV := .venv-spark-$(SPARK)
SPARK_TESTS ?= $(addprefix tests/integration/,\
	test_spark_contract.py test_row_programs.py test_generated_queries.py test_sql.py test_sql_edges.py test_odd_rows.py \
	test_collect.py test_session.py test_flow.py test_process.py test_checkpoint.py \
	test_map.py test_direct_query.py test_side_outputs.py test_joins.py test_chain.py test_deduplicate.py test_calls.py \
	test_claim_check.py test_weaker_state.py test_windows.py test_promote.py test_schema_registry.py) $(addprefix tests/faults/,\
	test_crashes.py test_state_crashes.py test_spark_state_crashes.py test_joins.py test_external_sinks.py test_homes.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-spark fast check lint format bench chaos lock clean

# Checked while reading this file and reported with $(error): one line on stderr and exit 2, before anything is made.
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
PREFLIGHT := $(shell PYTHON='$(PYTHON)' JAVA_HOME='$(JAVA_HOME)' sh scripts/preflight.sh 2>&1 && echo ok)
ifneq ($(lastword $(PREFLIGHT)),ok)
$(error $(PREFLIGHT))
endif
HOST_PYTHON := $(firstword $(PREFLIGHT))
# Spark 3.5 is made for Python up to 3.11.
OLD_SPARK := $(shell $(HOST_PYTHON) -c 'import sys; print("3.5" if sys.version_info < (3, 12) else "4.0")')
endif

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.jars ## virtual environment, pinned packages, jars

demo: setup ## run the main example: deposits, exactly once
	$(BIN)/onceflow demo deposits

test: setup ## all tests but the longest
	$(PYTEST) $(PARALLEL) -m "not long"

test-long: setup ## the longest tests: more of the same, what takes its time, and a short form with an older Spark
	$(PYTEST) $(PARALLEL) -m long; status=$$?; \
	$(MAKE) --no-print-directory test-spark SPARK=$(OLD_SPARK) MARKS=short_form && exit $$status

test-spark: $(SPARK_VENV)/.jars ## tests of what Spark does, with another version: make test-spark SPARK=3.5
	$(SPARK_VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(PARALLEL) -m "$(MARKS)" $(SPARK_TESTS)

# More processes than cores: some of these tests wait for each other's timeouts, not for a core.
fast: JOBS = $(or $(TEST_JOBS),3)
fast: setup ## the tests that need neither broker nor Spark, kill no process and take no seconds, but those of the demos
	$(PYTEST) $(PARALLEL) -m "not long and not slow and not faults" $(wildcard tests/model) tests/unit tests/protocol

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

lock: setup ## renew requirements/*.txt from pyproject.toml and requirements/*.in
	$(HOST_PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/pip install --quiet uv
	for list in requirements/*.in; do \
		$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes \
			--no-emit-index-url --no-header --no-annotate --no-emit-package onceflow \
			$$list --output-file $${list%.in}.txt || exit; \
	done

clean: ## remove what the targets made here (downloaded jars stay in the user's cache)
	rm -rf $(VENV) .venv-spark-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src workshop tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.packages: requirements/dev.txt
	@echo "setup 1 of 3: pinned packages into $(VENV): one to three minutes, without further output"
	$(HOST_PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes \
		-r requirements/dev.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.packages pyproject.toml workshop/pyproject.toml
	@echo "setup 2 of 3: onceflow itself, and its demos, chaos runs and benchmarks"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./workshop
	@touch $@

$(VENV)/.jars: $(VENV)/.installed src/onceflow/host/jars.py
	@echo "setup 3 of 3: jars, and an archive of Spark's classes: about a minute the first time"
	$(BIN)/onceflow setup
	@touch $@

# Another version of Spark in front of the packages of $(VENV). These are added last, or pip would take them for its own
# and remove the Spark that is there.
$(SPARK_VENV)/.installed: $(VENV)/.installed requirements/spark-$(SPARK).txt
	@echo "packages of Spark $(SPARK) into $(SPARK_VENV): a minute or two, without further output"
	rm -rf $(SPARK_VENV)
	$(HOST_PYTHON) -m venv --without-pip $(SPARK_VENV)
	$(BIN)/python -m pip --python $(SPARK_VENV)/bin/python install --quiet --disable-pip-version-check --no-compile \
		--require-hashes --no-deps -r requirements/spark-$(SPARK).txt
	$(SPARK_VENV)/bin/python -c "$$ADD_PACKAGES" $(BIN)/python
	@touch $@

define ADD_PACKAGES
import pathlib, subprocess, sys, sysconfig
ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
found = subprocess.run([sys.argv[1], "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
line = f"import site; site.addsitedir({found!r})\n"
pathlib.Path(sysconfig.get_path("purelib"), "packages.pth").write_text(line)
endef
export ADD_PACKAGES

$(SPARK_VENV)/.jars: $(SPARK_VENV)/.installed $(VENV)/.jars
	$(SPARK_VENV)/bin/python -m onceflow.cli.main setup --jars > /dev/null
	@touch $@
