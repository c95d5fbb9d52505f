# Each target does all of its own set-up: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
PIP = .venv/bin/pip --quiet --disable-pip-version-check

.PHONY: demo test lint clean

demo: .venv/examples.done  ## QM9's eleven tasks with FairGrad and FairGrad + COST: table and plot
	.venv/bin/python examples/qm9.py

test: .venv/dev.done  ## the test suite
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto

lint: .venv/dev.done  ## ruff, mypy, and which room imports which
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "cost_mtl needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv

# torch first and by its exact version: pip then takes the CPU build where one is at hand, and nothing replaces it.
.venv/torch.done: .venv/bin/python constraints.txt
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
	touch $@

.venv/examples.done: .venv/torch.done setup.cfg
	$(PIP) install -c constraints.txt -e '.[examples]'
	touch $@

.venv/dev.done: .venv/torch.done setup.cfg
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
