# setup  make .venv with every package pinned; reused as long as the pins match
# demo   the main job: a student learns from a teacher through the real engines on this machine
# test   the whole suite          check  lint and types          bench  benchmarks, JSON to stdout
# docs   the documentation site, in site/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/cpu.lock setup.py pyproject.toml
RUN_DIR ?= runs/demo
PYTEST_ARGS ?=
# two workers: one runs the tests with SGLang servers, the other all else (tests/conftest.py)
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: setup demo test check bench docs clean

setup:
	@$(PYTHON) tools/setup_venv.py $(VENV) $(PINS)

demo: setup
	@$(BIN)/opd run examples/arithmetic/demo.yaml --set run.dir=$(RUN_DIR) --overwrite

test: setup
	@$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: setup
	@$(BIN)/python -m benchmarks

.venv-docs/ready: requirements/docs.lock
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

docs: .venv-docs/ready
	@.venv-docs/bin/python tools/docs_site.py site

clean:
	rm -rf $(VENV) .venv-docs build site *.egg-info
