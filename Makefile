# The whole list of commands, the same at a desk, in CI and on a GPU machine. `make` prints it.
#
#   VENV    where the virtual environment is made
#   PYTHON  the Python that makes it (3.11 to 3.13); `make gpu` runs with it directly
#   TORCH   what pip is asked for first, so that the choice of PyTorch build is made here and not by a dependency
VENV   ?= .venv
PYTHON ?= python3
TORCH  ?= torch==2.13.0

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The package as a folder that Python and mypy can import without an installation: links, laid anew each time.
TREE  := build/tree

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs tutorials gpu matrix mutants clean tree

help:  ## print this list
	@awk -F ':.*##' '/^[a-z]+:.*##/ { printf "  make %-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make the virtual environment and install the package into it, editable

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11 to 3.13 is needed: make PYTHON=...")'
	@echo "Installing PyTorch, Triton and the package into $(VENV): once, a minute or more."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install '$(TORCH)'
	$(PIP) install --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## run the demonstration
	$(BIN)/python -m boundedkv demo

test: lint  ## lint, then every test that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP) tree  ## ruff and mypy
	$(BIN)/python -m ruff check .
	MYPYPATH=$(TREE) $(BIN)/python -m mypy -p boundedkv

docs: $(STAMP) tree  ## build the documentation into site/, to be opened as files
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

tutorials: $(STAMP)  ## run every tutorial and keep what it prints: some minutes
	$(BIN)/python tests/tutorials.py

gpu: tree  ## self test, tests and benchmark on a GPU, with $(PYTHON) as it is: torch, triton, numpy, pytest, hypothesis
	PYTHONPATH=$(CURDIR)/$(TREE) $(PYTHON) tests/gpu.py

matrix:  ## the tests with other versions of Python, PyTorch, Triton and numpy: hours, and some 12 GB in build/matrix
	$(PYTHON) tests/matrix.py

mutants: $(STAMP)  ## plant small faults in copies of the code and see that the tests notice: an hour or two
	$(BIN)/python tests/mutants.py --jobs 2

tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)/boundedkv
	@ln -s $(CURDIR)/common/* $(CURDIR)/reference $(CURDIR)/fast $(TREE)/boundedkv/

clean:  ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist site boundedkv.egg-info boundedkv-demo.svg .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find common reference fast tests docs tutorials -name __pycache__ -prune -exec rm -rf {} +
