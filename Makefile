# make run     set up, train the example through a kill -9, and show what it cost
# make test    set up, and run everything that a change must pass
# make test-thorough   what takes too long for that: every kind of fault, engine and property at length
# make check   format, types, import floors and the fast tests
# make soak    200 random faults in one job; 20,000 histories of a sampler
# make bench   every benchmark; their figures are kept in docs/benchmarks/, raw rounds in build/benchmarks/

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

.PHONY: catalog setup environments cdk collected ready ready-with-cdk run check static test test-thorough test-sdks test-integrations test-nixl soak bench bench-costs bench-recovery bench-run bench-trainer bench-rendezvous bench-resize bench-continue bench-parity bench-recovery-by-nodes bench-operator bench-faults bench-checkpoint bench-data bench-first-batch bench-simulator bench-reproducible bench-control-plane bench-store bench-tls bench-transport golden clean observed sample-mutants test-mutants test-torch test-gpu bench-gpu

setup: $(READY) environments

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[dev]'
	@touch $@

# what tests need in environments of their own: a server of S3 and one of AWS's APIs, hyperpodrun, AWS's own client;
# without one the tests that need it say so
environments: $(READY)
	-@$(BIN)/python tests/support/environments.py

# the CDK, its validators and node, for `hp-ext cluster` and tests/cdk, which say so where they are missing
cdk: $(READY)
	-@test $(VENV)/.cdk -nt $(READY) || { $(PIP) -e '.[cdk]' && touch $(VENV)/.cdk; }

# once: the workers of a first run would all compile the same modules and tests at the same time
collected: cdk
	-@test $(VENV)/.collected -nt $(READY) || { $(BIN)/pytest -q --collect-only > /dev/null 2>&1; touch $(VENV)/.collected; }

run: $(READY)
	$(BIN)/hp-ext create-job -f $(JOB) --target local --wait $(ARGS)

static: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary hyperpod_ext cli

APART := not thorough and not soak and not sdks and not integrations and not measures and not torch_versions and not nixl

# what can be made side by side is
ready: $(READY)
	@$(MAKE) --no-print-directory -j3 static environments

ready-with-cdk: $(READY)
	@$(MAKE) --no-print-directory -j3 static environments collected

check: ready
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m 'not slow and $(APART)'

test: ready-with-cdk
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m '$(APART)'

# hangs, lost nodes, partitions, hyperpodrun, Slurm, SageMaker's API, every place of a step, thousands of specs
test-thorough: $(READY) environments cdk
	-@$(BIN)/python tests/support/kube_apiserver.py  # four minutes of CPU, once; beside tests it took more than thirty
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal --hypothesis-profile new -m 'thorough and not soak and not measures and not torch_versions'

# seconds and CPU of commands and uploads, each beside a floor in the same run; about a minute, for a quiet machine
bench-costs: $(READY)
	$(BIN)/pytest -q -s -m measures

# what both SageMaker SDKs send for our arguments, and hp-ext beside hyp; installing them takes most of its six minutes
test-sdks: $(READY)
	-@$(BIN)/python tests/support/sdk_venvs.py v2 v3 hyp hyp-model
	$(BIN)/pytest -q -m sdks

# copies to peers by NIXL, which it installs: 68 MB; two minutes
NIXL := $(READY) $(VENV)/.nixl
$(VENV)/.nixl: pyproject.toml
	$(PIP) -e '.[nixl]'
	@touch $@

test-nixl: $(NIXL)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m nixl tests/runtime/memory_server/replication

# Lightning, Hugging Face's Trainer, Accelerate, TorchTitan and Megatron-core, each through a kill -9 or two; about ten minutes
test-integrations: $(READY)
	-@$(BIN)/python tests/support/integrations_env.py
	$(BIN)/pytest -q -m integrations

# more than sixty small wrong changes, each of which a fast test must see; about two minutes. ARGS='--only "quorum.*"', --list, --help
test-mutants: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m mutants $(ARGS)

# 400 changes at random places of the product: share that the fast tests catch. The first run needs --cover, which runs
# all fast tests under coverage. ARGS='--seed 1 --count 400 --cover', --only PATH, --help
sample-mutants: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m mutants.sample $(ARGS)

# what others can observe, compared with the record in tests/observed/: rendered files, messages, events, commands, names.
# A minute. ARGS=--write records; ARGS='--against main' shows whole texts; --only SECTION, --help
observed: $(READY)
	@PYTHONPATH=tests/support $(BIN)/python -m observed $(ARGS)

# another version of torch, in an environment of its own: `make test-torch TORCH=2.15.0` imports the runtime with it, runs a
# DDP and an FSDP2 example through a kill -9, and the fast tests that need torch. Its first run installs 4 GB. PARTS='imports
# ddp fsdp2' leaves the tests out
test-torch:
	$(PYTHON) tests/support/torch_env.py '$(TORCH)'
	.venv-torch/$(patsubst torch==%,%,$(TORCH))/bin/python tests/support/torch_parts.py $(PARTS)

# experiments with process groups, faults and copies on a GPU; needs torch there, and no installation. One command runs
# for nine minutes at most, and the next goes on. Without a GPU it says so; FAKE=gloo goes through the plan on CPU
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_OUT ?= build/gpu$(if $(FAKE),-fake)
GPU_PLAN = $(GPU_PYTHON) benchmarks/gpu/plan.py --limit-s 540 --out $(GPU_OUT) $(if $(FAKE),--fake $(FAKE)) $(ARGS)
test-gpu:
	@$(GPU_PLAN)

# of those what measures: context, copies, and recovery beside torchrun with DCP
bench-gpu:
	@$(GPU_PLAN) --bench

soak: $(READY)
	$(BIN)/pytest -q -m soak

bench: bench-recovery bench-rendezvous bench-faults bench-checkpoint bench-data

# kill -9 to the first new step, beside torchrun with DCP checkpoints, NVRx in process and torchft; about 75 s a round
bench-recovery: $(READY)
	$(BIN)/python benchmarks/cpu/recovery.py --rounds 5 $(ARGS)

# an unchanged script under `hp-ext run` beside torchrun; two minutes on a quiet machine
bench-run: $(READY)
	$(BIN)/python benchmarks/cpu/script_runs.py --rounds 5 $(ARGS)

# tokens per second of examples/20-trainer and of TorchTitan's trainer, which it installs; ten minutes on a quiet machine
bench-trainer: $(READY)
	$(BIN)/python benchmarks/cpu/trainer.py --rounds 5 $(ARGS)

# what faults cost on pods of HyperPod EKS under our agent and under hyperpodrun; about ten minutes on a quiet machine
bench-operator: $(READY)
	$(BIN)/python benchmarks/cpu/operator_seconds.py $(ARGS)

# seconds without a step when the number of nodes changes, beside saving, ending and starting again; about four minutes
bench-resize: $(READY)
	$(BIN)/python benchmarks/cpu/resize.py $(ARGS)

# longest pause of the healthy when one of four ranks is killed, in ordinary steps; about three minutes
bench-continue: $(READY)
	$(BIN)/python benchmarks/cpu/continuing.py $(ARGS)

# bytes, memory and CPU of parity in groups of 4 and 8 nodes, and of a lost node's image rebuilt; about a minute
bench-parity: $(READY)
	$(BIN)/python benchmarks/cpu/parity.py $(ARGS)

# seconds of a recovery by the number of GPUs: measured elsewhere, simulated, published; writes a page and a plot
bench-recovery-by-nodes: $(READY)
	$(BIN)/python benchmarks/cpu/recovery_by_nodes.py

# process groups opened again, closed and cut, at 4 to 64 ranks, beside TCPStore; about two minutes
bench-rendezvous: $(READY)
	$(BIN)/python benchmarks/cpu/rendezvous.py $(ARGS)

# an exception, a kill and a lost node with about 75 MB of state a rank, 10 rounds of each; about four minutes
bench-faults: $(READY)
	$(BIN)/python benchmarks/cpu/faults_timed.py --fault exception kill node $(ARGS)

# token store beside Megatron's reader and beside decoding; installs both below $(VENV)/bench; about two minutes
bench-data: $(READY)
	$(BIN)/python benchmarks/cpu/data.py $(ARGS)

# saves and restores beside torch, DLRover, NVRx, AWS's client and S3 clients, which are installed below $(VENV)/bench
bench-checkpoint: $(READY)
	$(BIN)/python benchmarks/cpu/checkpointing.py $(ARGS)

# simulated jobs beside real ones that are killed at random; 50 runs of 16 nodes take more than an hour on 2 cores
bench-simulator: $(READY)
	$(BIN)/python benchmarks/cpu/simulator.py $(ARGS)

# from a new process to its first batch, deep in an epoch, beside StatefulDataLoader; about five minutes
bench-first-batch: $(READY)
	$(BIN)/python benchmarks/cpu/first_batch.py $(ARGS)

# seconds of a step with reproducible=True, beside float32 sums, DDP and FSDP2; about half a minute
bench-reproducible: $(READY)
	$(BIN)/python benchmarks/cpu/reproducible.py $(ARGS)

# the coordinator's CPU time, bytes and messages by number of nodes, 16 to 2,048, with agents that are only their messages
bench-control-plane: $(READY)
	$(BIN)/python benchmarks/cpu/control_plane_bench.py $(ARGS)

# what groups ask of the ranks' own store, 1,024 to 16,384 ranks, many in a process: requests, bytes, connections; about
# three minutes
bench-store: $(READY)
	$(BIN)/python benchmarks/cpu/store_bench.py $(ARGS)

# what network.tls costs: a snapshot read from a peer, with TLS and without, in turns; ten seconds
bench-tls: $(READY)
	$(BIN)/python benchmarks/cpu/peer_tls.py $(ARGS)

# copies to a peer over TCP and by NIXL, in turns: bytes for a CPU second, beside what the kernel and a checksum take; a minute
bench-transport: $(NIXL)
	$(BIN)/python benchmarks/cpu/transport.py $(ARGS)

# facts of AWS that botocore, moto and cfn-lint carry (training plans, zones and regions of machines), with today's date; says what is left to do by hand
catalog: $(READY) cdk
	$(BIN)/python tests/support/refresh_catalog.py

golden: $(READY)
	cp examples/01-local/train.py templates/init/train.py.j2
	$(BIN)/pytest -q -m 'not slow and $(APART)' --update-golden

clean:
	rm -rf $(VENV) .venv-s3 .venv-torch build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
