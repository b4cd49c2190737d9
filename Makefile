# Everything runs inside $(VENV), which the first target that needs it creates.
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# Real data beside the repository is used where it is there; LGMML_DATA names another place.
DATA := $(wildcard $(abspath ../shared/data))
ifneq ($(DATA),)
export LGMML_DATA ?= $(DATA)
endif
# One BLAS thread per test process: two processes with two threads each would fight over two cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
JOBS ?= auto

.DEFAULT_GOAL := help
.PHONY: help setup train tensorboard test test-fast lint format clean paper paper-full picture

help: ## show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create the environment with the tested versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(STAMP) ## train, evaluate and report on generated data, nothing to download (under two minutes)
	$(PY) train.py

tensorboard: $(STAMP) ## watch the runs below outputs/ at http://localhost:6006
	$(VENV)/bin/tensorboard --logdir outputs

test: $(STAMP) ## run every test
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup

test-fast: $(STAMP) ## run the tests that take seconds
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not slow"

lint: $(STAMP) ## ruff, formatting and strict types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove caches and run folders, keep the environment
	rm -rf outputs multirun logs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

paper: $(STAMP) ## every table and figure of the paper, in a reduced size, and docs/results.md
	$(PY) -m research.paper all size=reduced
	$(PY) -m research.paper page size=reduced

paper-full: $(STAMP) ## the same in full size (hours; see docs/results.md)
	$(PY) -m research.paper all size=full
	$(PY) -m research.paper page size=full

picture: $(STAMP) ## the picture of the README, docs/images/overview.png
	$(PY) -m research.picture
