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

# Two processes at once, each file in one of them; then what measures times, with nothing beside it. In the order of the
# names: xdist would put files of few tests last, which are the slow ones, and one process would wait for the other.
# Compiled modules are kept, because hundreds of processes import them.
test: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not gpu"
	$(PYTHON) -m pytest -m "alone and not gpu"

check: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m tests.config.observables --check
	$(PYTHON) -m dwdp.tools.variables --check docs/variables.md
	$(PYTHON) -m pytest tests/test_repository.py

bench: setup
	$(PYTHON) -m dwdp.tools.overlap
