# `make help` lists each target whose comment begins with ##. `make help ALL=1` also lists targets whose comment begins
# with one #. In both, the first line of the comment directly above the target is the text of the list.

PYTHON ?= python3
VENV ?= .venv
# plain `torch` from PyPI brings gigabytes of CUDA on Linux; name another build here if you want it
TORCH ?= torch==2.13.0
# of `make test-torch`: which parts; empty: all
PARTS ?=
JOB ?= examples/01-local/job.yaml
# for `make run`: --kill rank=1@step=20, --no-kill, --set path=value, -o json ...
ARGS ?=
# how many tests run side by side: most of them wait
WORKERS ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 8 ? n : 8)))

# thousands of processes are started here: none of them should compile what another has compiled, whatever the user's shell says
override PYTHONDONTWRITEBYTECODE :=
export PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# most of what is installed is never imported, and need not be compiled
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

.PHONY: catalog setup environments cdk collected ready ready-with-cdk run check static test test-thorough test-sdks test-integrations test-trainers test-nixl soak bench bench-costs bench-recovery bench-run bench-trainer bench-rendezvous bench-resize bench-continue bench-parity bench-recovery-by-nodes bench-operator bench-faults bench-checkpoint bench-data bench-first-batch bench-simulator bench-reproducible bench-control-plane bench-store bench-tls bench-transport golden clean observed sample-mutants test-mutants test-torch test-gpu bench-gpu docs screenshots

## list the main targets; ALL=1 lists all targets
help:
	@awk -v all='$(ALL)' '/^#/ { if (text == "") { listed = /^## /; text = $$0; sub(/^#+ /, "", text) } next } \
	    /^[a-z][-a-z]*:/ && text != "" && (listed || all) { sub(/:.*/, ""); printf "  make %-23s %s\n", $$0, text } \
	    { text = "" }' $(firstword $(MAKEFILE_LIST)) $(if $(ALL),| sort)

.DEFAULT_GOAL := help
.PHONY: help

## create the environments that other targets need; they also do this themselves
setup: $(READY) environments

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[dev]'
	@touch $@

# environments that tests need: a server of S3, a server of AWS's APIs, hyperpodrun, AWS's own client
# Without an environment, the tests that need it report the missing environment.
environments: $(READY)
	-@$(BIN)/python tests/support/environments.py

# the CDK, its validators and node, for `hp-ext cluster` and tests/cdk
cdk: $(READY)
	-@test $(VENV)/.cdk -nt $(READY) || { $(PIP) -e '.[cdk]' && touch $(VENV)/.cdk; }

# once: the workers of a first run would all compile the same modules and tests at the same time

collected: cdk
	-@test $(VENV)/.collected -nt $(READY) || { $(BIN)/pytest -q --collect-only > /dev/null 2>&1; touch $(VENV)/.collected; }

## train an example through a kill -9, and show the cost; ARGS=--no-kill kills no rank
run: $(READY)
	$(BIN)/hp-ext create-job -f $(JOB) --target local --wait $(ARGS)

# formats, lint and types
static: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary hyperpod_ext cli

APART := not thorough and not soak and not sdks and not integrations and not measures and not torch_versions and not nixl

# prerequisites, made in parallel

ready: $(READY)
	@$(MAKE) --no-print-directory -j3 static environments

ready-with-cdk: $(READY)
	@$(MAKE) --no-print-directory -j3 static environments collected

## formats, lint, types, import rules and the fast tests; a few minutes
check: ready
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m 'not slow and $(APART)'

## `make check` and the slow tests, which kill real processes; WORKERS=1 runs tests one by one
test: ready-with-cdk
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m '$(APART)'

## hangs, lost nodes, partitions, Slurm, Kubernetes' and SageMaker's APIs; 35 to 45 minutes
# The first run takes longer, because it builds a Kubernetes API server. HPX_TEST_PART=1/3 runs the first of three parts.
test-thorough: $(READY) environments cdk
	-@$(BIN)/python tests/support/kube_apiserver.py  # four minutes of CPU, once; beside tests it took more than thirty
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal --hypothesis-profile new -m 'thorough and not soak and not measures and not torch_versions'

# seconds and CPU of commands and uploads, each compared with a lower bound of the same run; a minute
bench-costs: $(READY)
	$(BIN)/pytest -q -s -m measures

# requests of both SageMaker SDKs for our arguments, and hp-ext compared with hyp; installs them; six minutes
test-sdks: $(READY)
	-@$(BIN)/python tests/support/sdk_venvs.py v2 v3 hyp hyp-model
	$(BIN)/pytest -q -m sdks

NIXL := $(READY) $(VENV)/.nixl
$(VENV)/.nixl: pyproject.toml
	$(PIP) -e '.[nixl]'
	@touch $@

# copies to peers with the real NIXL, through kills; installs NIXL (68 MB); two minutes
test-nixl: $(NIXL)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m nixl tests/runtime/memory_server/replication

## Lightning, Hugging Face, TorchTitan, Megatron-core through kills; installs them; ten minutes
test-integrations: $(READY)
	-@$(BIN)/python tests/support/integrations_env.py
	$(BIN)/pytest -q -m integrations

# eleven trainers of other libraries: with our adapters, under hp-ext run, and under torchrun, each through kills. It writes
# docs/benchmarks/trainers.md in about fifteen to thirty minutes. ARGS='--only sft dpo'
test-trainers: $(READY)
	$(BIN)/python benchmarks/trainers/compare.py $(ARGS)

## a hundred small bugs, one at a time: fast tests must fail on each; two minutes; ARGS=--list
# ARGS='--only "quorum.*"' tries some of them.
test-mutants: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m mutants $(ARGS)

# random changes of the code: share that the fast tests detect, and a JSON file of each change
# The first run needs --cover, which runs all fast tests under coverage. ARGS='--seed 1 --count 400 --cover', --only PATH
sample-mutants: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m mutants.sample $(ARGS)

## compare files, messages, commands and texts with tests/observed/; ARGS=--write updates it
# It takes about a minute. ARGS='--against main' shows full texts; --only SECTION compares one section.
observed: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m observed $(ARGS)

## TORCH=2.15.0 tests another version of torch: two jobs, fast tests; installs it (4 GB)
# The version is installed below .venv-torch/. PARTS='imports ddp fsdp2' skips the fast tests.
test-torch:
	$(PYTHON) tests/support/torch_env.py '$(TORCH)'
	.venv-torch/$(patsubst torch==%,%,$(TORCH))/bin/python tests/support/torch_parts.py $(PARTS)

GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_OUT ?= build/gpu$(if $(FAKE),-fake)
GPU_PLAN = $(GPU_PYTHON) benchmarks/gpu/plan.py --limit-s 540 --out $(GPU_OUT) $(if $(FAKE),--fake $(FAKE)) $(ARGS)
## experiments with NCCL on one GPU, nine minutes a call; FAKE=gloo runs them on CPU
# It needs torch and installs nothing. The next call continues with the remaining experiments.
test-gpu:
	@$(GPU_PLAN)

# the measurements among the experiments of `make test-gpu`
bench-gpu:
	@$(GPU_PLAN) --bench

## the documentation site in build/docs, with the generated reference; a minute
# Its search needs a server: python3 -m http.server --directory build/docs
docs: $(READY)
	$(BIN)/python tests/support/docs_env.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs build --strict --quiet $(ARGS)

# adds the site of this version to the branch gh-pages, in a folder of its own with the alias `latest`; pushes nothing
docs-version: $(READY)
	$(BIN)/python tests/support/docs_env.py
	NO_MKDOCS_2_WARNING=1 PATH=$(VENV)/docs/bin:$$PATH $(VENV)/docs/bin/mike deploy --update-aliases $(ARGS) \
		$$($(BIN)/python -c 'from hyperpod_ext.version import __version__ as v; print(v.rpartition(".")[0])') latest
	$(VENV)/docs/bin/mike set-default latest

## jobs with 200 random faults each, and more cases of `make test-thorough`; hours
soak: $(READY)
	$(BIN)/pytest -q -m soak

# the screenshots in docs/, of a job that runs for this purpose; needs Chromium, and takes a minute
screenshots: $(READY)
	PYTHONPATH=tests/support $(BIN)/python tests/support/screenshots.py

## the five main benchmarks; figures go to docs/benchmarks/, raw rounds to build/benchmarks/
bench: bench-recovery bench-rendezvous bench-faults bench-checkpoint bench-data

# kill -9 to the first new step, compared with torchrun with DCP, NVRx and torchft; 75 s a round
bench-recovery: $(READY)
	$(BIN)/python benchmarks/cpu/recovery.py --rounds 5 $(ARGS)

# an unchanged script under `hp-ext run`, compared with torchrun; two minutes
bench-run: $(READY)
	$(BIN)/python benchmarks/cpu/script_runs.py --rounds 5 $(ARGS)

# tokens per second of examples/20-trainer and of TorchTitan's trainer, which it installs; ten minutes
bench-trainer: $(READY)
	$(BIN)/python benchmarks/cpu/trainer.py --rounds 5 $(ARGS)

# cost of faults on pods of HyperPod EKS, under our agent and under hyperpodrun; ten minutes
bench-operator: $(READY)
	$(BIN)/python benchmarks/cpu/operator_seconds.py $(ARGS)

# seconds without a step in a resize, compared with saving, ending and starting again; four minutes
bench-resize: $(READY)
	$(BIN)/python benchmarks/cpu/resize.py $(ARGS)

# longest pause of the healthy ranks when one of four ranks is killed; three minutes
bench-continue: $(READY)
	$(BIN)/python benchmarks/cpu/continuing.py $(ARGS)

# bytes, memory and CPU of parity in groups of 4 and 8 nodes, and of a rebuilt image; a minute
bench-parity: $(READY)
	$(BIN)/python benchmarks/cpu/parity.py $(ARGS)

# seconds of a recovery by number of GPUs, from the figures of other pages; writes a page and a plot
bench-recovery-by-nodes: $(READY)
	$(BIN)/python benchmarks/cpu/recovery_by_nodes.py

# opening, closing and aborting groups of 4 to 64 ranks, compared with TCPStore; two minutes
bench-rendezvous: $(READY)
	$(BIN)/python benchmarks/cpu/rendezvous.py $(ARGS)

# an exception, a kill and a lost node, with 75 MB of state per rank, 10 rounds each; four minutes
bench-faults: $(READY)
	$(BIN)/python benchmarks/cpu/faults_timed.py --fault exception kill node $(ARGS)

# token store, compared with Megatron's reader and with decoding; installs both; two minutes
bench-data: $(READY)
	$(BIN)/python benchmarks/cpu/data.py $(ARGS)

# saves and restores, compared with torch, DLRover, NVRx, AWS's client and S3 clients; installs them
bench-checkpoint: $(READY)
	$(BIN)/python benchmarks/cpu/checkpointing.py $(ARGS)

# simulated jobs, compared with real jobs and random kills; 50 runs of 16 nodes take over an hour
bench-simulator: $(READY)
	$(BIN)/python benchmarks/cpu/simulator.py $(ARGS)

# new process to first batch, deep in an epoch, compared with StatefulDataLoader; five minutes
bench-first-batch: $(READY)
	$(BIN)/python benchmarks/cpu/first_batch.py $(ARGS)

# seconds of a step with reproducible=True, compared with float32 sums, DDP and FSDP2; half a minute
bench-reproducible: $(READY)
	$(BIN)/python benchmarks/cpu/reproducible.py $(ARGS)

# the coordinator's CPU time, bytes and messages, by number of nodes from 16 to 2,048
bench-control-plane: $(READY)
	$(BIN)/python benchmarks/cpu/control_plane_bench.py $(ARGS)

# requests of process groups to the store of the ranks, for 1,024 to 16,384 ranks; three minutes
bench-store: $(READY)
	$(BIN)/python benchmarks/cpu/store_bench.py $(ARGS)

# cost of TLS between memory servers, compared with no TLS in the same run; ten seconds
bench-tls: $(READY)
	$(BIN)/python benchmarks/cpu/peer_tls.py $(ARGS)

# copies to a peer over TCP and by NIXL, in the same run; a minute
bench-transport: $(NIXL)
	$(BIN)/python benchmarks/cpu/transport.py $(ARGS)

# update facts of AWS from botocore, moto and cfn-lint, and print the facts to update by hand
catalog: $(READY) cdk
	$(BIN)/python tests/support/refresh_catalog.py

## rewrite the golden files and the generated parts of pages; then read the diff
golden: $(READY)
	cp examples/01-local/train.py templates/init/train.py.j2
	$(BIN)/pytest -q -m 'not slow and $(APART)' --update-golden

## remove the environments, builds and caches
clean:
	rm -rf $(VENV) .venv-s3 .venv-torch build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: release test-pythons
## sdist, wheel and notes of the last commit in build/release, checked with twine and in fresh environments
# These have no compiler. Each Python from 3.11 to 3.13 that is installed is tried; one runs a job with a kill.
release: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m release $(ARGS)

PYTHONS ?= 3.12 3.13
# `make check` with other versions of Python, each in an environment below .venv/ with its own torch
# Plain torch from PyPI takes 5 GB each. PYTHONS=3.13 chooses one. Versions that are not installed are left out.
test-pythons:
	@for version in $(PYTHONS); do \
	  python=$$($(PYTHON) tests/support/pythons.py $$version) || continue; \
	  $(MAKE) --no-print-directory check PYTHON=$$python VENV=.venv/python$$version || exit 1; \
	done
