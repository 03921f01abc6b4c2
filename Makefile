# Two commands: `make demo` and `make test`. Each makes .venv when it is missing; a second call starts at once.
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   PY=python3          use an environment that exists, install nothing (a container, a machine without a network)
#   PARALLEL=           run the tests in one process
PYTHON ?= python3

ifdef PY
ready :=
else
PY := .venv/bin/python
ready := .venv/.installed
endif

# scripts that tests start elsewhere find the clone, also in an environment where it is not installed
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# tests compile kernels for most of their time: one process per core, 16 at most (PARALLEL= runs them in one)
PARALLEL ?= $(if $(shell $(PY) -c 'import xdist' 2>/dev/null && echo yes),-n auto --maxprocesses 16)

.PHONY: demo test gpu lint notebooks clean help

demo: $(ready)  ## every rung that this machine can run, on real activations
	@$(PY) -m fa3_course demo

test: $(ready) lint  ## the whole test suite; GPU tests are skipped where there is no Hopper
	$(PY) -m pytest $(PARALLEL)

gpu: $(ready)  ## only the tests that need a Hopper, in a few minutes; out/gpu_tests.xml records what ran
	$(PY) -m pytest -m gpu --junitxml=out/gpu_tests.xml $(PARALLEL)

lint: $(ready)
	@if $(PY) -c 'import ruff' 2>/dev/null; then $(PY) -m ruff check . && $(PY) -m ruff format --check .; \
	else echo "ruff is not in this environment: style is not checked"; fi

notebooks: $(ready)  ## rebuild every notebook from its .py, outputs included
	$(PY) -m fa3_course.notebooks build

clean:  ## remove the environment and what commands wrote
	rm -rf .venv out

help:
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# pip skips what is installed already, so a change of the pins costs only the difference
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "Installing into .venv. The first time this downloads about 3 GB on Linux (PyTorch with CUDA; 0.7 GB"
	@echo "without, see README: Laptop) and 0.3 GB on macOS. nvidia-cutlass-dsl comes under NVIDIA's own licence."
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[course,test]'
	@touch $@
