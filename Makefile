# `make figures` and `make test` need nothing but Python 3.11 or later and make: they set up .venv themselves.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.relpos-installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# Only CPU builds of torch come without a Triton; its interpreter runs the kernel tests there.
TRITON := triton==3.6.0
# Without a GPU the tests of the kernels run in Triton's interpreter. The switch works for a whole process, and would slow
# down every other test: they get a process of their own.
INTERPRET := $(shell nvidia-smi -L >/dev/null 2>&1 || echo TRITON_INTERPRET=1)
JOBS ?= 2

.PHONY: help install figures test lint docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

install: $(STAMP)  ## the virtual environment, with pinned versions (the others do this themselves)

# torch first and by its exact version: a CPU build on this machine satisfies it, and nothing after it asks for another.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "relpos needs Python 3.11 or later; set PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "could not make a virtual environment: on Debian, python3-venv is a package of its own" >&2; exit 2; }
	@echo "setting up $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(TORCH)" setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -s)" != Linux || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TRITON)" || \
		echo "no $(TRITON) for this machine: the tests of the fused kernels are skipped"
	@touch $@

figures: $(STAMP)  ## what every head does with position, into figures/ (no GPU, no download of data or models)
	@OMP_NUM_THREADS=$(JOBS) $(BIN)/relpos figure --out figures

# The page's tests drive a Chromium that is here; root on Debian gets Debian's. Without one they are skipped.
define BROWSER
for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	command -v $$name >/dev/null && exit 0; done; \
if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	echo "installing chromium for the page's tests"; \
	export DEBIAN_FRONTEND=noninteractive; \
	timeout 600 apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 || \
	{ timeout 120 apt-get update -qq >/dev/null 2>&1; \
	timeout 600 apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; } || true; \
fi; \
command -v chromium >/dev/null || echo "no Chromium on this machine: the tests of the explorer's page are skipped"
endef

test: $(STAMP)  ## all tests
	@$(BROWSER)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q --ignore tests/test_fused.py
	@OMP_NUM_THREADS=1 $(INTERPRET) $(BIN)/python -m pytest -n $(JOBS) -q tests/test_fused.py tests/test_loss.py \
		tests/test_norm.py tests/test_evaluation.py::test_implementations_agree_with_the_dense_one

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

docs: $(STAMP)  ## bring the generated parts of README.md and docs/ up to date
	@$(BIN)/python docs/generate.py

clean:  ## remove what was built; keeps .venv, runs/ and data/
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache figures
