# Everything a developer or CI runs. Needs Python 3.11 or later and make, nothing else:
# each target makes the virtual environment first if it is not there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
SOURCES := lmcache_persist tests $(wildcard benchmarks)

.DEFAULT_GOAL := help
.PHONY: help venv fmt check test unit crash soak engine fuzz mutate bench demo clean ci

help:  ## this text
	@awk -F ':.*## *' '/^[a-z-]+:.*## /{printf "  %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## the virtual environment, vLLM for CPU included

# torchvision and its sisters come along with vLLM, do not match its torch, and are not needed.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed"'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[torch,engine-cpu,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

fmt: $(STAMP)  ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

check: $(STAMP)  ## lint, types, import contracts, schema against migrations
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && set -e && \
	echo "alembic check (on a fresh database)" && \
	$(BIN)/alembic -x database="$$scratch/manifest.sqlite" upgrade head && \
	$(BIN)/alembic -x database="$$scratch/manifest.sqlite" check

test: $(STAMP)  ## all tests: unit, property, integration, crash, engine
	$(PYTEST) tests/unit tests/property tests/integration tests/crash tests/engine --durations=25

unit: $(STAMP)  ## unit and property tests
	$(PYTEST) tests/unit tests/property --durations=10

crash: $(STAMP)  ## tests that kill processes at named points
	$(PYTEST) tests/crash --durations=10

soak: $(STAMP)  ## the long forms: 200 random kills, 20 power cuts, noise, stopped clients (as root)
	SOAK=1 $(PYTEST) tests/crash -s -k "any_moment or nothing_durable_is_lost or noise_anywhere"
	SOAK=1 $(PYTEST) tests/integration/test_clients.py -s -k "stopped_client or silent_client"

engine: $(STAMP)  ## tests with a real vLLM engine on the CPU
	$(PYTEST) tests/engine --durations=0

FUZZ_RUNS ?= 5000000
fuzz: $(STAMP)  ## coverage-guided fuzzing of the protocol, long (FUZZ_RUNS=n); findings in build/fuzz
	mkdir -p build/fuzz
	$(BIN)/python tests/fuzz/fuzz_protocol.py -atheris_runs=$(FUZZ_RUNS) -max_len=65536 \
		-rss_limit_mb=512 -artifact_prefix=build/fuzz/found- build/fuzz tests/fuzz/corpus

mutate: $(STAMP)  ## break the code in each listed way and see a named test go red
	cd tests && ../$(BIN)/python -m mutation

bench: $(STAMP)  ## benchmarks: print figures, gate nothing
	$(BIN)/python -m benchmarks

demo: $(STAMP)  ## a real engine cold and warm, all killed in between (MODEL=hybrid)
	$(BIN)/lmcache-persist demo $(if $(MODEL),--model $(MODEL))

clean:  ## remove what was built, the virtual environment included
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ci: check test  ## what CI runs
