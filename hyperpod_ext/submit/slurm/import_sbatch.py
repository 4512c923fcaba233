"""From an sbatch file back to a JobConfig: ours letter for letter, others as far as their options say it. Pure."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.files.checks import SETTINGS
from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.contract.rank_variables import changes_ranks, is_of_ranks
from hyperpod_ext.submit.imports.how import HOW
from hyperpod_ext.submit.imports.launch import Launch
from hyperpod_ext.submit.imports.placeholders import VARIABLE, names_in
from hyperpod_ext.submit.imports.shell import read_script
from hyperpod_ext.submit.imports.shell_parts import shown
from hyperpod_ext.submit.imports.shell_values import Script
from hyperpod_ext.submit.kubernetes.imports.import_pod import place_script
from hyperpod_ext.submit.slurm.import_options import options_of, take
from hyperpod_ext.submit.slurm.import_step import Step, raw_step, read_step, tasks_of, unescaped
from hyperpod_ext.submit.slurm.script import NOTE, REFUSED_OF_STEP, job_script


def import_sbatch(text: str, source: str, values: Mapping[str, Any] | None = None) -> tuple[JobConfig, list[str]]:
    """The job, and the options of the file that a JobConfig cannot say.

    `values` are those of variables that whoever submits the file has in the environment.

    Raises:
        ConfigError: what it says is no valid job; names every field.
    """
    left: list[str] = []
    for line in text.split("\n"):
        if line.startswith(NOTE):
            job = _valid(line.removeprefix(NOTE), source)
            if job_script(job) == text:
                return job, []
            return _changed(job, text, source)
    text, notes = _filled(text, values or {}, source)
    left += [str(one) for one in notes]
    document: dict[str, Any] = {"mode": "plain", "slurm": {}}
    left_out: list[str] = []
    # nodes first: tasks are counted by them
    order = {"nodes": 0, "ntasks-per-node": 1}
    for name, value, line_number in sorted(options_of(text), key=lambda option: order.get(option[0], 2)):
        left_out = []
        take(document, name, value, left_out)
        left += [f"{source}:{line_number}: {one}" for one in left_out]
    document["slurm"].setdefault("exclusive", False)
    given = {name: str(value) for name, value in (values or {}).items() if isinstance(value, str | int | float)}
    _commands(text, document, left, source, given)
    for name in ("tasks", "called"):
        document.pop(name, None)
    document.setdefault("name", "job")
    left_out = []
    if "image" in document:  # without one, both files begin in the folder that they were submitted from
        place_script(document, left_out)
        if "working_dir" not in document:
            left_out.append("the folder that the job starts in: the image's own; write it as working_dir")
    left += [f"{source}: {one}" for one in left_out]
    try:
        return JobConfig.model_validate(document, strict=False), left
    except ValidationError as error:
        problems = [Problem(str(one["msg"]), path=dotted(one["loc"]), source=source) for one in error.errors()]
        raise ConfigError(problems) from None


_JINJA = re.compile(r"\{\{-?\s*[A-Za-z_]\w*\s*(?:\|[^{}]*)?-?\}\}|^#SBATCH.*\{\{", re.MULTILINE)
"""Not docker's `{{.Name}}`."""


def _filled(text: str, values: Mapping[str, Any], source: str) -> tuple[str, list[Problem]]:
    """With what is given for placeholders: those of Jinja, and variables in options, which sbatch does not expand."""
    notes: list[Problem] = []
    if _JINJA.search(text):
        from hyperpod_ext.submit.imports.jinja import fill_jinja

        text, notes = fill_jinja(text, values, source)

    def value_of(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[3])
        return match[0] if value is None or isinstance(value, dict | list) else str(value)

    options = re.compile(r"^#SBATCH.*$", re.MULTILINE)
    return options.sub(lambda line: VARIABLE.sub(value_of, line[0]), text), notes


def _changed(job: JobConfig, text: str, source: str) -> tuple[JobConfig, list[str]]:
    """Our own file, changed by hand: the spec in it with its number of nodes now; other changes are named."""
    left = [f"{source}: the spec in the file: the file was changed after it was written"]
    written = set(job_script(job).splitlines())
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"#SBATCH --nodes=(\d+)", line)
        if match and int(match[1]) > job.spares:
            job = job.model_copy(update={"nodes": int(match[1]) - job.spares})
        elif line not in written and not line.startswith(("# ", NOTE)):
            left.append(f"{source}:{number}: {line.strip()[:100]}: was changed by hand, and is not in the spec")
    return job, left


def _valid(note: str, source: str) -> JobConfig:
    try:
        return JobConfig.model_validate_json(note)
    except ValidationError as error:
        raise ConfigError([Problem(f"holds a spec of another version: {error}", source=source)]) from None


_SRUN_QUIET = {"label", "no-container-mount-home", "cpu-bind", "unbuffered"}


def _commands(text: str, document: dict[str, Any], left: list[str], source: str, given: Mapping[str, str]) -> None:
    """What the file runs: exports become variables, srun's options fields, and its launcher script and arguments."""
    given = _of_folder(given)
    script = read_script(text, source, {**_set_by_slurm(document), **given})
    left += [f"{source}:{line or 1}: {note}" for note, line in script.notes]
    on_nodes: list[tuple[str, str]] = []
    if not script.steps and script.alone and document.get("nodes", 1) == 1 and not script.hidden:
        words, line = script.alone[-1]  # on one node, nothing else need start it
        script.steps, script.folders = [(words, line)], [None]
        script.others = [(text, at) for text, at in script.others if at != line]
    for name, (value, line) in script.exports.items():
        if name.startswith("HPX_") and name not in SETTINGS:
            left.append(f"{source}:{line}: export {name}: the launcher sets it")
        elif not _at_run_time(value):
            document.setdefault("env", {})[name] = value
        elif "\n" in value or "[" in value or "RANDOM" in value:
            left.append(f"{source}:{line}: export {name}={value[:80]}: is worked out by bash when the job runs")
        else:
            quoted = value.replace('"', '\\"') if "$(" not in value else value
            document["slurm"].setdefault("setup", []).append(f'export {name}="{quoted}"')
            on_nodes.append((f"{source}:{line}: export {name}: is worked out on each node, by slurm.setup", value))
    for words in script.prepare:
        # a line of `before` that fails ends the job, as here only with `set -e`
        command = shlex.join(words) + ("" if script.strict else " || true")
        document.setdefault("overlay", {}).setdefault("slurm", {}).setdefault("before", []).append(command)
    prepared = _environment_lines(script)
    if prepared:
        # bash itself makes the environment, which the step then has: `sh` knows no `source`, and no functions of conda
        lines = ("set -e; " if script.strict else "") + "; ".join(f"{_quiet(text)}" for text, _line in prepared)
        command = f'made=$(bash -c {shlex.quote(f"{lines}; set -o posix; export -p")}) && eval "$made"'
        document.setdefault("overlay", {}).setdefault("slurm", {}).setdefault("before", []).append(command)
    for other, line in script.others:
        if (other, line) in prepared:
            continue
        left.append(f"{source}:{line}: {shown(other)}: a command besides the step is not run")
    known = {**_set_by_slurm(document), **given, **document.get("env", {})}
    steps = [read_step(words, line, known, script.literal) for words, line in script.steps]
    trains = [one for one in steps if one.launch is not None]
    trains = [one for one in trains if one.launch is not None and one.launch.launcher != "python"] or trains
    tasks = document.pop("tasks", None)
    on = (trains or steps)[-1].option("nodes") if steps else None
    if "nodes" not in document and on is not None and on.isdecimal() and int(on):
        document["nodes"] = int(on)  # the file leaves it to whoever submits it
    step = trains[-1] if trains else raw_step(steps, script, document.get("nodes", 1), tasks, source)
    where = f"{source}:{step.line}"
    if step.inner is not None and trains:
        left += [f"{where}: {one}" for one in step.inner.left_out if not one.endswith(_AS_TEXT)]  # said below
        document.setdefault("env", {}).update(step.inner.exports)
        if step.inner.folder is not None:
            document["working_dir"] = step.inner.folder
    if not step.is_srun and document.get("nodes", 1) > 1:
        left.append(f"{where}: no srun: the launcher runs on the first node there, on all of them here")
    for one in steps:
        if one.line < step.line and (before := _before(one, script)) is not None:
            document.setdefault("overlay", {}).setdefault("slurm", {}).setdefault("before", []).append(before)
        elif one is not step:
            text = " ".join(one.words)[:100]
            left.append(f"{source}:{one.line}: {text}: a spec has one step; the one of line {step.line} is it")
    if step.before:
        left.append(f"{where}: words before srun: {shlex.join(step.before)}")
    nodes = str(document.get("nodes", 1))
    own_job = {("jobid", name) for name in ("$SLURM_JOB_ID", "$SLURM_JOBID", "${SLURM_JOB_ID}", "${SLURM_JOBID}")}
    as_rendered = {"ntasks": nodes, "nodes": nodes, "ntasks-per-node": "1", "tasks-per-node": "1"}
    counted = {"ntasks", "ntasks-per-node", "tasks-per-node"} if _is_counted(step) else set()
    options = [one for one in step.options if as_rendered.get(one[0]) != one[1] and one not in own_job]
    options = [one for one in options if one[0] not in counted]
    _srun(options, document, left, where, given)
    left += [f"{one}, not on the first" for one, value in on_nodes if "image" in document or _OWN_OF_NODE.search(value)]
    folder = script.folders[steps.index(step)]
    if folder is not None and "image" not in document:
        document.setdefault("working_dir", folder)  # in a container, a step begins in that of the image
    tasks = tasks_of(step, document.get("nodes", 1), tasks)
    if step.launch is None:
        words = [word if word in script.literal else unescaped(word) for word in step.program]
        document |= {"command": words, "workers_per_node": 1}
        _without_ranks(document, left, source)
        words = [re.sub(r"\\[$`]", "", word) for word in step.program if word not in script.literal]
        if step.inner is not None:  # each node's shell has Slurm's variables, too
            words = [re.sub(r"\$\{?SLURM_\w+\}?", "", word) for word in words]
    else:
        _launched(step.launch, tasks, document, left, where)
        words = [step.launch.script, *step.launch.args, step.launch.interpreter or ""]
    left += [
        f"{where}: {word}: is worked out when the job runs; the spec passes it as text{_hint(word)}"
        for word in [*words, document.get("image", ""), document.get("working_dir", "")]
        if _at_run_time(word)
    ]


_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "HOSTNAME"}
_OWN_OF_NODE = re.compile(r"`|\$\(|\$\{?(HOST|SLURMD_|SLURM_(NODEID|PROCID|LOCALID|TASK)|RANDOM|BASH|PPID|UID)")
"""What is other on each node, or in each of its processes."""
_FOLDER = re.compile(r"\$\{?(PWD|SLURM_SUBMIT_DIR)\b|\$\(\s*pwd\b|`pwd`|\$\(cd ")


def _at_run_time(text: str) -> bool:
    return re.search(r"\$[\w({]|`", text) is not None


def _hint(text: str) -> str:
    """How what `text` refers to can be given."""
    if _FOLDER.search(text):
        return " (give the folder that it is submitted from with --set PWD=/FOLDER)"
    names = [name for name in names_in(text) if not name.startswith("SLURM") and name not in _OF_RANKS]
    return f" ({HOW.format(name=names[0])})" if names and not re.search(r"\$\(|\[", text) else ""


def _of_folder(given: Mapping[str, str]) -> dict[str, str]:
    """With the folder that it is submitted from under both of its names."""
    folder = given.get("PWD") or given.get("SLURM_SUBMIT_DIR")
    return {**given, "PWD": folder, "SLURM_SUBMIT_DIR": folder} if folder else dict(given)


def _before(step: Step, script: Script) -> str | None:
    """An earlier step as a line of the batch script, where all of it is known there."""
    words = [word if word in script.literal else unescaped(word) for word in step.words]
    given = {name: value for name, (value, line) in script.exports.items() if line <= step.line}
    text = shlex.join(["env", *(f"{name}={value}" for name, value in given.items()), *words] if given else words)
    known = [word for word in [*step.words, *given.values()] if word not in script.literal]
    if not step.is_srun or step.before or step.line in script.in_background or any("$" in one for one in known):
        return None
    if re.search(r"[\n\r\x00]", text) or any("`" in one for one in known) or changes_ranks(text):
        return None
    return text + ("" if script.strict else " || true")


def _without_ranks(document: dict[str, Any], left: list[str], source: str) -> None:
    """Variables of ranks are those of the rendered file; a port that the file names is kept."""
    env, setup = document.get("env", {}), document["slurm"].get("setup", [])
    if re.fullmatch(r"[1-9]\d{0,4}", env.get("MASTER_PORT", "")) and int(env["MASTER_PORT"]) < 2**16:
        document["rendezvous"] = {"port": int(env.pop("MASTER_PORT"))}
        left.append(f"{source}:1: export MASTER_PORT: is rendezvous.port now, from which the rendered file sets it")
    for name in [name for name in env if is_of_ranks(name) and name not in SETTINGS]:
        left.append(f"{source}:1: export {name}={env.pop(name)}: the rendered file sets it, by the step's nodes")
    for line in [line for line in setup if changes_ranks(line)]:
        setup.remove(line)
        left.append(f"{source}:1: {line[:100]}: the rendered file sets it, by the step's nodes")


_AS_TEXT = "is worked out when the job runs; the spec has it as text"


def _is_counted(step: Step) -> bool:
    """Whether srun's tasks are the job's workers."""
    return step.launch is not None and step.launch.launcher == "python"


def _launched(launch: Launch, tasks: str | None, document: dict[str, Any], left: list[str], where: str) -> None:
    """Script, arguments, and numbers of a launcher."""
    document |= launch.starts()
    if launch.interpreter is not None:
        document["slurm"]["python"] = launch.interpreter
    again = launch.options.get("max-restarts", "0")  # so torchrun and accelerate have it
    if launch.launcher in ("torchrun", "accelerate", "hyperpodrun") and again.isdecimal():
        launch.options.pop("max-restarts", None)
        document["restart"] = {"max_restarts": int(again)}
    if launch.python_options:
        left.append(f"{where}: options of the interpreter: {shlex.join(launch.python_options)}")
    if launch.launcher != "torchrun":
        left.append(f"{where}: the launcher is {launch.launcher}; the spec renders to torchrun, which sets the ranks")
    if launch.before:
        left.append(f"{where}: words before the launcher: {shlex.join(launch.before)}")
    workers = launch.workers if launch.launcher != "python" else tasks or "1"
    nodes = document.get("nodes", 1)
    if workers is not None and workers.isdecimal() and int(workers) > 0:
        count = int(workers)
        document["workers_per_node"] = launch.on_each_node(count, nodes)
    elif workers is not None:
        count = document.setdefault("workers_per_node", int(_set_by_slurm(document).get("SLURM_GPUS_ON_NODE", "1")))
        left.append(f"{where}: workers_per_node: {workers} depends on the node; {count} is taken")
    elif launch.launcher == "torchrun":
        document["workers_per_node"] = 1  # so torchrun has it
    else:
        on_node = _set_by_slurm(document).get("SLURM_GPUS_ON_NODE", "1")
        count = document.setdefault("workers_per_node", int(on_node))
        left.append(f"{where}: workers_per_node: {count} is taken, as the command of {launch.launcher} names none")
    for name, value in launch.other_options().items():
        shown_option = f"--{name} {value}".rstrip()
        left.append(f"{where}: {shown_option} of {launch.launcher}: a spec has no field that says it")
    if launch.nodes is not None and launch.nodes.isdecimal() and int(launch.nodes) != nodes:
        left.append(f"{where}: the launcher's {launch.nodes} nodes: --nodes is {nodes}, which counts")
    elif launch.nodes is not None and ":" in launch.nodes:
        left.append(f"{where}: the launcher's --nnodes={launch.nodes}: the spec renders to exactly {nodes} nodes")


_ENVIRONMENT = re.compile(
    r"(?:\[\[? -[defs] [\w./+-]+ \]\]? && )?"
    r"(?:set -a; )?"
    r"(?:(?:source|\.)\s+[\w./+-]+|conda activate|spack load|micromamba activate)(?:\s+[\w./=:@+-]+)*(?:; set \+a)?"
    r"|eval \"\$\((?:conda|mamba|micromamba) shell[\w. =-]*hook[\w. =-]*\)\""
    r"|(?:source|\.) \"?\$\(conda info --base\)\"?/etc/profile\.d/conda\.sh"
)


def _quiet(text: str) -> str:
    """What it prints is no part of the environment."""
    first, _, rest = text.partition("; set +a")
    return f"{first} >&2" + ("; set +a" if _ and not rest else "")


def _environment_lines(script: Script) -> list[tuple[str, int]]:
    """Commands before the step that only change its environment, such as `source /fsx/venv/bin/activate`."""
    first = script.steps[0][1] if script.steps else 0
    return [(text, line) for text, line in script.others if line < first and _ENVIRONMENT.fullmatch(text.strip())]


def _set_by_slurm(document: Mapping[str, Any]) -> dict[str, str]:
    """Variables that sbatch sets from the options of the file."""
    nodes, options = str(document.get("nodes", 1)), document["slurm"].get("sbatch", {})
    found = {"SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes}
    if "called" in document:
        found["SLURM_JOB_NAME"] = document["called"]
    tasks = document.get("tasks", "1")
    if tasks.isdecimal():
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(int(tasks) * int(nodes))
    if "tasks" in document:
        found["SLURM_NTASKS_PER_NODE"] = tasks
    if "gpus-per-node" in options:
        found["SLURM_GPUS_PER_NODE"] = options["gpus-per-node"]
    of_node = options.get("gpus-per-node") or document["slurm"].get("gres") or ""
    if of_node.rpartition(":")[2].isdecimal() and ("gpu" in of_node or of_node.isdecimal()):
        found["SLURM_GPUS_ON_NODE"] = of_node.rpartition(":")[2]
    return found


def _srun(
    options: list[tuple[str, str]], document: dict[str, Any], left: list[str], where: str, given: Mapping[str, str]
) -> None:
    document["slurm"]["auto_resume"] = False
    for name, value in options:
        match name:
            case "auto-resume":
                document["slurm"]["auto_resume"] = value == "1"
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
                        volume = {"kind": "host", "path": inside, "host_path": host}
                        document.setdefault("volumes", []).append(
                            volume | ({"read_only": True} if flags == "ro" else {})
                        )
                        if _at_run_time(mount):
                            how = "is worked out when the job runs; the spec has it as text"
                            left.append(f"{where}: volume {mount}: {how}{_hint(mount)}")
                    else:
                        how = _hint("$PWD" if host.startswith(".") else mount)
                        left.append(f"{where}: volume {mount}: its folder is known only when the job runs{how}")
            case "export":
                for one in value.split(","):
                    variable, equals, text = one.partition("=")
                    if equals:
                        document.setdefault("env", {})[variable] = text
                    elif variable != "ALL":
                        left.append(f"{where}: srun --export={variable}: the step has all variables of the job")
            case "kill-on-bad-exit" if value in ("", "1"):
                continue  # so it is rendered
            case _ if _is_carried(name, value):
                overlay = document.setdefault("overlay", {}).setdefault("slurm", {})
                overlay.setdefault("srun", {})[name] = value
            case _ if name not in _SRUN_QUIET:
                why = "a spec has no field that says it"
                if name in REFUSED_OF_STEP:
                    why = "the rendered step has its own, an agent or launcher on each node with the job's files"
                left.append(f"{where}: srun --{name}{'=' if value else ''}{value}: {why}")


def _is_carried(name: str, value: str) -> bool:
    """Whether an option of srun is the overlay's: long, none that the file sets itself, and known before it runs."""
    long = re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) is not None
    known = not re.search(r"[$`\n\r\x00]", value)
    return long and known and name not in _SRUN_QUIET and name not in REFUSED_OF_STEP
