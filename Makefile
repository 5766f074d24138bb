# `make serve` and `make test` are all that README needs; `make help` lists the rest.
# PIP_ARGS reaches every pip call, e.g. PIP_ARGS="--index-url ..." for another torch build.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_ARGS ?=
MODEL ?= demo
PORT ?= 8000
ARGS ?=
N ?= 600
JOBS ?= 2
# What `make gpu` has run, for tools/combos.py --ran; COMMIT, where git does not say it.
CELLS ?= .cache/cells-gpu.json
COMMIT ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS)
# Tests use one thread and no model hub: tests/conftest.py sets that up.
# JOBS processes; tests that share a server or a model stay together (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: help install serve chat test check sweep soak gpu sim bench clients doctor docs clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 10

# ---------------------------------------------------------------- installation, once
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned: a range would let pip take the largest build that it can find.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@

# ---------------------------------------------------------------- running
install: $(VENV)/.installed  ## make .venv with penstock in it, and nothing more

serve: $(VENV)/.installed  ## install, then serve MODEL (demo) on 127.0.0.1:PORT (8000)
	@exec $(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

chat: $(VENV)/.installed  ## install, then talk to MODEL in the terminal
	@exec $(BIN)/penstock chat $(MODEL) $(ARGS)

doctor: $(VENV)/.installed  ## this machine and the chosen back-ends
	@$(BIN)/penstock doctor

bench: $(VENV)/.installed-dev  ## measure: make bench ARGS="..."
	@$(BIN)/penstock bench $(ARGS)

clients: $(VENV)/.installed-dev  ## what people use, each in an environment of its own: docs/getting-started/clients.md
	$(BIN)/python bench/clients/run.py $(ARGS)

# ---------------------------------------------------------------- checking
test: $(VENV)/.installed-dev  ## every test but the long ones
	$(PYTEST) -m "not sweep and not soak and not gpu" --times=.cache/times.json --cells=.cache/cells-test.json $(ARGS)

check: $(VENV)/.installed-dev  ## lint, types, tidy, unit tests, a few simulations, in a minute or two
	$(BIN)/ruff check src tests bench examples tools
	$(BIN)/mypy
	$(PYTEST) -m "not sweep and not soak and not gpu" tests/tidy tests/unit
	$(BIN)/penstock sim --seeds 20

sweep: $(VENV)/.installed-dev  ## the long loops, once through
	$(PYTEST) -m sweep --times=.cache/times-sweep.json --cells=.cache/cells-sweep.json $(ARGS)

gpu:  ## on a machine with a CUDA device, PYTHON's own torch and triton: kernels, executors, servers
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -p no:cacheprovider --device cuda \
		-m "not sweep and not soak or also_gpu" --cells=$(CELLS) $(if $(COMMIT),--commit=$(COMMIT)) \
		tests/unit/test_rehearsal.py tests/unit/test_safetensors_file.py tests/unit/test_fp8_products.py \
		tests/parity/test_kernels.py \
		tests/parity/test_cuda_chunks.py \
		tests/unit/test_transfer_layout.py::test_pages_of_a_gpu_are_read_and_written_in_one_call \
		tests/unit/test_mover_copies.py::test_pages_of_a_gpu_go_into_parts_of_host_pages_and_back \
		tests/conformance/test_executor_core.py tests/conformance/test_executor_plans.py \
		tests/conformance/test_executor_hosted.py tests/conformance/test_executor_mixed.py \
		tests/conformance/test_executor_latent.py tests/conformance/test_executor_storage.py \
		tests/conformance/test_executor_fp8.py \
		tests/conformance/test_executor_states.py tests/conformance/test_executor_windows.py \
		tests/conformance/test_executor_drafts.py tests/conformance/test_hosted_drafts.py \
		tests/conformance/test_mtp.py \
		tests/conformance/test_executor_prompt_logprobs.py tests/conformance/test_late_choice.py \
		tests/parity/test_recall_model.py tests/equal \
		tests/e2e/test_pair.py tests/e2e/test_pair_faults.py tests/e2e/test_pair_http.py \
		tests/e2e/test_hosted_http.py tests/e2e/test_pipeline.py tests/e2e/test_storage.py $(ARGS)
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -p no:cacheprovider --device cuda \
		tests/e2e/test_engines.py tests/e2e/test_pipeline_death.py -k "gpus_of_their_own or a_hang and device"

soak: $(VENV)/.installed-dev  ## longer still: the loops whole, other seeds, forced faults, seeded bugs from elsewhere
	$(BIN)/penstock sim --first 100000 --seeds 10000
	$(PYTEST) -m soak
	$(PYTEST) --hypothesis-profile=anew tests/property

sim: $(VENV)/.installed-dev  ## N simulations of the planner, all modes: make sim N=10000
	$(BIN)/penstock sim --seeds $(N) $(ARGS)

docs: $(VENV)/.installed  ## write again what comes from the code: flags, models, combinations
	$(BIN)/python tools/flags_reference.py > docs/reference/flags.md
	$(BIN)/python tools/flags_reference.py migration > docs/reference/migration.md
	$(BIN)/python tools/models_reference.py > docs/reference/models.md
	$(BIN)/python tools/metrics_reference.py > docs/reference/metrics.md
	$(BIN)/python tools/combos.py > docs/reference/compatibility.md
	$(BIN)/python tools/combos.py --into README.md
	$(BIN)/python tools/models_reference.py --into README.md
	$(BIN)/python tests/words.py

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
