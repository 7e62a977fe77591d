# setup      make .venv with every package pinned; reused as long as the pins match
# demo       the main job: a student learns from a teacher through the real engines on this machine
# demo-real  a pretrained model of 135 M parameters loses layers and is distilled (92 MB)
# test       the whole suite         check  lint and types         bench  short benchmarks, JSON
# test-fast  the quick files of tests/unit: most tests, no engines
# setup-gpu  make .venv-gpu for a node with NVIDIA GPUs, from requirements/gpu.lock
# gpu-check  what works on this machine's GPU and how fast; GPU_OUT holds the record
#            gpu-check-dry: the same code at a tiny size on the CPU
# gpu-ready  what can be proven of .venv-gpu without a GPU, within ten minutes; READY_OUT holds it
#            gpu-ready-suites: the unit and the gloo suite on its versions; SUITES_OUT
# gpu-lock   resolve requirements/gpu.lock anew
# setup-verifiers  make .venv-verifiers, the Python of examples/verifiers
# docs       the documentation site, in site/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/cpu.lock setup.py pyproject.toml
GPU_VENV := .venv-gpu
GPU_PINS := requirements/gpu.lock setup.py pyproject.toml
GPU_OUT ?= gpu-check.json
READY_OUT ?= gpu-ready.json
SUITES_OUT ?= gpu-suites.json
# $(call record,COMMAND,FILE): what a check prints; none where it could not begin
record = @$(1) > $(2) || { code=$$?; [ -s $(2) ] || rm -f $(2); exit $$code; }
RUN_DIR ?= runs/demo
PYTEST_ARGS ?=
# two workers: one begins with the tests that share two SGLang servers, the other with those of
# several ranks (tests/conftest.py)
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: setup demo demo-real test test-fast check bench docs setup-verifiers setup-gpu gpu-check gpu-check-dry gpu-ready gpu-ready-suites gpu-lock clean

setup:
	@$(PYTHON) tools/setup_venv.py $(VENV) $(PINS)

demo: setup
	@$(BIN)/opd run examples/arithmetic/demo.yaml --set run.dir=$(RUN_DIR) --overwrite

demo-real: setup
	@$(BIN)/python -m examples.smollm2.demo

test: setup
	@$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-fast: setup
	@$(BIN)/python -m pytest $(WORKERS) --fast $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: setup
	@$(BIN)/python -m benchmarks draws draw_step expert_rows learner lean_logp

.venv-docs/ready: requirements/docs.lock
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

docs: .venv-docs/ready
	@.venv-docs/bin/python tools/docs_site.py site

.venv-verifiers/ready: requirements/verifiers.lock
	@$(PYTHON) -m venv .venv-verifiers
	@.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

setup-verifiers: .venv-verifiers/ready

setup-gpu:
	@$(PYTHON) tools/setup_venv.py $(GPU_VENV) $(GPU_PINS)

gpu-check: setup-gpu
	@$(GPU_VENV)/bin/python -m checks gpu --budget-s 540 --out $(GPU_OUT)

gpu-check-dry: setup
	@$(BIN)/python -m checks gpu --budget-s 540 --out $(GPU_OUT) --dry

gpu-ready: setup-gpu
	$(call record,$(GPU_VENV)/bin/python -m checks gpu_ready,$(READY_OUT))

gpu-ready-suites: setup-gpu
	$(call record,$(GPU_VENV)/bin/python -m checks gpu_suites,$(SUITES_OUT))

# No index address stands in the lock; a hash holds whichever index serves a file. Left out: this
# project, and the CUDA 12 core, which TransformerEngine's source names until torch's CUDA is known.
gpu-lock: setup
	@$(BIN)/uv pip compile requirements/gpu.in --output-file requirements/gpu.lock --quiet \
	  --python-version 3.12 --python-platform x86_64-manylinux_2_34 --generate-hashes --no-annotate \
	  --no-emit-package megatron-opd --no-emit-package transformer-engine-cu12 \
	  --custom-compile-command "make gpu-lock"

clean:
	rm -rf $(VENV) $(GPU_VENV) .venv-docs .venv-verifiers build site *.egg-info
