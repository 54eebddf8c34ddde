# danlu: everything that is done often, in one word. `make demo` is the place to begin.
#
#   make demo               train, tune and try a small model on built-in data (a few minutes on two cores)
#   make test               format, lint, types, and the fast tests of parts
#   make test-end-to-end    the fast tests of whole commands on a small world of data
#   make test-distributed   the fast tests that start groups of processes; these three are what has to pass
#   make test-all           every test that needs no GPU, the slow ones too, with new random examples
#   make check              the same as test, after putting the format right
#   make mutation           single-line faults, one after the other, that the tests of their room must notice
#   make bench              the scripts of benchmarks/ that need no peers and no data, one after the other
#   make gpu                GPU tests and measurements in ten minutes, with the machine's own torch
#   make gpu-wheels         what that needs on a machine without network, into wheels/

PYTHON ?= python3
WORKERS ?= 2
# Fast tests wait for processes that they start for a quarter of their time: two cores take 748 s with two workers, and
# 600 s with three.
FAST_WORKERS ?= $(shell expr $(WORKERS) + 1)
BIN := .venv/bin
# One thread a test process: several of them share the cores. Bytecode is kept, also where the machine's environment says
# otherwise: the tests start many processes, and rewriting the assertions of all files takes each worker a quarter minute.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS)

# Those that need nothing but this package; sft.py (peers) and real_input.py (data) say themselves what they need.
BENCHMARKS ?= benchmarks/throughput.py benchmarks/generation.py benchmarks/tokenizing.py benchmarks/loading.py \
              benchmarks/recompute.py benchmarks/parallel.py benchmarks/pipeline.py benchmarks/context.py benchmarks/kills.py

.PHONY: demo test test-end-to-end test-distributed test-all lint check mutation bench gpu gpu-wheels clean

demo: .venv/installed
	$(BIN)/danlu demo

test: lint
	$(PYTEST) -n $(FAST_WORKERS) -m "not slow and not more_cases and not gpu and not distributed and not end_to_end"

# With the products of parameters that `make test` leaves out.
test-end-to-end: .venv/installed
	$(PYTEST) -m "(end_to_end or more_cases) and not distributed and not slow and not gpu"

# By files: what a file's tests share is made once, and not by each worker.
test-distributed: .venv/installed
	$(PYTEST) --dist loadfile -m "distributed and not slow and not gpu"

test-all: lint
	HYPOTHESIS_PROFILE=new $(PYTEST) -m "not gpu"

lint: .venv/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy

check: .venv/installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(MAKE) test

mutation: .venv/installed
	PYTHONPATH=tests $(BIN)/python -m mutation.run --workers $(WORKERS)

bench: .venv/installed
	$(foreach script,$(BENCHMARKS),$(BIN)/python $(script) &&) true

# A machine with a GPU brings the torch that fits its driver: it is used as it is, and nothing is downloaded. Blocks of
# tests and measurements, each with a limit of its own, ten minutes together; results are in gpu-results/ (or $OUT).
gpu:
	$(PYTHON) benchmarks/gpu.py

# What `make gpu` needs beside torch, for a machine without network: a folder wheels/ to carry along.
GPU_PYTHON_VERSION ?= 3.12
GPU_CUDA ?= 130
gpu-wheels:
	$(PYTHON) benchmarks/gpu_wheels.py --python $(GPU_PYTHON_VERSION) --cuda $(GPU_CUDA)

# torch comes first and alone: its wheel is most of the download, and a plain error if it fails.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve]'
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
