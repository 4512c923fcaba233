"""Imports the options (`#SBATCH` lines) of an sbatch file as fields of a spec. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hyperpod_ext.config.job.slurm import SlurmPhrase, SlurmWord
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.report import Report
from hyperpod_ext.jobs.slurm.script import NEVER, OWN_OPTIONS, REFUSED_OF_BATCH

SHORT = {"J": "job-name", "N": "nodes", "p": "partition", "q": "qos", "t": "time", "A": "account", "o": "output"}
SHORT |= {"c": "cpus-per-task", "w": "nodelist", "x": "exclude", "C": "constraint", "d": "dependency", "D": "chdir"}
SHORT |= {"e": "error", "i": "input", "a": "array", "L": "licenses", "m": "distribution", "n": "ntasks", "G": "gpus"}
SHORT |= {
    "b": "begin",
    "M": "clusters",
    "F": "nodefile",
    "S": "core-spec",
    "B": "extra-node-info",
    "s": "oversubscribe",
}
SHORT |= {"H": "hold", "k": "no-kill", "O": "overcommit", "Q": "quiet", "v": "verbose", "W": "wait", "h": "help"}
"""Long name of each short option of sbatch, from sbatch's manual."""
_WORD, _PHRASE = TypeAdapter(SlurmWord), TypeAdapter(SlurmPhrase)
_TO_SLURM = {"account": _WORD, "reservation": _WORD} | dict.fromkeys(("constraint", "exclude", "gres"), _PHRASE)
"""Fields of the spec's section `slurm`, with the types of their values. An option whose value does not fit its field's
type, such as `p4,p5`, becomes an entry of `slurm.sbatch`."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+)(?::(?P<seconds>\d+))?")
_ONE_TASK = "one task per node starts the workers"
_SCALED = {"cpus-per-task", "gpus-per-task", "tres-per-task"}
_OF_TASKS = {"ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "gpu-bind", "mem-bind"}
"""Options that divide a node among the tasks of srun. In a rendered job, which has one task on each node, options of
tasks would have another meaning."""
_OF_CONTAINERS = re.compile(r"(no-)?container-[a-z-]+")

Option = tuple[str, str, int]
"""An option of the file: its long name, value and line number."""


def options_of(text: str, report: Report) -> list[Option]:
    """Return the options of an sbatch file. Of a repeated option, only the last occurrence is returned.

    The report lists options that sbatch ignores: overridden ones, and options after the first command.

    Raises:
        ConfigError: the file is a heterogeneous job, with several kinds of nodes.
    """
    found: dict[str, Option] = {}
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        begun |= bool(line.strip()) and not line.startswith("#")
        if not line.startswith("#SBATCH"):
            continue
        if begun:
            report.note(f"{line}: sbatch reads no options after the first command", number)
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            words = line.removeprefix("#SBATCH").split()
        while words:
            word = words.pop(0)
            if word in ("hetjob", "packjob"):
                hint = "write a spec for each part of the job, or one spec with equal nodes"
                raise ConfigError([Problem("is a job with several kinds of nodes", path=word, line=number, hint=hint)])
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
            else:
                name, equals, value = SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            if name in found:
                _name, before, at = found.pop(name)
                report.note(f"--{name}={before}: is overridden on line {number}", at)
            found[name] = name, value, number
    return list(found.values())


def take_all(text: str, document: dict[str, Any], report: Report) -> list[Option]:
    """Put the options of an sbatch file into `document`, a spec. Return the options of containers, which belong to the
    step.

    `document` also gets three entries that are not fields of a spec. `called` is the job's name as written, and `tasks`
    is the number of tasks per node. `each` has the options that give each task a share of the node, such as
    `cpus-per-task`.
    """
    options = options_of(text, report)
    steps = [one for one in options if _OF_CONTAINERS.fullmatch(one[0])]
    named = {name: value for name, value, _line in options}
    # import `nodes` first, because the number of tasks depends on the number of nodes
    order = {"nodes": 0, "ntasks-per-node": 1, "gpus-per-node": 2, "gres": 2, "gpus": 2, "ntasks": 3}
    for name, value, line in sorted(options, key=lambda option: order.get(option[0], 4)):
        if name not in _SCALED | _OF_TASKS and not _OF_CONTAINERS.fullmatch(name):
            _take(document, name, value, report, line)
    _count_tasks(document, named, report)
    tasks = int(document.get("tasks", 1))
    for name, value, line in options:
        if name in _SCALED | _OF_TASKS:
            scaled = of_one_task(name, value, tasks)
            document.setdefault("each", {})[name] = value
            if scaled is None:
                report.lost(f"--{name}={value}: {_ONE_TASK}", line)
                continue
            if scaled != value:
                report.note(f"--{name}={value}: is {scaled} for the single task of a node that starts {tasks}", line)
            _take(document, name, scaled, report, line)
    if tasks > 1 and not {"cpus-per-task", "tres-per-task", "cpus-per-gpu", "exclusive"} & named.keys():
        document.setdefault("resources", {})["cpus"] = float(tasks)
        report.note(f"resources.cpus: {tasks}, one for each of a node's {tasks} tasks, Slurm's default")
    document["slurm"].setdefault("exclusive", False)
    return steps


def of_one_task(name: str, value: str, tasks: int) -> str | None:
    """Convert the value of an option for several tasks per node to a value for a single task per node.

    The single task starts all workers of the node. Return None if the option has no value for a single task.

    Args:
        tasks: number of tasks per node in the file.
    """
    if tasks == 1:
        return value
    if name not in _SCALED:
        return None if name in _OF_TASKS else value
    parts = [part if re.search(r"\d$", part) else f"{part}:1" for part in value.split(",")]
    return ",".join(re.sub(r"\d+$", lambda match: str(int(match[0]) * tasks), part) for part in parts)


def _count_tasks(document: dict[str, Any], named: Mapping[str, str], report: Report) -> None:
    """Derive the number of tasks per node from the number of GPUs, as Slurm does, if the file does not set it."""
    slurm, nodes = document["slurm"], int(document.get("nodes", 1))
    gpus = _number(named.get("gpus-per-node", "")) or _number(slurm.get("gres", ""), "gpu")
    gpus = gpus or _number(named.get("gpus", "")) // nodes
    by_gpu, of_task = _number(named.get("ntasks-per-gpu", "")), _number(named.get("gpus-per-task", ""))
    if "tasks" in document or not gpus or not (by_gpu or (of_task and "gpus" in named)):
        return
    tasks = by_gpu * gpus if by_gpu else gpus // of_task
    if tasks:
        document["tasks"] = str(tasks)
        report.note(f"tasks: {tasks} on each node, as Slurm counts them by its {gpus} GPUs")


def _number(value: str, kind: str = "") -> int:
    """Return the number at the end of a value such as `gpu:a100:8` or `8`; 0 if the value has no number.

    Args:
        kind: use only items of the comma-separated value that begin with this text.
    """
    items = [one for one in value.split(",") if one.startswith(kind)]
    count = items[0].rpartition(":")[2] if items else ""
    return int(count) if count.isdecimal() else 0


def _take(document: dict[str, Any], name: str, value: str, report: Report, line: int) -> None:
    """Put one option of an sbatch file into `document`, a spec. Report the option if a spec cannot express it."""
    slurm = document["slurm"]
    match name:
        case "job-name":
            document["called"] = value
            document["name"] = re.sub(r"[^a-z0-9-]", "-", value.lower()).strip("-")[:63] or "job"
            if document["name"] != value:
                report.lost(f"--job-name={value}: the job is called {document['name']}", line)
        case "nodes":
            least = value.partition("-")[0]
            document["nodes"] = int(least) if least.isdecimal() and int(least) > 0 else 1
            if str(document["nodes"]) != value:
                report.lost(f"--nodes={value}: is not a single number of nodes; nodes is {document['nodes']}", line)
        case "partition" if _fits(_WORD, value):
            document.setdefault("scheduling", {})["queue"] = value
        case "qos" if _fits(_WORD, value):
            document.setdefault("scheduling", {})["priority"] = value
        case "time" if (match := _TIME.fullmatch(value)) is not None and _seconds(match):  # a time of 0 is no limit
            document["timeouts"] = {"run_s": _seconds(match)}
        case "gpus-per-node" | "gpus-per-task":
            if count := _number(value):
                document["workers_per_node"] = count
            slurm.setdefault("sbatch", {})[name] = value
        case "ntasks-per-node":
            if value.isdecimal() and int(value) > 0:
                document["tasks"] = value
            (report.lost if value != "1" else report.note)(f"--ntasks-per-node={value}: {_ONE_TASK}", line)
        case "ntasks" if (
            value.isdecimal() and int(value) > 0 and int(value) % _nodes_of(int(value), document, report, line) == 0
        ):
            tasks = int(value) // document.get("nodes", 1)
            document.setdefault("tasks", str(tasks))
            (report.lost if tasks != 1 else report.note)(f"--ntasks={value}: {_ONE_TASK}", line)
        case "cpus-per-task":
            if value.isdecimal() and int(value) > 0:
                document.setdefault("resources", {})["cpus"] = float(value)
            else:
                report.lost(f"--cpus-per-task={value}: is not a number", line)
        case "exclusive" if not value:
            slurm["exclusive"] = True
        case "export":
            pairs = [one.partition("=") for one in value.split(",")]
            for variable, equals, text in pairs:
                if equals and re.fullmatch(r"[A-Za-z_]\w*", variable):
                    document.setdefault("env", {})[variable] = text
            others = [variable for variable, equals, _text in pairs if not equals and variable != "ALL"]
            if value == "ALL":
                report.note("--export=ALL: this is sbatch's default", line)
                return
            if value == "NONE":
                report.lost("--export=NONE: the rendered job also has the variables of its submission", line)
                return
            why = f"of the submitter's variables, the file passes only {', '.join(others)}" if others else "now in env"
            report.lost(f"--export={value}: {why}", line)
        case "chdir" if value in (".", "./", "$PWD", "$(pwd)"):
            report.note(f"--chdir={value}: the job starts in this folder anyway", line)
        case "signal":
            report.lost(f"--signal={value}: the rendered file requests its own signal before the time limit", line)
        case "requeue" | "no-requeue":
            slurm["requeue"] = name == "requeue"
        case _ if name in _TO_SLURM and _fits(_TO_SLURM[name], value):
            slurm[name] = value
        case "mem" if value == "0":
            slurm.setdefault("sbatch", {})["mem"] = value
        case _ if re.search(r"[\s'\"\\#]", value) or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            report.lost(f"--{name}={value}: a spec does not allow this text as an option of sbatch", line)
        case _ if name in OWN_OPTIONS or name in NEVER:
            report.lost(f"--{name}{'=' if value else ''}{value}: {REFUSED_OF_BATCH[name][0]}", line)
        case _:
            slurm.setdefault("sbatch", {})[name] = value


def _fits(form: TypeAdapter[str], value: str) -> bool:
    try:
        form.validate_python(value)
    except ValidationError:
        return False
    return True


def _nodes_of(tasks: int, document: dict[str, Any], report: Report, line: int) -> int:
    """Return the number of nodes in the file.

    If the file sets only the number of tasks, the number of nodes is derived from the tasks per node, as Slurm does.

    Args:
        tasks: total number of tasks in the file.
    """
    each = document.get("tasks", "")
    if "nodes" not in document and each.isdecimal() and int(each) and tasks % int(each) == 0:
        document["nodes"] = tasks // int(each)
    elif "nodes" not in document and tasks > 1:
        text = f"nodes: the file sets {tasks} tasks and no nodes, so Slurm chooses the nodes; nodes is 1"
        report.lost(text, line)
    return int(document.get("nodes", 1))


def _seconds(match: re.Match[str]) -> int:
    """Return the seconds of a time limit of Slurm.

    `90` is 90 minutes, `1:30` is a minute and 30 seconds, and `2-1` is two days and an hour.
    """
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    if match["days"] is not None and match["hours"] is None:
        return days * 86400 + minutes * 3600 + seconds * 60
    if match["hours"] is not None and match["seconds"] is None:  # the time has the form minutes:seconds
        return hours * 60 + minutes
    return days * 86400 + hours * 3600 + minutes * 60 + seconds
