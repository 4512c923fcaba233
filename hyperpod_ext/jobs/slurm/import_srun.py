"""Imports the options of srun, and of the launcher that srun starts, as fields of a spec. Pure."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.config.files.checks import SETTINGS
from hyperpod_ext.jobs.contract.rank_variables import changes_ranks, is_of_ranks
from hyperpod_ext.jobs.imports.how import HOW
from hyperpod_ext.jobs.imports.launch import Launch
from hyperpod_ext.jobs.imports.placeholders import names_in
from hyperpod_ext.jobs.imports.report import Report
from hyperpod_ext.jobs.slurm.import_step import Step
from hyperpod_ext.jobs.slurm.script import REFUSED_OF_STEP

_QUIET = {"label", "no-container-mount-home", "cpu-bind", "unbuffered"}
_OWN_WORDS = "the rendered step sets this itself"


def without_replaced(step: Step, nodes: int, report: Report) -> Iterator[tuple[str, str]]:
    """Yield the options of srun that the rendered step does not set itself; add a note for each other option.

    Args:
        nodes: number of nodes of the job.
    """
    own_job = {("jobid", name) for name in ("$SLURM_JOB_ID", "$SLURM_JOBID", "${SLURM_JOB_ID}", "${SLURM_JOBID}")}
    as_rendered = {"ntasks": str(nodes), "nodes": str(nodes), "ntasks-per-node": "1", "tasks-per-node": "1"}
    counted = {"ntasks", "ntasks-per-node", "tasks-per-node"} if _is_counted(step) else set()
    for name, value in step.options:
        if as_rendered.get(name) == value or (name, value) in own_job or name in counted:
            report.note(f"srun --{name}={value}: {_OWN_WORDS}", step.line)
        else:
            yield name, value


_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "HOSTNAME"}
OWN_OF_NODE = re.compile(r"`|\$\(|\$\{?(HOST|SLURMD_|SLURM_(NODEID|PROCID|LOCALID|TASK)|RANDOM|BASH|PPID|UID)")
"""Pattern of shell expansions whose values differ between nodes, or between the processes of a node."""
_FOLDER = re.compile(r"\$\{?(PWD|SLURM_SUBMIT_DIR)\b|\$\(\s*pwd\b|`pwd`|\$\(cd ")


def at_run_time(text: str) -> bool:
    """Return whether the shell replaces a part of `text` when the job runs."""
    return re.search(r"\$[\w({]|`", text) is not None


def hint_for(text: str) -> str:
    """Return a hint for users that explains how to set the variables in `text`; empty if no variable can be set."""
    if _FOLDER.search(text):
        return " (set the folder of the submission with --set PWD=/FOLDER)"
    names = [name for name in names_in(text) if not name.startswith("SLURM") and name not in _OF_RANKS]
    return f" ({HOW.format(name=names[0])})" if names and not re.search(r"\$\(|\[", text) else ""


def _is_counted(step: Step) -> bool:
    """Return whether each task that srun starts is a worker, because the step has no launcher."""
    return step.launch is not None and step.launch.launcher == "python"


def take_launch(launch: Launch, tasks: str | None, document: dict[str, Any], report: Report, line: int) -> None:
    """Import the script, the arguments, and the numbers of workers and nodes from a launcher's command.

    Args:
        tasks: tasks per node in the file; None if the file does not set them.
        document: spec to which the fields are added.
        line: line of the command in the file.
    """
    document |= launch.starts()
    if launch.interpreter is not None:
        document["slurm"]["python"] = launch.interpreter
    again = launch.options.get("max-restarts", "0")  # torchrun and accelerate restart 0 times by default
    if launch.launcher in ("torchrun", "accelerate", "hyperpodrun") and again.isdecimal():
        if launch.options.pop("max-restarts", None) == "0":
            report.note(f"--max-restarts=0: this is {launch.launcher}'s default", line)
        document["restart"] = {"max_restarts": int(again)}
    if launch.launcher == "python" and not launch.program:
        report.lost(f"{launch.script} is started by its first line; the rendered job uses python3", line)
    if launch.python_options:
        report.lost(f"options of the interpreter: {shlex.join(launch.python_options)} are not carried", line)
    if launch.launcher != "torchrun":
        text = f"the launcher is {launch.launcher}; the rendered job uses torchrun, which sets the ranks"
        if launch.launcher == "python" and tasks not in (None, "1"):
            text += ": a script that reads SLURM_PROCID or SLURM_LOCALID must read RANK or LOCAL_RANK"
        report.lost(text, line)
    if launch.before:
        report.lost(f"words before the launcher: {shlex.join(launch.before)} are not carried", line)
    workers = launch.workers if launch.launcher != "python" else tasks or "1"
    nodes = document.get("nodes", 1)
    if workers is not None and workers.isdecimal() and int(workers) > 0:
        count = int(workers)
        document["workers_per_node"] = launch.on_each_node(count, nodes)
    elif workers is not None:
        count = document.setdefault("workers_per_node", int(set_by_slurm(document).get("SLURM_GPUS_ON_NODE", "1")))
        report.lost(f"workers_per_node: is {count}, because {workers} depends on the node", line)
    elif launch.launcher == "torchrun":
        document["workers_per_node"] = 1
        report.note("workers_per_node: 1, torchrun's default without --nproc-per-node", line)
    else:
        on_node = set_by_slurm(document).get("SLURM_GPUS_ON_NODE", "1")
        count = document.setdefault("workers_per_node", int(on_node))
        report.lost(f"workers_per_node: is {count}, because the command of {launch.launcher} does not set it", line)
    for one in launch.replaced():
        report.note(one, line)
    for name, value in launch.other_options().items():
        shown_option = f"--{name} {value}".rstrip()
        report.lost(f"{shown_option} of {launch.launcher}: a spec has no such field", line)
    if launch.nodes is not None and launch.nodes.isdecimal() and int(launch.nodes) != nodes:
        report.lost(f"the launcher's {launch.nodes} nodes: --nodes={nodes} takes precedence", line)
    elif launch.nodes is not None and ":" in launch.nodes:
        report.lost(f"the launcher's --nnodes={launch.nodes}: the rendered job has exactly {nodes} nodes", line)


def without_ranks(document: dict[str, Any], report: Report) -> None:
    """Remove variables that identify ranks from the spec, because the rendered file sets them itself.

    The value of MASTER_PORT is kept as rendezvous.port.
    """
    env, setup = document.get("env", {}), document["slurm"].get("setup", [])
    if re.fullmatch(r"[1-9]\d{0,4}", env.get("MASTER_PORT", "")) and int(env["MASTER_PORT"]) < 2**16:
        document["rendezvous"] = {"port": int(env.pop("MASTER_PORT"))}
        report.lost("export MASTER_PORT: is now rendezvous.port, from which the rendered file sets it", 1)
    for name in [name for name in env if is_of_ranks(name) and name not in SETTINGS]:
        report.lost(f"export {name}={env.pop(name)}: the rendered file sets it from the step's nodes", 1)
    for line in [line for line in setup if changes_ranks(line)]:
        setup.remove(line)
        report.lost(f"{line[:100]}: the rendered file sets it from the step's nodes", 1)


def srun_option(
    name: str, value: str, document: dict[str, Any], report: Report, line: int, given: Mapping[str, str]
) -> None:
    """Put one option of srun into `document`, a spec. Report the option if a spec cannot express it.

    Args:
        line: line of the step in the file.
        given: environment variables with which the file is submitted.
    """
    match name:
        case "auto-resume":
            document["slurm"]["auto_resume"] = value == "1"
            if value != "1":
                report.note(f"srun --auto-resume={value}: becomes slurm.auto_resume: false", line)
        case "container-image":
            document["image"] = value
        case "container-workdir" if value.startswith("/"):
            document["working_dir"] = value
        case "container-mounts":
            for mount in value.split(","):
                host, _, inside = mount.partition(":")
                inside, _, flags = (inside or host).partition(":")
                if host.startswith(".") and "PWD" in given:
                    host = posixpath.normpath(posixpath.join(given["PWD"], host))
                if host.startswith("/") and inside.startswith("/"):
                    volume: dict[str, Any] = {"kind": "host", "path": inside, "host_path": host}
                    volume |= {"read_only": True} if flags == "ro" else {}
                    document.setdefault("volumes", []).append(volume)
                    if flags not in ("", "ro"):
                        report.lost(f"volume {mount}: a volume of a spec has no flags except ro", line)
                    if at_run_time(mount):
                        how = "is evaluated when the job runs, but the spec passes it as text"
                        report.lost(f"volume {mount}: {how}{hint_for(mount)}", line)
                else:
                    how = hint_for("$PWD" if host.startswith(".") else mount)
                    report.lost(f"volume {mount}: its folder is known only when the job runs{how}", line)
        case "export":
            for one in value.split(","):
                variable, equals, text = one.partition("=")
                if equals:
                    document.setdefault("env", {})[variable] = text
                else:
                    say = report.note if variable == "ALL" else report.lost
                    say(f"srun --export={variable}: the step has all variables of the job", line)
        case "kill-on-bad-exit" if value in ("", "1"):
            report.note(f"srun --kill-on-bad-exit: {_OWN_WORDS}", line)
        case _ if _is_carried(name, value):
            overlay = document.setdefault("overlay", {}).setdefault("slurm", {})
            overlay.setdefault("srun", {})[name] = value
        case _ if name in _QUIET:
            report.note(f"srun --{name}{'=' if value else ''}{value}: {_OWN_WORDS}", line)
        case _:
            why = "a spec has no such field"
            if name in REFUSED_OF_STEP:
                why = "the rendered step sets this itself, to start the job's agent or launcher on each node"
            report.lost(f"srun --{name}{'=' if value else ''}{value}: {why}", line)


def _is_carried(name: str, value: str) -> bool:
    """Return whether `overlay.slurm.srun` accepts the option.

    The overlay accepts long options with literal values, except options that the rendered file sets itself.
    """
    long = re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) is not None
    known = not re.search(r"[$`\n\r\x00]", value)
    return long and known and name not in _QUIET and name not in REFUSED_OF_STEP


def set_by_slurm(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that sbatch sets in the job, derived from the options of the file."""
    nodes, options = str(document.get("nodes", 1)), document["slurm"].get("sbatch", {})
    found = {"SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes}
    if "called" in document:
        found["SLURM_JOB_NAME"] = document["called"]
    tasks = document.get("tasks", "1")
    if tasks.isdecimal():
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(int(tasks) * int(nodes))
    if "tasks" in document:
        found["SLURM_NTASKS_PER_NODE"] = tasks
        found["SLURM_TASKS_PER_NODE"] = tasks if nodes == "1" else f"{tasks}(x{nodes})"
    found |= {f"SLURM_{name.upper().replace('-', '_')}": value for name, value in document.get("each", {}).items()}
    if "gpus-per-node" in options:
        found["SLURM_GPUS_PER_NODE"] = options["gpus-per-node"]
    of_node = options.get("gpus-per-node") or document["slurm"].get("gres") or ""
    if of_node.rpartition(":")[2].isdecimal() and ("gpu" in of_node or of_node.isdecimal()):
        found["SLURM_GPUS_ON_NODE"] = of_node.rpartition(":")[2]
    return found
