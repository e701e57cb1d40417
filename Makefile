# A fresh machine needs Python >= 3.11 and make; everything else goes into VENV.
# Another interpreter gets an environment of its own: PYTHON=python3.13 uses .venv-python3.13, /usr/bin/python3 .venv-usr-bin-python3.
PYTHON ?= python3
VENV   ?= .venv$(addprefix -,$(subst /,-,$(patsubst /%,%,$(filter-out python3,$(PYTHON)))))
PYTEST_ARGS ?=
# Tests wait as much as they compute: three at once keep two cores busy.
TEST_JOBS ?= 3

# Tests start Python hundreds of times: each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

PY  := $(VENV)/bin/python
BIN := $(VENV)/bin

.PHONY: help demo example example-flow example-claims quick test test-all quality style stress structure mutants bench-engine bench-samples bench-prefetch bench-checkpoint bench-tasks bench-claims bench-remote bench-scale bench-start bench-touch bench-blocks bench-fsspec bench-epochs bench-policies plots screenshots deps docs clean
.DEFAULT_GOAL := help

help:            ## this list
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p;s/^\([a-z-]*\):  *## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; } # Debian without python3-venv leaves half an environment

# The package alone: enough for the demo.
$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet -e .
	@touch $@

# What `make quick` needs. An environment that has more has it too.
$(VENV)/.quick: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --no-compile -e '.[s3,fsspec,arrow,tasks]' --group quick
	@touch $@ $(VENV)/.core

# Tests, linters, docs and the peers of the benchmarks: one pip command, so that the torch that is pinned is the torch that is taken.
# The pip of a fresh environment may be older than 25.1, which is the first that knows dependency groups.
# CHIA pins an older Ray, and other packages that its cache and bypass do not use; datasets an older fsspec.
$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --no-compile -e '.[all,examples]' --group dev
	$(PY) -m pip install --quiet --no-compile --no-deps chialoops==2.0.1 datasets==5.0.1
	@touch $@ $(VENV)/.quick $(VENV)/.core

demo: $(VENV)/.core ## offline, about a minute: 4 workers, 2 epochs, one worker killed
	$(BIN)/forebay demo

example: $(VENV)/.dev ## trains on real images for two epochs; run it again, and nothing is decoded any more
	$(PY) examples/train_images.py

example-flow: $(VENV)/.dev ## features, a grid of models and a report; run it again, and everything comes from the cache
	$(PY) examples/flow.py

example-claims: $(VENV)/.dev ## two ranks by torchrun that share a counter, a barrier and a lock; start it twice, and kill it
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/claims_ddp.py

deps: ## the servers and tools that some tests use (apt, as root; else says what is missing)
	@.ci/deps

# In two runs, the second with torch and Ray: a process that has imported them forks ten times as slowly. Exit status 5: no test selected.
RUN_TESTS = failed=0; for part in without only; do \
  $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --frameworks $$part $(1) $(PYTEST_ARGS) || [ $$? -eq 5 ] || failed=1; \
done; exit $$failed

quick: $(VENV)/.quick ## while working, 3 minutes: the tests that start no process and no server
	$(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --quick --part today $(PYTEST_ARGS)

test: $(VENV)/.dev deps ## about 15 minutes: the suite, with the part of today of what rotates; PYTHON=python3.13: on another interpreter
	@$(call RUN_TESTS,--part today)

test-all: $(VENV)/.dev deps ## an hour: every test, crash point and mutant, on the disk of TMPDIR
	@failed=0; $(MAKE) mutants || failed=1; ($(call RUN_TESTS,--part all --on-disk --timeout 1800)) || failed=1; exit $$failed

quality: $(VENV)/.dev ## linters, types and layers: judges, changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(PY) -m pytest -q tests/project/test_layering.py tests/project/test_style.py

style: $(VENV)/.dev ## puts right what can be put right by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stress: $(VENV)/.dev deps ## half an hour of random load, kills, faults and power cuts
	@$(call RUN_TESTS,-m stress --part all --timeout 1800)

structure: $(VENV)/.dev ## the size of the library and of one call: fails when a structural rule exceeds its ceiling
	$(PY) tools/structure.py

mutants: $(VENV)/.dev deps ## each deliberate breach of the code must turn its test red
	$(PY) tools/mutants.py

bench-engine: $(VENV)/.dev ## hits, puts, evictions, leases beside floors and peers of the same run
	$(PY) benchmarks/engine.py

bench-samples: $(VENV)/.dev ## arrays of samples beside pfio, lmdb, diskcache and the floor
	$(PY) benchmarks/samples.py

bench-prefetch: $(VENV)/.dev ## loading ahead, beside Energon's pool and a plain thread pool
	$(PY) benchmarks/prefetch.py

bench-checkpoint: $(VENV)/.dev deps ## a remote directory as a local one, beside Ray, pyarrow, s3fs and obstore
	$(PY) benchmarks/checkpoint.py

bench-tasks: $(VENV)/.dev ## outputs of functions beside joblib.Memory and diskcache; CHIA=PATH of its source: beside CHIA's cache too
	$(PY) benchmarks/tasks.py $(if $(CHIA),--chia $(CHIA))

bench-claims: $(VENV)/.dev ## directories of jobs, and barriers, beside MosaicML Streaming's
	$(PY) benchmarks/claims.py

bench-remote: $(VENV)/.dev deps ## fetches from nginx beside curl and bare clients
	$(PY) benchmarks/remote.py

bench-scale: $(VENV)/.dev ## listing, checking and evicting at a million entries: takes minutes, and a root of 400 MB
	$(PY) benchmarks/scale.py

bench-touch: $(VENV)/.dev ## first reads of many objects in a fresh process, beside plain files
	$(PY) benchmarks/touch.py

bench-blocks: $(VENV)/.dev deps ## two columns of a parquet file of 1 GB, beside fsspec and its blockcache
	$(PY) benchmarks/blocks.py

bench-fsspec: $(VENV)/.dev deps ## reads through fsspec, beside its filecache, simplecache and blockcache
	$(PY) benchmarks/with_fsspec.py

bench-epochs: $(VENV)/.dev ## a data set in random order by PyTorch's DataLoader, beside files, caches and shard libraries: a quarter of an hour
	$(PY) benchmarks/epochs.py

bench-policies: $(VENV)/.dev ## hits by policy of eviction and trace, beside simulations where libcachesim is installed
	$(PY) benchmarks/policies.py

bench-start: $(VENV)/.dev ## a new process until its first hit, and the command line, beside diskcache and typer
	$(PY) benchmarks/start.py

screenshots: $(VENV)/.dev deps ## pictures of the report and the site by a headless Chromium, and the recording of two terminals
	$(PY) tools/recording.py
	$(PY) tools/screenshots.py

plots: $(VENV)/.dev ## plots and tables of the documentation, from docs/pictures/NAME.json (what benchmarks/NAME.py --json writes)
	$(PY) tools/plots.py

docs: $(VENV)/.dev ## the site, into site/: a warning is an error (and would not be counted with --quiet)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## what the targets above made, the environment too
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
