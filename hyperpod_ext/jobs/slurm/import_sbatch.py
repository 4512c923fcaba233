"""Imports an sbatch file as a JobConfig. Pure.

A file that hp-ext rendered contains its spec, which is returned. From any other file, the parts that a spec can express
are imported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.files.checks import SETTINGS
from hyperpod_ext.config.files.error_messages import problems_of
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.secret_variables import with_secrets
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.placeholders import VARIABLE
from hyperpod_ext.jobs.imports.report import Imported, Report
from hyperpod_ext.jobs.imports.shell import read_script
from hyperpod_ext.jobs.imports.shell_parts import shown
from hyperpod_ext.jobs.kubernetes.imports.import_pod import place_script
from hyperpod_ext.jobs.slurm.import_options import Option, of_one_task, take_all
from hyperpod_ext.jobs.slurm.import_setup import earlier_step, environment_lines, environment_of
from hyperpod_ext.jobs.slurm.import_srun import (
    OWN_OF_NODE,
    at_run_time,
    hint_for,
    set_by_slurm,
    srun_option,
    take_launch,
    without_ranks,
    without_replaced,
)
from hyperpod_ext.jobs.slurm.import_step import SOME_NODES, Step, raw_step, read_step, tasks_of, unescaped
from hyperpod_ext.jobs.slurm.script import NOTE, job_script


def import_sbatch(text: str, source: str, values: Mapping[str, Any] | None = None) -> Imported:
    """Return the job, and a sentence for each part of the file that a JobConfig cannot express.

    Args:
        text: content of the file.
        source: name of the file for messages.
        values: environment variables with which the file is submitted, or values of its Jinja placeholders.

    Raises:
        ConfigError: the job is invalid. The error names every invalid field.
    """
    for line in text.split("\n"):
        if line.startswith(NOTE):
            job = with_secrets(_valid(line.removeprefix(NOTE), source), _exported(text))
            if job_script(job) == text:
                return Imported(job, _TARGET)
            return Imported(*_changed(job, text, source))
    report = Report(source)
    text, notes = _filled(text, values or {}, source)
    report.left_out += [str(one) for one in notes]
    document: dict[str, Any] = {"mode": "plain", "slurm": {}}
    step_options = take_all(text, document, report)
    given = {name: str(value) for name, value in (values or {}).items() if isinstance(value, str | int | float)}
    _commands(text, document, report, given, step_options)
    for name in ("tasks", "called", "each"):
        document.pop(name, None)
    document.setdefault("name", "job")
    left_out: list[str] = []
    if "image" in document:  # jobs without an image start in the folder of the submission
        place_script(document, left_out)
        if "working_dir" not in document:
            left_out.append("the folder that the job starts in: is the image's; set it as working_dir")
    for one in left_out:
        report.lost(one)
    try:
        job = JobConfig.model_validate(document, strict=False)
    except ValidationError as error:
        raise ConfigError([*problems_of(error, JobConfig, source, document)]) from None
    return Imported(job, _TARGET, report.left_out, list(dict.fromkeys(report.notes)))


_TARGET = "hyperpod-slurm"
_JINJA = re.compile(r"\{\{-?\s*[A-Za-z_]\w*\s*(?:\|[^{}]*)?-?\}\}|^#SBATCH.*\{\{", re.MULTILINE)
"""Pattern of a Jinja placeholder, which does not match docker's `{{.Name}}`."""


def _filled(text: str, values: Mapping[str, Any], source: str) -> tuple[str, list[Problem]]:
    """Fill Jinja placeholders, and variables in `#SBATCH` lines, with `values`; return the text and notes.

    sbatch itself does not expand variables in `#SBATCH` lines.
    """
    notes: list[Problem] = []
    if _JINJA.search(text):
        from hyperpod_ext.jobs.imports.jinja import fill_jinja

        text, notes = fill_jinja(text, values, source)

    def value_of(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[3])
        return match[0] if value is None or isinstance(value, dict | list) else str(value)

    options = re.compile(r"^#SBATCH.*$", re.MULTILINE)
    return options.sub(lambda line: VARIABLE.sub(value_of, line[0]), text), notes


def _changed(job: JobConfig, text: str, source: str) -> tuple[JobConfig, str, list[str]]:
    """Import a file that a user edited after hp-ext rendered it.

    Returns the spec in the file with the edited number of nodes, the target, and a sentence for each other edit.
    """
    left = [f"{source}: the spec in the file: the file was edited after hp-ext wrote it"]
    written = set(job_script(job).splitlines())
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"#SBATCH --nodes=(\d+)", line)
        if match and int(match[1]) > job.spares:
            job = job.model_copy(update={"nodes": int(match[1]) - job.spares})
        elif line not in written and not line.startswith(("# ", NOTE)):
            left.append(f"{source}:{number}: {line.strip()[:100]}: was edited, and is not in the spec")
    return job, _TARGET, left


def _exported(text: str) -> dict[str, str]:
    """Return the environment variables that a rendered file exports."""
    found = re.findall(r"^    export (\w+)=(.*)$", text, re.MULTILINE)
    return {name: value.strip("'") for name, value in found}


def _valid(note: str, source: str) -> JobConfig:
    try:
        return JobConfig.model_validate_json(note)
    except ValidationError as error:
        wrong = f"contains a spec of another version of hp-ext: {error}"
        hint = "import the file with the version that rendered it"
        raise ConfigError([Problem(wrong, source=source, hint=hint)]) from None


def _commands(
    text: str, document: dict[str, Any], report: Report, given: Mapping[str, str], step_options: Sequence[Option]
) -> None:
    """Import the commands of the file into `document`, a spec.

    Exported variables become `env`, the options of srun become fields, and the launcher's command becomes `script` and
    `args`.

    Args:
        given: environment variables with which the file is submitted.
        step_options: options of sbatch that belong to the step in a spec.
    """
    given = _of_folder(given)
    script = read_script(text, report.source, {**set_by_slurm(document), **given})
    for note, line in script.notes:
        report.lost(note, line or 1)
    on_nodes: list[tuple[str, int, str]] = []
    if not script.steps and script.alone and document.get("nodes", 1) == 1 and not script.hidden:
        words, line = script.alone[-1]  # with one node, a Python command without srun counts as the step
        script.steps, script.folders = [(words, line)], [None]
        script.others = [(text, at) for text, at in script.others if at != line]
    for name, (value, line) in script.exports.items():
        if name.startswith("HPX_") and name not in SETTINGS:
            report.lost(f"export {name}: the launcher sets it", line)
        elif not at_run_time(value):
            document.setdefault("env", {})[name] = value
        elif "\n" in value or "[" in value or "RANDOM" in value:
            report.lost(f"export {name}={shown(value)}: is evaluated by bash when the job runs", line)
        else:
            quoted = value.replace('"', '\\"') if "$(" not in value else value
            document["slurm"].setdefault("setup", []).append(f'export {name}="{quoted}"')
            on_nodes.append((name, line, value))
    before = document.setdefault("overlay", {}).setdefault("slurm", {}).setdefault("before", [])
    for words in script.prepare:
        # a failed line of `before` stops the job, but a failed line of an sbatch file only does so with `set -e`
        before.append(shlex.join(words) + ("" if script.strict else " || true"))
    prepared = environment_lines(script)
    if (made := environment_of(script, prepared, text)) is not None:
        before.append(made)
    for other, line in script.others:
        if (other, line) not in prepared:
            report.lost(f"{shown(other)}: is not run: a spec has only the step", line)
    for remark, line in script.remarks:
        report.note(remark, line)
    report.unused(script.unused())
    known = {**set_by_slurm(document), **given, **document.get("env", {})}
    steps = [read_step(words, line, known, script.literal) for words, line in script.steps]
    trains = [one for one in steps if one.launch is not None]
    trains = [one for one in trains if one.launch is not None and one.launch.launcher != "python"] or trains
    tasks = document.pop("tasks", None)
    if steps:
        _nodes_of_step((trains or steps)[-1], document, report)
    nodes = document.get("nodes", 1)
    step = trains[-1] if trains else raw_step(steps, script, nodes, tasks, report.source)
    if step.inner is not None and trains:
        for one in step.inner.left_out:
            if not one.endswith(_AS_TEXT):  # the loop over `words` reports sentences with _AS_TEXT
                report.lost(one, step.line)
        for one in step.inner.notes:
            report.note(one, step.line)
        document.setdefault("env", {}).update(step.inner.exports)
        if step.inner.folder is not None:
            document["working_dir"] = step.inner.folder
    if not step.is_srun and nodes > 1:
        report.lost(
            "no srun: the launcher runs only on the first node of the file's job, but on all nodes of the rendered job",
            step.line,
        )
    for other_step in steps:
        if other_step.line < step.line and (earlier := earlier_step(other_step, script)) is not None:
            before.append(earlier)
        elif other_step is not step:
            text = shown(" ".join(other_step.words))
            report.lost(f"{text}: a spec has one step, which is on line {step.line}", other_step.line)
    if step.before:
        report.lost(f"words before srun: {shlex.join(step.before)} are not carried", step.line)
    tasks = tasks_of(step, nodes, tasks)
    named = {name for name, _value in step.options}
    for name, value, line in step_options:
        if name in named:
            report.note(f"--{name}={value}: the step's own value takes precedence", line)
        else:
            srun_option(name, value, document, report, line, given)
    document["slurm"]["auto_resume"] = False
    for name, value in without_replaced(step, nodes, report):
        scaled = of_one_task(name, value, int(tasks) if tasks and tasks.isdecimal() else 1)
        if scaled is None:
            report.lost(f"srun --{name}={value}: one task per node starts the workers", step.line)
            continue
        if scaled != value:
            report.note(
                f"srun --{name}={value}: is {scaled} for the single task of a node that starts {tasks}", step.line
            )
        srun_option(name, scaled, document, report, step.line, given)
    for name, line, value in on_nodes:
        if "image" in document or OWN_OF_NODE.search(value):
            report.lost(f"export {name}: is evaluated on each node, by slurm.setup, not only on the first", line)
    folder = script.folders[steps.index(step)]
    # a job with an image starts in the image's own working directory
    if folder is not None and "image" not in document:
        document.setdefault("working_dir", folder)
    if step.launch is None:
        words = [word if word in script.literal else unescaped(word) for word in step.program]
        document |= {"command": words, "workers_per_node": 1}
        without_ranks(document, report)
        words = [re.sub(r"\\[$`]", "", word) for word in step.program if word not in script.literal]
        if step.inner is not None:  # the shell on each node knows Slurm's variables
            words = [re.sub(r"\$\{?SLURM_\w+\}?", "", word) for word in words]
    else:
        take_launch(step.launch, tasks, document, report, step.line)
        words = [step.launch.script, *step.launch.args, step.launch.interpreter or ""]
    for word in [*words, document.get("image", ""), document.get("working_dir", "")]:
        if at_run_time(word):
            report.lost(
                f"{word}: is evaluated when the job runs, but the spec passes it as text{hint_for(word)}", step.line
            )
    if not before:
        del document["overlay"]["slurm"]["before"]


_AS_TEXT = "is evaluated when the job runs, but the spec passes it as text"


def _nodes_of_step(step: Step, document: dict[str, Any], report: Report) -> None:
    """Set the spec's number of nodes from the step, if the step runs on fewer nodes than the file requests, or the file
    does not set a number."""
    on = step.option("nodes") or ""
    every, each = step.option("ntasks") or "", step.option("ntasks-per-node", "tasks-per-node")
    if not on and "nodes" in document and every.isdecimal() and each is None and int(every) < document["nodes"]:
        on = every  # fewer tasks than nodes leave nodes unused
    some = next((name for name in SOME_NODES if step.option(name) is not None), None)
    if not on.isdecimal() or not int(on) or some is not None or (step.launch is None and "nodes" in document):
        return
    if int(on) < document.get("nodes", 1):
        text = f"the step runs on {on} of the file's {document['nodes']} nodes: nodes is {on}"
        report.lost(text, step.line)
    if "nodes" not in document:
        report.note(f"nodes: is {on}, from the step, because the file does not set it", step.line)
    document["nodes"] = int(on)


def _of_folder(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables `given`, with the folder of the submission as PWD and as SLURM_SUBMIT_DIR.

    If neither variable is given, the folder is unknown, and `given` is returned unchanged.
    """
    folder = given.get("PWD") or given.get("SLURM_SUBMIT_DIR")
    return {**given, "PWD": folder, "SLURM_SUBMIT_DIR": folder} if folder else dict(given)
