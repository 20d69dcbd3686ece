# make demo      set up, then the whole pipeline on bundled digits: tables, figures, a report
# make test      set up, then all checks and tests
# make test-faults everything that three audits of faults tried; writes docs/results/reliability/fault_audit.csv
# make mutate    small faults in the modules that matter most; writes docs/results/reliability/mutation.csv
# make test-cpus the numeric tests once more, as they compute on processors without AVX-512 or AVX2
# make install   only the environment (.venv, from the lock file): for a cluster's login node

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := envs/requirements.lock
OUT := $(LOCK)
DECODER := maect/data/native/libmaect_jpeg.so

.PHONY: install squashed moved demo test tests test-cpus test-faults test-slow mutate check packages gpu gpu-packages lock docs dist metadata crate conda paper clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed $(VENV)/.compiled $(DECODER)

# uv installs the lock file in seconds where pip takes minutes; pip brings uv, itself from the lock.
# Compiling to bytecode takes half a minute once and saves four seconds at every start of a process.
# The scripts of an environment name their interpreter in full: in a clone that was moved it is made again.
# One that is a link is somebody else's.
MOVED := $(filter-out $(CURDIR)/$(VENV),$(shell test -L $(VENV) || sed -n 's/^command = .* //p' $(VENV)/pyvenv.cfg 2> /dev/null))
$(VENV)/.installed: $(LOCK) pyproject.toml $(if $(MOVED),moved)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "maect needs Python 3.11 to 3.13; say which: make install PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(if $(MOVED),--clear) $(VENV) || \
		{ echo "python3 -m venv failed: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	awk '/^uv==/ {on = 1} on {print} on && !/\\$$/ {exit}' $(LOCK) > $(VENV)/uv.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(VENV)/uv.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes --compile-bytecode $(LOCK)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

moved:
	@echo "the clone was moved from $(MOVED): its environment is made again"

# The environment as one file, for envs/squashed_python (apt install squashfs-tools).
squashed: install
	mksquashfs $(VENV) $(VENV).sqfs -noappend -quiet -no-progress

# Optional: without compiler or headers its line says what is missing.
$(DECODER): maect/data/native/jpeg_crop.c maect/data/native/kernels.h maect/data/native/build.py | $(VENV)/.installed
	-$(BIN)/python -P -m maect.data.native.build

# Numba compiles at UMAP's first import and keeps the code: half a minute once.
$(VENV)/.compiled: $(VENV)/.installed
	$(BIN)/python -P -W ignore -c 'import umap'
	touch $@

demo: install
	$(BIN)/maect demo

# Tests start hundreds of processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

# Three workers on two cores: many tests wait for processes, time limits or SLURM. The checks run beside them.
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --max-worker-restart 2 --durations 15 --dist loadfile --no-loadscope-reorder -m "not slow"
test:
	@$(MAKE) --no-print-directory --jobs=2 install packages
	@$(MAKE) --no-print-directory --jobs=2 check tests

tests:
	$(PYTEST) tests

# PyTorch's kernels for processors below this one; its own are `make test`'s. Processes that tests
# start inherit the variable. Left out: files in which nothing hangs on a sum.
NUMERIC := tests/unit/train tests/unit/models tests/unit/evaluate tests/unit/data/test_native.py
ANY_CPU := train/test_damage train/test_engine_resources \
	train/test_run_lock train/test_flops train/test_kills \
	train/test_memory train/test_paper_tables train/test_second_writing train/test_watchdog \
	evaluate/test_explore evaluate/test_lists evaluate/test_throughput
test-cpus: install
	@case $$($(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())') in \
		AVX512) below="default avx2" ;; AVX2) below=default ;; *) below= ;; esac; \
	for kernels in $$below; do \
		echo "ATEN_CPU_CAPABILITY=$$kernels"; \
		ATEN_CPU_CAPABILITY=$$kernels $(PYTEST) $(NUMERIC) $(ANY_CPU:%=--ignore=tests/unit/%.py) || exit; \
	done

# The first two audits' trials lie beside what they attack.
FAULTS := tests/faults tests/unit/launch tests/unit/test_power_loss.py tests/unit/test_files.py tests/unit/test_run_folder.py \
	tests/unit/test_changed_images.py tests/unit/train/test_damage.py tests/unit/train/test_run_lock.py \
	tests/unit/train/test_kills.py tests/unit/train/test_resume.py tests/unit/data/test_odd_images.py
test-faults: install
	$(PYTEST) $(FAULTS) --audit docs/results/reliability/fault_audit.csv

# Half an hour for a fifth of the faults; stopped, it continues. MODULES=maect/data/order.py for some.
mutate: install
	$(BIN)/python -P tests/mutation.py $(MODULES)

test-slow: install
	$(BIN)/pytest tests -m slow --session-timeout 36000 -o faulthandler_timeout=3700

# On a GPU machine, also a bare one with PyTorch and timm: nine minutes, one report.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -u benchmarks/gpu.py --out build/gpu \
		$(if $(wildcard build/packages.tar.gz),--packages build/packages.tar.gz) \
		$(if $(wildcard build/cifar10.tar.xz),--images build/cifar10.tar.xz) $(GPU)

# What such a machine lacks, to be carried there, for its Python.
FOR ?= 3.12
gpu-packages: install
	$(BIN)/python -P benchmarks/gpu_packages.py --out build/packages.tar.gz --python $(FOR)

packages:
	tests/install.sh

check: $(VENV)/.installed $(DECODER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint --config experiment=digits

lock: install
	$(BIN)/uv $(if $(PINS),--no-config) pip compile pyproject.toml $(PINS:%=--override %) --group dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o $(OUT)

ADDRESS := $(shell sed -n 's/^repository-code: *//p' CITATION.cff)

# graphviz draws the rules (apt install graphviz).
docs: install
	mkdir -p docs/images build
	$(BIN)/snakemake --quiet all --config experiment=digits --rulegraph dot > build/rules.dot
	dot -Tsvg -o docs/images/pipeline.svg build/rules.dot
	MAECT_ADDRESS=$(ADDRESS) $(BIN)/mkdocs build --quiet --strict

# sdist and wheel, which the slow tests install on each version of Python.
dist: install
	$(BIN)/uv build --quiet --out-dir dist .

# What archives and catalogues read, of CITATION.cff.
metadata: $(VENV)/.installed
	$(BIN)/python -P docs/metadata.py

# The repository as a Workflow RO-Crate, for WorkflowHub.
crate: metadata
	rm -rf build/crate && mkdir -p build/crate
	git archive HEAD | tar --extract --directory build/crate
	$(BIN)/python -P docs/metadata.py build/crate

# A recipe for conda-forge, of the sdist; once that is on an index, `source` is its address there.
conda: dist
	mkdir -p build/conda
	$(BIN)/python -P docs/metadata.py conda build/conda

# The paper for JOSS and a note of two pages, in build/paper; pandoc and Typst are fetched for it.
paper: $(VENV)/.installed
	$(BIN)/uv run --quiet --no-project --python $(BIN)/python --with typst --with pypandoc-binary \
		--with jinja2 --with pyyaml python -P docs/paper/build.py build/paper

clean:
	rm -rf $(VENV) .snakemake build dist *.egg-info
