"""Options of all commands; exit codes and first lines of a table of command lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import click
from command import Done

from observed.cli import Place
from observed.pool import ROOT, Text

LINES = """
--version
--help
create-job --help
cluster synth --help
create-jbo
create-job
create-job -f nothing.yaml
create-job -f examples/01-local/job.yaml --target nowhere
create-job -f examples/01-local/job.yaml --dry-run
create-job -f examples/01-local/job.yaml --dry-run -o json
create-job -f examples/01-local/job.yaml --dry-run -o yaml
create-job -f examples/01-local/job.yaml --dry-run --kill rank=9@step=2
create-job -f examples/01-local/job.yaml --dry-run --kill rank=x
create-job -f examples/01-local/job.yaml --dry-run --set nodes=two
create-job -f examples/01-local/job.yaml --dry-run --set nodse=2 -o json
create-job -f examples/04-hyperpod-eks/job.yaml --target hyperpod-eks --dry-run -o json
create-job -f examples/05-slurm/job.yaml --target hyperpod-slurm --dry-run -o json
create-job -f examples/06-kubeflow/job.yaml --target kubeflow --dry-run -o json
create-job -f examples/07-sagemaker/job.yaml --target sagemaker --dry-run -o json
create-job -f examples/04-hyperpod-eks/job.yaml --target hyperpod-eks --server-dry-run
validate examples/01-local/job.yaml
validate examples/01-local/job.yaml --target sagemaker
validate examples/04-hyperpod-eks/job.yaml --target hyperpod-eks --strict
validate examples/04-hyperpod-eks/job.yaml --target hyperpod-slurm -o json
validate examples/04-hyperpod-eks/checkpointless.yaml --cluster examples/04-hyperpod-eks/cluster.yaml -o json
validate examples/08-cluster/cluster.yaml
validate --templates nothing
render -f examples/05-slurm/job.yaml --target hyperpod-slurm -o json
render -f examples/01-local/job.yaml --set chaos.compare=1
diff -f examples/04-hyperpod-eks/job.yaml --with examples/04-hyperpod-eks/rendered/job/job.yaml --exit-code
diff -f examples/04-hyperpod-eks/job.yaml --with examples/04-hyperpod-eks/rendered/elastic/job.yaml --exit-code -o json
import examples/04-hyperpod-eks/rendered/job/job.yaml -o json
import examples/05-slurm/rendered/hyperpod-slurm/job.sbatch
import examples/06-kubeflow/rendered -o json
import examples/07-sagemaker/rendered/sagemaker/create_training_job.json -o json
import examples/01-local/train.py
init new
init new
init examples/01-local
list -o json
list --target hyperpod-eks
status
status nothing
status nowhere://a
logs nothing
logs nothing -o json
wait nothing
cancel nothing
resize nothing --nodes 3
resize nothing
move nothing --node 0
chaos nothing --sigkill --rank 0
chaos nothing --sigkill --slow --rank 0
describe nothing
exec nothing -- true
port-forward nothing 80
delete nothing
plan --model llama3-70b --nodes 64 --instance-type ml.p5.48xlarge -o json
plan -f examples/01-local/job.yaml --params 8B --step-seconds 2.5
plan --model nothing
simulate --model llama3-8b --nodes 8 --days 2 --runs 2 --seed 3 -o json
simulate
scales -f examples/01-local/job.yaml --set chaos={} --nodes 1-8 -o json
scales -f examples/13-elastic/job.yaml -o json
report log/events.jsonl
report log/events.jsonl -o json
report old/events.jsonl -o json
report nothing
top nothing --once
top log --once -o json
dashboards boards
checkpoints list nothing
checkpoints list -f examples/01-local/job.yaml -o json
checkpoints show nothing
checkpoints verify nothing
checkpoints prune nothing --keep 2
data inspect nothing
data build nothing --out data
cluster create -f examples/08-cluster/cluster.yaml --dry-run -o json
cluster create -f examples/10-cluster-eks/cluster.yaml --dry-run -o json
cluster create -f examples/11-cluster-slurm/cluster.yaml --dry-run -o json
cluster create -f examples/01-local/job.yaml --dry-run
cluster update -f nothing.yaml
cluster describe
node reboot research
schema nothing
explain
explain HPX112 -o json
explain job.elastic.min_nodes
explain HPWrapper
explain tier-3 -o json
explain nothing
instances h100 -o json
instances nothing
templates list -o json
templates show hyperpod_eks/job.yaml.j2
templates eject mine nothing.j2
doctor --job nothing
completion bash
completion csh
"""
_LOGS = {"log": "8d04e03", "old": "4e73795"}
_LONGEST = 300


def commands(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Each command line: exit code, first line of stdout, stderr; or a digest of its JSON."""
    with Place() as place:
        for folder, name in _LOGS.items():
            (place.folder / folder).mkdir()
            log = ROOT / "tests/runtime/events/data" / name / "events.jsonl"
            place.write(f"{folder}/events.jsonl", log.read_text())
        for number, line in enumerate(LINES.strip().splitlines()):
            yield f"{number:02} hp-ext {line}", shown(place.run(*shlex.split(line)))


def shown(done: Done) -> dict[str, Any]:
    """The outcome of a command in few words."""
    found: dict[str, Any] = {"code": done.code}
    if "json" in done.words and done.stdout:
        return found | {"json": Text(done.stdout)}
    if done.stdout:
        found["out"] = done.stdout.partition("\n")[0]
    if done.stderr:
        found["err"] = " / ".join(done.stderr.splitlines())[:_LONGEST]
    return found


def options(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Each command with its one-line help, its arguments and its options."""
    (entry,) = entry_points(group="console_scripts", name="hp-ext")
    group = __import__(entry.module, fromlist=["hp_ext"]).hp_ext
    yield from _described(group, "hp-ext", click.Context(group, info_name="hp-ext"))


def _described(command: click.Command, name: str, context: click.Context) -> Iterator[tuple[str, Any]]:
    yield name, {"help": command.get_short_help_str(200), "takes": [_parameter(one) for one in command.params]}
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _described(found, f"{name} {each}", click.Context(found, info_name=each, parent=context))


def _parameter(one: click.Parameter) -> str:
    kind = one.type
    choices = "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else kind.name
    value = "" if getattr(one, "is_flag", False) else f" {choices}"
    marks = [" required"] * one.required + [" many"] * (one.multiple if hasattr(one, "multiple") else one.nargs != 1)
    names = one.opts if isinstance(one, click.Argument) else [*one.opts, *one.secondary_opts]
    return " ".join(names) + value + "".join(marks)
