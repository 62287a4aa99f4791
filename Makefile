# make demo: the main job on embedded data.  make test: lint, types, tests.
# Both build .venv in this folder first; nothing else is needed but Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test lint lock clean

demo: .venv/installed
	$(BIN)/leadline demo

test: .venv/installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --all-installed --cov --cov-report=term:skip-covered --cov-fail-under=95

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# requirements.lock only constrains: a package that this system does not need is not installed.
.venv/installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "leadline needs Python 3.11 or newer; set PYTHON=path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

# Write down what is installed in .venv now.
lock: .venv/installed
	$(BIN)/python -m pip freeze --exclude-editable > requirements.lock

clean:
	rm -rf .venv results
