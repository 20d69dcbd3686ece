# make demo      set up, then the whole pipeline on bundled digits: tables, figures, a report
# make test      set up, then all checks and tests
# make install   only the environment (.venv, from the lock file): for a cluster's login node

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := envs/requirements.lock
OUT := $(LOCK)
DECODER := maect/data/native/libmaect_jpeg.so

.PHONY: install squashed moved demo test test-slow check packages lock docs clean
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
$(DECODER): maect/data/native/jpeg_crop.c maect/data/native/kernels.h | $(VENV)/.installed
	-$(BIN)/python -P -m maect.data.native.build

# Numba compiles at UMAP's first import and keeps the code: half a minute once.
$(VENV)/.compiled: $(VENV)/.installed
	$(BIN)/python -P -W ignore -c 'import umap'
	touch $@

demo: install
	$(BIN)/maect demo

# Four workers on two cores: many tests wait for processes, time limits or SLURM.
test:
	@$(MAKE) --no-print-directory --jobs=3 install check packages
	$(BIN)/pytest tests -n 4 --max-worker-restart 2 --durations 15 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: install
	$(BIN)/pytest tests -m slow --session-timeout 36000

packages:
	tests/cluster/install.sh

check: $(VENV)/.installed $(DECODER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint --config experiment=digits

lock: install
	$(BIN)/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o $(OUT)

# graphviz draws the rules (apt install graphviz).
docs: install
	mkdir -p docs/images
	$(BIN)/snakemake --config experiment=digits --rulegraph dot 2> /dev/null | dot -Tsvg > docs/images/pipeline.svg
	$(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) .snakemake build *.egg-info
