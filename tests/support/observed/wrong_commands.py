"""Commands that fail: wrong options and places, files that are no jobs, damaged checkpoints, wrong data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from observed.case import Case, parameters, short, table_of

_JOB = {"job.yaml": "name: tiny\nscript: train.py\nnodes: 2\n", "train.py": ""}
_LOG = {"broken/events.jsonl": '{"event": 1\n', "empty/events.jsonl": ""}

LINES = """
create-jbo
create-job
create-job -f nothing.yaml
create-job -f job.yaml --target nowhere
create-job -f job.yaml --target local --wait 5 --nowait
create-job -f job.yaml --dry-run --kill rank=9@step=2
create-job -f job.yaml --dry-run --kill rank=x
create-job -f job.yaml --dry-run --kill rank=1@step=2 --no-kill
create-job -f job.yaml --dry-run --set nodes=two
create-job -f job.yaml --dry-run --set nodse=2
create-job -f job.yaml --dry-run --set nodes
create-job -f job.yaml --dry-run --set args.3=x
create-job -f job.yaml --dry-run --set name.x=1
create-job -f job.yaml --target hyperpod-eks --dry-run
create-job -f examples/04-hyperpod-eks/job.yaml --target hyperpod-eks --server-dry-run
create-job -f examples/04-hyperpod-eks/job.yaml --target hyperpod-eks
create-job -f job.yaml --ignore HPX1010
validate examples/01-local/job.yaml --target sagemaker
validate examples/04-hyperpod-eks/job.yaml --target hyperpod-slurm
validate --templates nothing
validate train.py
validate examples
render -f job.yaml --target nowhere
render -f job.yaml --templates nothing
diff -f job.yaml --with nothing.yaml --target hyperpod-eks
diff -f job.yaml --with train.py --target local
diff -f examples/04-hyperpod-eks/job.yaml --with train.py
init examples/01-local
list --target hyperpod-eks
status nothing
status nowhere://a
status http://a/b/c
status hyperpod-slurm://here/tiny
logs nothing
logs nothing --rank 0
wait nothing
cancel nothing
resize nothing --nodes 3
resize nothing
move nothing --node 0
chaos nothing
chaos nothing --sigkill --rank 0
chaos nothing --sigkill --rank 0 --node 0
chaos nothing --slow --node 0
describe nothing
exec nothing -- true
exec nothing
port-forward nothing 80
delete nothing
plan --model nothing --nodes 2
plan --nodes 2
plan --params many --nodes 2
plan --model llama3-8b --params 8B --nodes 2
plan --model llama3-8b --nodes 2 --instance-type ml.p9.nothing
plan --model llama3-8b --nodes 2 --set nodes=3
plan --model llama3-8b --nodes 2 --plot plan.txt
simulate
simulate --model nothing --nodes 2
scales -f job.yaml
scales -f job.yaml --set global_batch_size=8
scales -f job.yaml --set global_batch_size=8 --micro-batch-size 2 --nodes x
scales -f job.yaml --set global_batch_size=8 --micro-batch-size 3 --nodes 1-4
report
report nothing
report job.yaml
report nothing/events.jsonl
report broken/events.jsonl
report empty
report -f job.yaml
top nothing --once
checkpoints list
checkpoints list nothing
checkpoints list nothing/at/all
checkpoints list http://example.com/x
checkpoints list examples --set nodes=2
checkpoints show nothing
checkpoints verify nothing
checkpoints verify nothing --step 3 --all
checkpoints copy nothing nothing
checkpoints copy examples there --step 1 --all
checkpoints prune nothing --keep 2
checkpoints prune examples
cluster create -f job.yaml --dry-run
cluster create -f examples/08-cluster/cluster.yaml --dry-run --ignore HPX2001
cluster update -f nothing.yaml
cluster describe
cluster deploy -f job.yaml
node reboot research
schema nothing
explain nothing
explain job.nothing
explain job.elastic.min_node
instances nothing
templates show nothing.j2
templates eject mine nothing.j2
templates eject examples/01-local nothing
doctor --job nothing
completion csh
data inspect nowhere
data verify .
data inspect nowhere --field text
data inspect nowhere --document 3
"""

FILES: dict[str, str] = {
    "a.json": '{"a": 1}',
    "wrong.json": '{"a": ',
    "list.json": "[1]",
    "tags.json": '{"TrainingJobName": "a", "Tags": [{"Name": "x"}], "HyperParameters": {"a": null}}',
    "request.json": '{"TrainingJobName": "a"}',
    "empty.yaml": "",
    "words.yaml": "just words\n",
    "configmap.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n",
    "deployment.yaml": "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec: {}\n",
    "ray.yaml": "apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {name: a}\n",
    "mpi.yaml": "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: a}\n",
    "recipe.yaml": "defaults: [a]\ntrainer: {devices: 8}\nrun: {name: a}\n",
    "fields.yaml": "alpha: 1\nbeta: 2\n",
    "helm.yaml": "kind: {{ .Values.kind }}\n",
    "jinja.j2": "{% for a in b %}x: 1{% endfor %}\n",
    "hyp.yaml": "template: cluster-stack\nversion: 1.0\n",
    "hyp-name.yaml": "job_name: Not_A_Name\nimage: a:1\ncommand: [torchrun, t.py]\n",
    "hyp-values.yaml": "job_name: a\nimage: a:1\ncommand: [torchrun, t.py]\nvcpu: many\nvolume: 3\n",
    "nothing.sbatch": "#!/bin/bash\n#SBATCH --nodes=2\necho hello\n",
    "hetjob.sbatch": "#!/bin/bash\n#SBATCH -N 1\n#SBATCH hetjob\n#SBATCH -N 2\nsrun python t.py\n",
    "grows.sbatch": "#!/bin/bash\nA=x\n" + "A=$A$A\n" * 60 + "srun torchrun t.py $A\n",
    "command.yaml": (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec: {pytorchReplicaSpecs: {Master: "
        "{replicas: 1, template: {spec: {containers: [{name: pytorch, image: a:1, args: [x]}]}}}}}\n"
    ),
}
"""Files that `hp-ext import` refuses."""


def command_cases() -> Iterator[Case]:
    """Wrong command lines."""
    for line in LINES.strip().splitlines():
        yield Case("Commands", line, tuple(shlex.split(line)), _JOB | _LOG)
    templates = [("unknown.j2", "x"), ("hyperpod_eks/job.yaml.j2", "{% if %}")]
    for name, text in templates:
        words = ("validate", "--templates", "mine")
        yield Case("Commands", f"validate --templates mine, where {name} is {text}", words, {f"mine/{name}": text})


def import_cases() -> Iterator[Case]:
    """Files that are no jobs."""
    for name, text in FILES.items():
        yield Case("Imports", short(text) or "an empty file", ("import", name), {name: text})
    head = table_of("jobs/slurm/test_import_steps.py").HEAD
    for lines, _why in parameters(
        "jobs/slurm/test_import_steps.py", "test_what_a_command_is_not_is_refused_with_the_reason"
    ):
        text = head + "\n".join(lines) + "\n"
        yield Case("Imports", f"sbatch: {short('; '.join(lines))}", ("import", "a.sbatch"), {"a.sbatch": text})
    yield Case("Imports", "--set NUM_NODES", ("import", "a.yaml", "--set", "NUM_NODES"), {"a.yaml": "a: $B\n"})


def data_cases() -> Iterator[Case]:
    """Datasets that cannot be built, and stores that cannot be read."""
    news = {"news.jsonl": "".join(json.dumps({"text": f"news {number} " * 30}) + "\n" for number in range(20))}
    table = parameters("cli/test_data.py", "test_mistakes_end_with_a_message_and_a_code")
    lines = [shlex.join(words) for words, *_ in table]
    lines += ["build news.jsonl --eod x", "build news.jsonl --out /proc/nothing", "build news.jsonl --budget 0"]
    lines += ["build broken.jsonl", "build train.zip", "build words.jsonl.gz", "build empty.jsonl", "build news.bin"]
    lines += ["build numbers.jsonl --tokenizer none", "build negative.jsonl --tokenizer none --field tokens"]
    lines += ["build fraction.jsonl --tokenizer none --field tokens", "build missing.jsonl", "verify news.jsonl"]
    files = news | {
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "train.zip": "x",
        "words.jsonl.gz": "no gzip",
        "empty.jsonl": "",
        "news.bin": "x",
        "numbers.jsonl": '{"text": "words"}\n',
        "negative.jsonl": '{"tokens": [1, -2]}\n',
        "fraction.jsonl": '{"tokens": [1.5]}\n',
        "missing.jsonl": '{"text": "a"}\n{"other": "b"}\n',
    }
    for line in lines:
        yield Case("Data", f"data {line}", ("data", *shlex.split(line)), files)


def checkpoint_cases() -> Iterator[Case]:
    """Commands on folders of checkpoints, which are written with torch."""
    for how, words, harm in _HARM:
        yield Case("Checkpoints", f"{' '.join(words)}, {how}", words, {}, _written(harm))


def _written(harm: Callable[[Any, Path], object]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        tests = table_of("cli/test_checkpoints.py")
        place = folder / "ckpt" / tests.JOB
        written = tests.Written(tests.open_store(str(place)))
        for step in (10, 20):
            written.save(step)
        for name, content in (("secret", tests.SECRET), ("other-secret", b"another secret of another job")):
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
        (folder / "short-secret").touch(mode=0o600)
        (folder / "open-secret").write_bytes(tests.SECRET)
        (folder / "open-secret").chmod(0o644)
        harm(written, place)

    return prepare


def _newest(place: Path, name: str) -> Path:
    return min((place / "step-000000020-g000001").glob(name))


def _changed(name: str) -> Callable[[Any, Path], object]:
    return lambda _written, place: table_of("cli/test_checkpoints.py").flip(_newest(place, name))


def _deleted(name: str) -> Callable[[Any, Path], object]:
    return lambda _written, place: _newest(place, name).unlink()


def _text(name: str, text: str) -> Callable[[Any, Path], object]:
    return lambda _written, place: _newest(place, name).write_text(text)


def _manifest(**fields: Any) -> Callable[[Any, Path], object]:
    def change(_written: Any, place: Path) -> None:
        file = _newest(place, "manifest.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _nothing(_written: Any, _place: Path) -> None:
    return None


_AT = "ckpt/tiny-gpt"
_VERIFY = ("checkpoints", "verify", _AT)
_COPY = ("checkpoints", "copy", _AT)
_HARM: list[tuple[str, tuple[str, ...], Callable[[Any, Path], object]]] = [
    ("the folder above", ("checkpoints", "list", "ckpt"), _nothing),
    ("the folder of one step", ("checkpoints", "list", f"{_AT}/step-000000010-g000001"), _nothing),
    ("a misspelt folder", ("checkpoints", "list", "ckpt/tiny-gpz"), _nothing),
    ("a folder that does not exist", ("checkpoints", "list", "ckpt/nowhere/at/all"), _nothing),
    ("a step that does not exist", ("checkpoints", "show", _AT, "--step", "14"), _nothing),
    ("an unfinished step", (*_VERIFY, "--step", "40"), lambda written, _place: written.save(40, nodes=[0])),
    ("no complete step", _VERIFY, lambda _written, place: [one.unlink() for one in place.glob("*/manifest.json")]),
    ("a changed shard", _VERIFY, _changed("__1_0.distcp")),
    ("a cut shard", _VERIFY, _text("__1_0.distcp", "x")),
    ("a deleted shard", _VERIFY, _deleted("__1_0.distcp")),
    ("a deleted .metadata", _VERIFY, _deleted(".metadata")),
    ("a changed plan", _VERIFY, _changed("plan-*")),
    ("a deleted plan", _VERIFY, _deleted("plan-*")),
    ("a manifest that is not JSON", _VERIFY, _text("manifest.json", "{")),
    ("a manifest that is a list", _VERIFY, _text("manifest.json", "[]")),
    ("a manifest of a newer version", _VERIFY, _manifest(format=99)),
    ("a manifest of another step", _VERIFY, _manifest(step=11)),
    ("a manifest of another job", (*_VERIFY, "--step", "20"), _manifest(job="other")),
    ("a manifest with a wrong number of ranks", _VERIFY, _manifest(world_size="many")),
    ("a manifest without files", _VERIFY, _manifest(files={})),
    ("a damaged checkpoint", ("checkpoints", "show", _AT, "--step", "20"), _text("manifest.json", "{")),
    ("another secret", (*_VERIFY, "--secret-file", "other-secret"), _nothing),
    ("a secret that others can read", (*_VERIFY, "--secret-file", "open-secret"), _nothing),
    ("a secret that is too short", (*_VERIFY, "--secret-file", "short-secret"), _nothing),
    ("a secret that does not exist", (*_VERIFY, "--secret-file", "no-secret"), _nothing),
    ("a manifest that was changed", (*_VERIFY, "--secret-file", "secret"), _manifest(created_at=1.0)),
    ("a changed shard", (*_COPY, "there/tiny-gpt"), _changed("__1_0.distcp")),
    ("a deleted shard", (*_COPY, "there/tiny-gpt"), _deleted("__1_0.distcp")),
    ("a damaged step", (*_COPY, "there/tiny-gpt", "--step", "20"), _text("manifest.json", "{")),
    ("a place where no folder can be made", (*_COPY, "/proc/nothing"), _nothing),
    ("the same place", (*_COPY, _AT), _nothing),
    ("no retention", ("checkpoints", "prune", _AT), _nothing),
    ("no terminal", ("checkpoints", "prune", _AT, "--keep", "1"), _nothing),
    (
        "the newest is damaged",
        ("checkpoints", "prune", _AT, "--keep", "1", "--verify", "--yes"),
        _changed("__1_0.distcp"),
    ),
]
"""What happened to the folder, and the command."""


def all_commands() -> Iterator[Case]:
    """Every command that fails."""
    return chain(command_cases(), import_cases(), data_cases(), checkpoint_cases())
