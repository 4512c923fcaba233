"""Options of an sbatch file, in all spellings, as fields of a spec. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.slurm.script import NEVER, OWN_OPTIONS, REFUSED_OF_BATCH

_SHORT = {"J": "job-name", "N": "nodes", "p": "partition", "q": "qos", "t": "time", "A": "account", "o": "output"}
_SHORT |= {"c": "cpus-per-task", "w": "nodelist", "x": "exclude", "C": "constraint", "d": "dependency", "D": "chdir"}
_SHORT |= {"e": "error", "i": "input", "a": "array", "L": "licenses", "m": "distribution", "n": "ntasks", "G": "gpus"}
_SHORT |= {
    "b": "begin",
    "M": "clusters",
    "F": "nodefile",
    "S": "core-spec",
    "B": "extra-node-info",
    "s": "oversubscribe",
}
_SHORT |= {"H": "hold", "k": "no-kill", "O": "overcommit", "Q": "quiet", "v": "verbose", "W": "wait", "h": "help"}
"""Of sbatch's manual."""
_TO_SLURM = {"account", "reservation", "constraint", "exclude", "gres"}
_QUIET = OWN_OPTIONS
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+)(?::(?P<seconds>\d+))?")


def options_of(text: str) -> list[tuple[str, str, int]]:
    """Long name, value and line of each option of the file.

    Raises:
        ConfigError: it is a job of several kinds of nodes.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH") else []
        except ValueError:
            words = line.removeprefix("#SBATCH").split()
        while words:
            word = words.pop(0)
            if word in ("hetjob", "packjob"):
                hint = "write a spec for each of its parts, or one with nodes that are alike"
                raise ConfigError([Problem("is a job of several kinds of nodes", path=word, line=number, hint=hint)])
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
            else:
                name, equals, value = _SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            found.append((name, value, number))
    return found


def take(document: dict[str, Any], name: str, value: str, left: list[str]) -> None:
    """Put one option into the spec, as a document; what it cannot say goes to `left`."""
    slurm = document["slurm"]
    match name:
        case "job-name":
            document["called"] = value
            document["name"] = re.sub(r"[^a-z0-9-]", "-", value.lower()).strip("-")[:63] or "job"
            if document["name"] != value:
                left.append(f"--job-name={value}: the job is called {document['name']}")
        case "nodes":
            least = value.partition("-")[0]
            document["nodes"] = int(least) if least.isdecimal() and int(least) > 0 else 1
            if str(document["nodes"]) != value:
                left.append(f"--nodes={value}: is no one number of nodes; {document['nodes']} is taken")
        case "partition":
            document.setdefault("scheduling", {})["queue"] = value
        case "qos":
            document.setdefault("scheduling", {})["priority"] = value
        case "time" if (match := _TIME.fullmatch(value)) is not None:
            document["timeouts"] = {"run_s": _seconds(match)}
        case "gpus-per-node" | "gpus-per-task":
            count = value.rpartition(":")[2]
            if count.isdecimal() and int(count) > 0:
                document["workers_per_node"] = int(count)
            slurm.setdefault("sbatch", {})[name] = value
        case "ntasks-per-node":
            document["tasks"] = value
            if value != "1":
                left.append(f"--ntasks-per-node={value}: one task a node starts the workers")
        case "ntasks" if (
            value.isdecimal() and int(value) > 0 and int(value) % _nodes_of(int(value), document, left) == 0
        ):
            tasks = int(value) // document.get("nodes", 1)
            document.setdefault("tasks", str(tasks))
            if tasks != 1:
                left.append(f"--ntasks={value}: one task a node starts the workers")
        case "cpus-per-task":
            if value.isdecimal() and int(value) > 0:
                document.setdefault("resources", {})["cpus"] = float(value)
            else:
                left.append(f"--cpus-per-task={value}: is no number")
        case "exclusive":
            slurm["exclusive"] = True
        case "export":
            pairs = [one.partition("=") for one in value.split(",")]
            for variable, equals, text in pairs:
                if equals and re.fullmatch(r"[A-Za-z_]\w*", variable):
                    document.setdefault("env", {})[variable] = text
            others = [variable for variable, equals, _text in pairs if not equals and variable != "ALL"]
            if value == "ALL":
                return  # so sbatch has it
            if value == "NONE":
                left.append("--export=NONE: the job has the variables of whoever submits it, too")
                return
            why = (
                f"of the submitter's variables, {', '.join(others)} alone are passed there" if others else "in env now"
            )
            left.append(f"--export={value}: {why}")
        case "chdir" if value in (".", "./", "$PWD", "$(pwd)"):
            return
        case "signal":
            left.append(f"--signal={value}: the rendered file asks for its own, before the time limit")
        case "requeue" | "no-requeue":
            slurm["requeue"] = name == "requeue"
        case _ if name in _TO_SLURM:
            slurm[name] = value
        case "mem" if value == "0":
            slurm.setdefault("sbatch", {})["mem"] = value
        case _ if re.search(r"[\s'\"\\#]", value) or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            left.append(f"--{name}={value}: a spec takes no such text as an option of sbatch")
        case _ if name in _QUIET or name in NEVER:
            left.append(f"--{name}{'=' if value else ''}{value}: {REFUSED_OF_BATCH[name][0]}")
        case _:
            slurm.setdefault("sbatch", {})[name] = value


def _nodes_of(tasks: int, document: dict[str, Any], left: list[str]) -> int:
    """Nodes of a file that may name tasks alone: Slurm counts them by the tasks of a node."""
    each = document.get("tasks", "")
    if "nodes" not in document and each.isdecimal() and int(each) and tasks % int(each) == 0:
        document["nodes"] = tasks // int(each)
    elif "nodes" not in document and tasks > 1:
        left.append(f"nodes: the file names {tasks} tasks and no nodes, which Slurm counts by them; 1 is taken")
    return int(document.get("nodes", 1))


def _seconds(match: re.Match[str]) -> int:
    """As sbatch counts: 90 is minutes, 1:30 minutes and seconds, 1:30:00 with hours, 2-1 days and hours."""
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    if match["days"] is not None and match["hours"] is None:
        return days * 86400 + minutes * 3600 + seconds * 60
    if match["hours"] is not None and match["seconds"] is None:  # minutes:seconds
        return hours * 60 + minutes
    return days * 86400 + hours * 3600 + minutes * 60 + seconds
