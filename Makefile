# Each target sets up what it needs: `make demo` or `make test` can be the first command typed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCH  := $(VENV)/.installed-bench
QUIET  := --quiet --disable-pip-version-check
SOURCE := ckptman tests examples benchmarks docs/conf.py
# The torch of this environment: that of constraints.txt, another version, or `newest`.
TORCH  ?= $(shell sed -n 's/^torch==//p' constraints.txt)
# One worker more than cores: one of them waits, for a real Slurm in `make test-all`.
JOBS   ?= 3
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-all test-torch test-gpu check format docs campaign test-filesystems faults bench clean

help:
	@echo "make setup     a virtual environment in $(VENV) with ckptman and what it needs"
	@echo "make demo      train, be killed, go on, be verified: in under 4 minutes"
	@echo "make test      the quick tests, the demo and a few real ranks: in under 5 minutes"
	@echo "make test-all  all tests, Slurm and the docs included, and short versions of the long ones"
	@echo "make test-torch TORCH=2.11.0  the quick tests on another torch, in an environment of its own"
	@echo "make test-gpu  what must hold on a GPU, on the GPUs of this machine"
	@echo "make test-filesystems  what must hold on GlusterFS, MooseFS and CephFS, each with two clients on this machine"
	@echo "make check     ruff, formatting, mypy --strict, the layers"
	@echo "make docs      the documentation as a site, in site/: open site/index.html"
	@echo "make campaign  the long versions of tests, and every example"
	@echo "make faults    the fault campaign: thousands of faults, two at a time, and a table at the end"
	@echo "make bench     saves, loads, stalls, steps, listings and prunes, against others and the raw limit"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ckptman needs Python 3.10 or newer: make setup PYTHON=python3.11") if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/; /^torch==newest$$/d' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/python -m pip install $(QUIET) --no-compile --constraint $(VENV)/constraints.txt --editable '.[dev]'
	# pip would compile on one core, and the models of transformers too, which nobody imports. Templates fail to compile.
	$(BIN)/python -m compileall -qq -j 0 -x transformers/models $(VENV)/lib || true
	touch $@

# nvidia-resiliency-ext depends on pynvml, whose presence alone makes torch warn; its writer does without.
$(BENCH): $(STAMP)
	$(BIN)/python -m pip install $(QUIET) --constraint constraints.txt --editable '.[dev,bench]' \
	&& $(BIN)/python -m pip install $(QUIET) --no-deps nvidia-resiliency-ext==0.4.1 \
	&& touch $@ || echo "not all peers can be installed: the benchmarks go on without them"

demo: setup
	$(BIN)/python examples/demo.py

# Files go to workers by the seconds they took: tests/helpers/lanes.py.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS)

test: setup
	$(PYTEST) -m "not slow and not campaign"

test-all: setup
	$(PYTEST) -m "not campaign"

test-torch:
	$(MAKE) test VENV=.venv-torch-$(TORCH)

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# As root, with the packages that a test names which is skipped; .ci/run filesystems installs them.
test-filesystems: setup
	$(BIN)/python -m pytest -m "" tests/filesystems

check: setup
	$(BIN)/ruff check $(SOURCE)
	$(BIN)/ruff format --check $(SOURCE)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_layers.py

format: setup
	$(BIN)/ruff check --fix $(SOURCE)
	$(BIN)/ruff format $(SOURCE)

# -E: a page that did not change is read again, as its warnings would not be repeated otherwise.
docs: setup
	$(BIN)/python -m sphinx -nWEq --keep-going docs site

campaign: setup
	$(BIN)/python -m pytest -m campaign

faults: setup
	$(BIN)/python -m tests.faults

bench: $(BENCH)
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/list_1000.py
	$(BIN)/python benchmarks/status_20.py
	$(BIN)/python benchmarks/prune_10000.py
	$(BIN)/python benchmarks/save_20000.py
	$(BIN)/python benchmarks/replicas.py
	$(BIN)/python benchmarks/many_tensors.py
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis runs site
