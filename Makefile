# make demo | test | quick | extras | slurm | mpirun | ray | network | engines | thorough | verify | tpu | reference |
# plan-published | bench-maxtext | bench-peers | gpu | lint | docs | docs-links | images | fuzz | kills | soak | chaos | bench | bench-scale | versions-matrix | constraints.
# Targets run in .venv, which is created from constraints.txt on first use. Targets that need a package of more than 100
# MB (the TPU compiler) run in .venv-extras.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= .venv-extras
REFERENCE ?= .venv-reference
MAXTEXT ?= .venv-maxtext
PEERS ?= .venv-peers
PYTHON312 ?= python3.12
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BOUND := timeout -s KILL

# Bytecode halves the time of importing the sources and the tests, in each worker and each process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo environments test quick extras packages jobs slurm mpirun ray network engines thorough verify tpu reference docs site images docs-links plan-published bench-maxtext bench-peers gpu lint types fuzz kills soak chaos bench bench-scale constraints versions versions-matrix browser clean

demo: $(VENV)/.demo
	$(BOUND) 900 $(BIN)/python examples/demo.py

# The virtual environments, ruff, mypy and Chromium. `make --jobs 2 environments` builds them in parallel.
environments: $(EXTRAS)/.test lint types browser

test: $(VENV)/.test versions lint types browser
	$(BOUND) 2400 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile

# The suite without the tests that start processes.
quick: $(VENV)/.test lint types
	$(BOUND) 1200 $(BIN)/python -m pytest -m 'not slow and not processes' --numprocesses 2 --dist loadfile

# The tests that need a large package, and a job on each engine that is installed. `make --jobs 2 extras` runs both in
# parallel. `make test` has run the other tests of the docs.
extras: FORMS = slow
extras: packages jobs docs

packages: $(EXTRAS)/.test
	$(BOUND) 1200 $(EXTRAS)/bin/python -m pytest -m '(tpu or gpu or storage or ray or streams or trackers or optuna or transformers) and not slow' --numprocesses 2 --dist loadfile

# The site in build/docs/index.html, without a network, and the test of each
# of its commands, snippets and notebooks.
docs: site
	$(BOUND) 1200 $(EXTRAS)/bin/python -m pytest -m '$(or $(FORMS),slow or not slow)' --numprocesses 2 tests/docs

site: $(EXTRAS)/.test
	$(BOUND) 300 $(EXTRAS)/bin/python -m sphinx -q -W --keep-going -j 2 -b html docs build/docs
	@echo build/docs/index.html

# The pictures of the README.
images: $(EXTRAS)/.test browser
	$(BOUND) 900 $(EXTRAS)/bin/python docs/images/draw.py

# The external links of the site, one per line.
docs-links:
	@grep -rhoE --include='*.md' 'https?://[^] )>"`|]+' docs README.md | sed 's/[.,;:]*$$//' | LC_ALL=C sort -u

jobs: $(EXTRAS)/.test
	$(BOUND) 600 $(EXTRAS)/bin/python -m pytest -m engines -k 'numbers_of_a_local_run and not lost' -rs

# Rendered jobs on a Slurm of two nodes, with network namespaces as hosts. Needs root and the packages slurm-wlm, munge
# and iproute2.
slurm: $(VENV)/.test
	$(BOUND) 900 $(BIN)/python -m pytest -m engines tests/engines/test_slurm.py

# `mpirun` on this machine and over two network namespaces. Needs root and the packages openmpi-bin and iproute2.
mpirun: $(VENV)/.test
	$(BOUND) 600 $(BIN)/python -m pytest -m engines -k mpirun tests/engines

# Ray on this machine and, as root, on two network namespaces.
ray: $(EXTRAS)/.test
	$(BOUND) 900 $(EXTRAS)/bin/python -m pytest -m ray tests/engines/test_ray.py

# Network faults (delay, loss, rate, partition) between network namespaces. Needs root and /dev/net/tun.
network: $(VENV)/.test
	$(BOUND) 900 $(BIN)/python -m pytest -m 'slow or not slow' tests/tools/drill/test_network.py -rs

engines: $(VENV)/.test
	$(BOUND) 1800 $(BIN)/python -m pytest -m engines

# The slow tests and every form of the tests that `make test` samples.
thorough: $(EXTRAS)/.test
	$(BOUND) 7200 $(EXTRAS)/bin/python -m pytest -m slow --numprocesses 2 --dist loadfile -o faulthandler_timeout=1800

# Every valid mesh for every config in configs/verify. Takes hours; finished results are kept in build/verify.
verify: $(VENV)/.test
	$(BOUND) 28800 $(BIN)/python benchmarks/verify_examples.py

# The collectives of every strategy on every TPU, from the TPU compiler, compared with the golden file.
# `make tpu WRITE=--write` updates the file.
tpu: $(EXTRAS)/.test
	$(BOUND) 3600 $(EXTRAS)/bin/python tests/plan/golden_collectives.py $(WRITE)

# TensorFlow's strategies on the linear regression, compared with the golden file of the tests, and streams of tf.data.
# Installs 1.6 GB into its own environment. `make reference WRITE=--write` updates the file.
reference:
	test -x $(REFERENCE)/bin/python || $(PYTHON) -m venv $(REFERENCE)
	$(REFERENCE)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt \
		tensorflow-cpu==2.21.0 --editable '.[test]'
	$(BOUND) 900 $(REFERENCE)/bin/python tests/reference/tensorflow_numbers.py $(WRITE)
	$(BOUND) 600 $(REFERENCE)/bin/python -m pytest -k 'tf.data' tests/data/test_stream_libraries.py

# Compiles MaxText's own step for the runs of benchmarks/published.yaml that have no saved program, and compares the
# predicted step times with the published ones. Installs 3 GB into its own environment (Python 3.12). Takes hours; an
# interrupted command continues with the next run.
plan-published: $(MAXTEXT)/.done $(VENV)/.test
	$(BIN)/python benchmarks/published.py compile --python $(MAXTEXT)/bin/python
	$(BIN)/python benchmarks/published.py table

# The train step of spmdkit against that of MaxText, compiled by the same compilers for the cells of
# benchmarks/maxtext/cells.yaml; writes docs/measured/maxtext.md and fails if a ratio is above its limit without a known cause.
# Takes hours; an interrupted command continues with the next cell. `make bench-maxtext ONLY=v5p/fsdp AGAIN=--again`.
bench-maxtext: $(MAXTEXT)/.done $(VENV)/.test
	$(BIN)/python benchmarks/maxtext/compare.py --python $(MAXTEXT)/bin/python --only $(or $(ONLY),"") $(AGAIN)

# The train step against PyTorch, TensorFlow, Keras and flax on this machine's CPUs, in alternating rounds; writes
# benchmarks/results/peers.json. TensorFlow and Keras are installed into their own environment, 1.6 GB.
# `make bench-peers ONLY="gpt_1m/1 lstm/2" ROUNDS=3`.
bench-peers: $(PEERS)/.done $(EXTRAS)/.test $(VENV)/.test
	$(BIN)/python benchmarks/peers/compare.py --torch $(EXTRAS)/bin/python --keras $(PEERS)/bin/python \
		--rounds $(or $(ROUNDS),10) $(if $(ONLY),--only $(ONLY))

# The train step on one GPU: tests, plan, MFU and torch.compile (benchmarks/gpu.py). Needs no network; at most eight
# minutes, and the next call continues. PYTHON has the packages that benchmarks/README.md lists.
gpu:
	$(BOUND) 540 $(PYTHON) benchmarks/gpu.py

lint: $(VENV)/.test
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	@find spmdkit tests -name '*.py' -exec wc -l {} + | awk '$$1 > 600 && $$2 != "total" {print "warning: " $$2 " has " $$1 " lines; more than 600 are hard to read"}'

types: $(VENV)/.test
	$(BIN)/mypy --no-error-summary

# Random configs, files and damage: the documented exit code, no traceback, at most 25 lines, at most 3 seconds.
# `make fuzz SEED=7 COUNT=30000`.
fuzz: $(VENV)/.test
	$(BOUND) 3600 $(BIN)/python -m tests.support.fuzz --seed $(or $(SEED),0) --count $(or $(COUNT),3000)

# 100 SIGKILLs of any of four processes in any phase: the final parameters are bitwise equal.
# `make kills KILLS=20 SEED=7 PROCESSES=1`. Figures: docs/measured/reliability.md.
kills: $(VENV)/.test
	KILLS=$(or $(KILLS),100) SEED=$(or $(SEED),1) PROCESSES=$(or $(PROCESSES),4) $(BOUND) 5400 $(BIN)/python -m pytest -m slow -s -o faulthandler_timeout=5000 tests/tools/drill/test_kills.py

# An hour of four processes with a random fault per minute, rotating logs and checkpoints in a local S3 server: memory,
# open files and goodput. Writes benchmarks/results/soak.json. `make soak FAULTS=10 SEED=7`.
soak: $(EXTRAS)/.test
	$(BOUND) 7200 $(EXTRAS)/bin/python benchmarks/soak.py --save --faults $(or $(FAULTS),60) --seed $(or $(SEED),3)

# Every kind of fault in every phase with 1, 2 and 4 processes, 331 runs (docs/measured/chaos.md). Takes hours; an interrupted
# command continues with the next cell. Network faults need root and /dev/net/tun. `make chaos CELLS="kill@*/2"`.
chaos: $(EXTRAS)/.test
	$(BOUND) 36000 $(EXTRAS)/bin/python -m spmdkit drill benchmarks/chaos/run.yaml --matrix $(CELLS:%=--cells '%'); test $$? -le 1
	$(EXTRAS)/bin/python benchmarks/chaos/page.py build/chaos_drill/matrix/matrix.json

# Short forms of the benchmarks (benchmarks/README.md), with dated results in benchmarks/results/ and in the tables of
# docs/measured/benchmarks.md. `make bench-scale` needs the TPU compiler.
bench: $(VENV)/.test
	$(BOUND) 900 $(BIN)/python benchmarks/overhead.py --sittings 2 --pairs 20
	$(BOUND) 600 $(BIN)/python benchmarks/start.py --rounds 5
	$(BOUND) 900 $(BIN)/python benchmarks/compile.py --layers 4 12 --configs linear_regression one_device
	$(BOUND) 600 $(BIN)/python benchmarks/checkpoints.py --repeats 9 --intervals 2
	$(BOUND) 900 $(BIN)/python benchmarks/tune.py --seconds 60 one_device recurrent linear_regression
	$(BIN)/python benchmarks/results.py

bench-scale: $(EXTRAS)/.test
	$(BOUND) 3600 $(EXTRAS)/bin/python benchmarks/scale.py
	$(EXTRAS)/bin/python benchmarks/results.py

# The environment variables silence the TPU compiler on a machine without a TPU.
versions: $(VENV)/.test
	@TPU_SKIP_MDS_QUERY=1 TPU_STDERR_LOG_LEVEL=3 TPU_MIN_LOG_LEVEL=3 TPU_ACCELERATOR_TYPE=v5p-8 TPU_WORKER_HOSTNAMES=localhost \
		TPU_WORKER_ID=0 $(BIN)/python -m spmdkit doctor

# `make quick` on every supported pair of Python and jax, each in its own environment.
# `make versions-matrix ONLY=3.13-0.12`.
versions-matrix:
	$(BOUND) 21600 $(PYTHON) benchmarks/versions_matrix.py $(if $(ONLY),--only $(ONLY))

# The test of HTML pages uses headless Chromium. It is skipped where Chromium cannot be installed.
browser:
	@command -v chromium >/dev/null || (command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
		$(BOUND) 300 sh -c 'apt-get update -qq && apt-get install -y -qq chromium' >/dev/null 2>&1) || \
		echo "no chromium: the test of a plan's page in a browser will be skipped"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("spmdkit needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[examples]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@ $(VENV)/.demo

$(MAXTEXT)/.done: benchmarks/maxtext/requirements.txt
	test -x $(MAXTEXT)/bin/python || $(PYTHON312) -m venv $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --requirement $<
	@touch $@

$(PEERS)/.done: benchmarks/peers/requirements.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --requirement $<
	@touch $@

$(EXTRAS)/.test: pyproject.toml constraints.txt
	test -x $(EXTRAS)/bin/python || $(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt --editable '.[test-extras]'
	@touch $@

# Writes the installed versions to constraints.txt.
constraints: $(EXTRAS)/.test
	$(EXTRAS)/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort > constraints.txt

clean:
	rm -rf $(VENV) $(EXTRAS) build *.egg-info
