SHELL := bash
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
# Files are installed by their hashes where these locks are for this Python and machine; LOCKS= goes by versions alone.
LOCKS ?= locks
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup train tensorboard test test-fast test-newest test-processors lint format docs build clean paper paper-full picture \
	crash mutants soak fuzz lock licences sbom audit

help: ## show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create the environment with the tested versions

$(STAMP): pyproject.toml constraints.txt $(wildcard locks/*.txt)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m tools.install $(if $(LOCKS),,--no-locks)
	@touch $@

train: $(STAMP) ## train the paper's system, then the default, on generated data; compare both with LightGBM (under two minutes)
	$(PY) train.py 'reference=[lgmml,lightgbm]'

tensorboard: $(STAMP) ## watch the runs below outputs/ at http://localhost:6006
	$(VENV)/bin/tensorboard --logdir outputs

test: $(STAMP) ## run every test
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup

# Processors round differently: torch's vector instructions, seed of the pretend processor (tests/processor.py), threads.
# The first has MKL's products without vector instructions, too: MKL_ENABLE_INSTRUCTIONS is not obeyed on AMD, MKL_CBWR is.
PROCESSORS ?= default:1:1 avx2:2:2 native:3:1
NUMERICAL := tests/functional tests/models tests/fitting tests/training tests/evaluation tests/test_contracts.py \
	$(addprefix --ignore=tests/,training/test_resume.py training/test_shortage.py training/test_memory.py training/test_loggers.py \
	models/test_trees.py models/test_export.py) \
	$(addprefix --deselect=tests/,functional/test_gmml.py::test_bank_fits_in_two_gibibytes \
	functional/test_gmml.py::test_bank_keeps_to_its_budget \
	training/test_run.py::test_workers_end_with_the_run models/test_preprocess.py::test_exports \
	models/test_preprocess.py::test_list_rank_features_run_in_onnxruntime \
	training/test_features.py::test_exported_models_keep_the_choice)

test-processors: $(STAMP) ## run the numerical tests as three other processors would round
	@for each in $(PROCESSORS); do \
		IFS=: read -r vectors seed threads <<< "$$each"; \
		echo "vector instructions: $$vectors, pretend processor: $$seed, threads: $$threads"; \
		unset ATEN_CPU_CAPABILITY MKL_CBWR; \
		if [ $$vectors != native ]; then export ATEN_CPU_CAPABILITY=$$vectors; fi; \
		if [ $$vectors = default ]; then export MKL_CBWR=COMPATIBLE; fi; \
		LGMML_PROCESSOR=$$seed OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads \
			$(PY) -m pytest -q -n $(JOBS) --dist loadgroup $(NUMERICAL) || exit 1; \
	done

test-fast: $(STAMP) ## run the tests that take seconds
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not slow"

# Only torch has its tested version: without one, pip would take a build with CUDA (gigabytes) over the one at hand.
NEWEST ?= .newest

test-newest: ## run the fast tests with the newest packages that pip gives, in an environment of its own (.newest)
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $$(grep '^torch==' constraints.txt) -e '.[dev]'
	$(TEST_ENV) $(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow"

mutants: $(STAMP) ## change the package in 200 places, one at a time; which changes does no test notice? (half an hour)
	$(TEST_ENV) $(PY) -m tools.mutants --jobs 2

lint: $(STAMP) ## ruff, formatting and strict types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(STAMP) ## the site, below build/site; a dead link or an undocumented public name is an error
	$(PY) -m sphinx -b html -W --keep-going -n -E -q -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

build: $(STAMP) ## wheel and sdist, below dist/
	$(PY) -m build --no-isolation

clean: ## remove caches and run folders, keep the environment
	rm -rf outputs multirun logs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

paper: $(STAMP) ## every table and figure of the paper, in a reduced size, and docs/results.md
	$(PY) -m research.paper all size=reduced
	$(PY) -m research.paper page size=reduced

paper-full: $(STAMP) ## the same in full size (hours; see docs/results.md)
	$(PY) -m research.paper all size=full
	$(PY) -m research.paper page size=full

picture: $(STAMP) ## the pictures of the README, of the method and of the gallery, below docs/images
	$(PY) -m research.picture
	$(PY) -m research.method_picture
	$(PY) -m research.gallery

crash: $(STAMP) ## kill runs at every turn and compare what comes of them; docs/reliability.md (half an hour)
	$(PY) -m tools.crash

soak: $(STAMP) ## score for two hours with eight threads: does memory grow? (a third of a core)
	$(TEST_ENV) $(PY) -m tools.soak --out outputs/soak.csv

fuzz: $(STAMP) ## change files for ten minutes, guided by coverage: does a reader crash, hang or grow?
	$(PIP) -c constraints.txt -e '.[fuzz]'
	$(TEST_ENV) $(PY) -m tools.fuzz

lock: $(STAMP) ## write locks/ anew: the files of the tested versions with their hashes
	$(PY) -m tools.supply lock

licences: $(STAMP) ## the licence of everything installed
	$(PY) -m tools.supply licences

sbom: $(STAMP) ## a bill of materials of the package and all it needs, dist/sbom.cdx.json
	$(PY) -m tools.supply sbom --output dist/sbom.cdx.json

audit: $(STAMP) ## known vulnerabilities of the tested versions, by pip-audit in an environment of its own
	test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/pip install --quiet pip-audit; }
	.audit/bin/pip-audit --strict --progress-spinner off --disable-pip -r locks/build.txt -r locks/all.txt
