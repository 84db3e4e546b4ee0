# Everything a fresh machine with Python >= 3.11, pip and make needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DOCS   := .venv-docs
TORCH  := torch==2.13.0
MCORE  := megatron-core==0.16.1
# Python compiles what is imported; pip would compile all modules of all packages, which takes longer than to install them.
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Two processes, each of which takes the next file: the longest come first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# The types are checked while tests run; what is wrong with them is shown after the tests.
TYPES  := $(VENV)/types.txt
tested = $(BIN)/mypy > $(TYPES) 2>&1 & types=$$!; $(PYTEST) $(1); tests=$$?; \
	wait $$types || { types=$$?; cat $(TYPES); exit $$((tests ? tests : types)); }; exit $$tests

# One thread a process: the tests start several ranks on few cores.
export OMP_NUM_THREADS ?= 1
export TORCHDYNAMO_DISABLE := 1
export HF_HUB_OFFLINE := 1
# Modules are compiled once, and not again by each of a thousand processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all part style lint bench fuzz faults docs clean

demo: $(VENV)/.ready  ## Hugging Face -> Megatron-Core, train, and back, with every step checked
	$(BIN)/python -m demo

test: $(VENV)/.ready style  ## lint, types, and one test of each thing that can go wrong
	@$(call tested,-m "not slow and not thorough")

test-all: $(VENV)/.ready style  ## also other versions and other frameworks: tests/environments.py makes them
	@$(call tested)

part: $(VENV)/.ready  ## all tests of a part of tests/jobs.py that need no second framework: make part PART=doctor
	$(PYTEST) -m "not slow" --part $(PART)

style: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

bench: $(VENV)/.ready  ## wall time and memory beside cp and beside other tools
	$(BIN)/python -m bench

fuzz: $(VENV)/.ready  ## every parser for a minute of processor time, guided by coverage
	$(BIN)/python -m tests.fuzz

docs: $(DOCS)/.ready  ## the documentation as a site, in site/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# An environment of its own: it needs neither torch nor the tests.
$(DOCS)/.ready: pyproject.toml Makefile
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	touch $@

faults: $(VENV)/.ready  ## conversions with system calls that fail, and a table of what came of it
	$(BIN)/python -m tests.faults

# torch comes first and by itself, at the version that the tests know. megatron-core comes without its
# requirements, which would pull in CUDA packages that nothing here uses.
$(VENV)/.ready: pyproject.toml Makefile
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TRL, which the tests run, needs Python 3.11 or later: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV); the first time this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=24"
	$(PIP) $(TORCH) || $(PIP) torch
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps $(MCORE)
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache build dist demo-output
