# The two commands of the README are `make demo` and `make test`. Each makes .venv if there is none.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RUN_DIR ?= runs/demo
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test check prove format clean
help:
	@echo 'make demo        train the built-in example: 3D-parallel on 8 CPU ranks, about 100 steps'
	@echo 'make check       every day: format, lint, types, arrows, tidy, unit tests (under 90 s)'
	@echo 'make test        every test, also against real object stores, and a slice of each long proof'
	@echo 'make prove NAME  one proof whole, JSON on standard output; without a name: lists them'
	@echo 'make format      put the code into its one format'
	@echo 'make clean       remove what the build and the demo made'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	@touch $@ $(VENV)/installed-run

demo: $(VENV)/installed-run
	$(BIN)/keepstep train --run-dir $(RUN_DIR)

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n 2 -m 'not ranks and not slow'

# Tests that talk to real object stores on loopback have a run of their own: their servers want a core.
test: check
	$(BIN)/pytest -q -n 2 -m '(ranks or slow) and not servers'
	$(BIN)/pytest -q -n 1 -m servers

# `make prove NAME`: the words after `prove` are names of proofs, not targets.
ifeq (prove,$(firstword $(MAKECMDGOALS)))
NAMES = $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
.PHONY: $(NAMES)
$(NAMES): prove
	@:
endif
prove: $(VENV)/installed-dev
	@$(BIN)/python -m tests.prove $(NAMES)

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist runs src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
