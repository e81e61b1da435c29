# Everything a contributor needs: setup, demo, test, check, bench.
VENV := .venv
PYTHON := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test check bench

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(PYTHON) -m dwdp.tools.cli demo

test: setup
	$(PYTHON) -m pytest

check: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m tests.config.observables --check
	$(PYTHON) -m pytest tests/test_repository.py

bench: setup
	$(PYTHON) -m dwdp.tools.overlap
