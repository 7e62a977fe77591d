# setup  make .venv with every package pinned; reused as long as the pins match
# demo   the main job: a student learns from a teacher through the real engines on this machine
# demo-real  a pretrained model of 135 M parameters loses layers and is distilled (fetches 92 MB)
# test   the whole suite          check  lint and types          bench  benchmarks, JSON to stdout
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/cpu.lock setup.py pyproject.toml
RUN_DIR ?= runs/demo
PYTEST_ARGS ?=
# two workers: one runs the tests with SGLang servers, the other all else (tests/conftest.py)
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: setup demo demo-real test check bench clean

setup:
	@$(PYTHON) tools/setup_venv.py $(VENV) $(PINS)

demo: setup
	@$(BIN)/opd run examples/arithmetic/demo.yaml --set run.dir=$(RUN_DIR) --overwrite

demo-real: setup
	@$(BIN)/python -m examples.smollm2.demo

test: setup
	@$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: setup
	@$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info
