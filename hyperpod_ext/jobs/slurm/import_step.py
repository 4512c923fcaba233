"""Parses the step of an sbatch file, the command that starts workers: the options of srun, and its program. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.how import HOW
from hyperpod_ext.jobs.imports.launch import Launch, launcher_in, parse_launch
from hyperpod_ext.jobs.imports.placeholders import names_in
from hyperpod_ext.jobs.imports.shell_values import Script
from hyperpod_ext.jobs.kubernetes.imports.command import SHELLS, Started, read_words
from hyperpod_ext.jobs.slurm.import_options import SHORT

_SHORT = SHORT | {"E": "preserve-env", "K": "kill-on-bad-exit", "X": "disable-status"}
_SHORT |= {"l": "label", "r": "relative", "u": "unbuffered"}
"""Long name of each short option of srun. srun and sbatch share most short options."""
_FLAGS = {"label", "unbuffered", "exclusive", "overlap", "kill-on-bad-exit", "verbose", "pty", "quiet", "overcommit"}
_FLAGS |= {"no-kill", "oversubscribe", "disable-status", "preserve-env", "contiguous", "spread-job", "exact"}
_FLAGS |= {
    "use-min-nodes",
    "multi-prog",
    "test-only",
    "hold",
    "reboot",
    "immediate",
    "interactive",
    "external-launcher",
}
_FLAGS |= {"no-container-mount-home", "container-mount-home", "no-container-remap-root", "container-remap-root"}
_FLAGS |= {"container-writable", "container-readonly", "container-entrypoint", "no-container-entrypoint"}
"""Options of srun and of its plugin pyxis that have no value, or have a value only after `=`."""
_STARTED_BY = {"exec", "time", "command"}
"""Words before srun that have no effect on the program that srun starts."""
SOME_NODES = ("nodelist", "exclude", "relative", "multi-prog", "het-group", "nodefile")
_MPI = re.compile(r"(?:^|[\s;&|/])(mpirun|mpiexec)\b")


@dataclass
class Step:
    """A command of an sbatch file that starts workers, split into its parts."""

    words: list[str]
    line: int
    options: list[tuple[str, str]] = field(default_factory=list)
    """Options of srun: each long name without leading dashes, with the option's value."""
    program: list[str] = field(default_factory=list)
    """Words of the program that srun starts."""
    before: list[str] = field(default_factory=list)
    """Words of the command before srun."""
    launch: Launch | None = None
    inner: Started | None = None
    """Content of the shell command, such as `bash -c`, that srun starts and that starts the launcher; None if srun
    starts no shell."""

    @property
    def is_srun(self) -> bool:
        """Whether the command is started by srun, and so runs on all nodes of the step."""
        return any(word.rpartition("/")[2] == "srun" for word in self.words)

    def option(self, *names: str) -> str | None:
        """Return the value of the last option of srun that has one of `names`; None if there is none."""
        return next((value for name, value in reversed(self.options) if name in names), None)

    def shown(self) -> str:
        """Return the beginning of the command in one line."""
        return " ".join(" ".join(self.words).split())[:80]


def read_step(words: list[str], line: int, known: Mapping[str, str], literal: Collection[str] = ()) -> Step:
    """Parse the words of a step: the options of srun, and the launcher's command after them.

    Args:
        line: line of the step in the file.
        known: environment variables in each task.
        literal: words that are in single quotes in the file.
    """
    rest, step = list(words), Step(words, line)
    if step.is_srun:
        while rest[0].rpartition("/")[2] != "srun":
            step.before.append(rest.pop(0))
        step.before = [word for word in step.before if word not in _STARTED_BY]
        rest.pop(0)
        _take_options(rest, step.options)
    step.program = rest
    plain = [word if word in literal else unescaped(word) for word in rest]
    if (launch := parse_launch(plain)) is not None or not any(word.rpartition("/")[2] in SHELLS for word in rest[:1]):
        step.launch = launch
        return step
    # srun starts a shell in each task, which expands escaped variables to the values in the task
    step.inner = read_words([word.replace("\\$", "$") for word in rest], known)
    step.launch = step.inner.launch
    return step


def unescaped(word: str) -> str:
    """Return `word` without the backslashes that escape `$`, a backtick or a backslash within double quotes."""
    return re.sub(r"\\([$`\\])", lambda match: match[1], word)


def _take_options(rest: list[str], options: list[tuple[str, str]]) -> None:
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")  # old manuals write underscores in options
        else:
            name, equals, value = _SHORT.get(word[1], word[1]), word[2:], word[2:].removeprefix("=")
            if name in _FLAGS and name != "kill-on-bad-exit" and value:  # a word such as -lu combines two options
                rest.insert(0, f"-{value}")
                value = ""
        if not equals and name not in _FLAGS and rest:
            value = rest.pop(0)
        options.append((name, value))


def raw_step(steps: Sequence[Step], script: Script, nodes: int, tasks: str | None, source: str) -> Step:
    """Return the file's only step, which starts no Python file, if the field `command` of a spec can express it.

    A spec's `command` runs as one task on each node.

    Args:
        steps: steps of the file, none of which starts a Python file.
        nodes: number of nodes of the job.
        tasks: tasks per node in the file's options; None if the file does not set them.
        source: name of the file for messages.

    Raises:
        ConfigError: the file has no step or several steps, or `command` cannot express the step.
    """
    if not steps or script.hidden:
        raise _no_step(script, nodes, source)
    step = steps[-1]
    if (launcher := launcher_in(step.program)) is not None and (missing := _unset_names(step.program)):
        what = f"{launcher} starts an unknown file: its command uses ${{name}}, which the sbatch file does not set"
        raise ConfigError(
            [
                Problem(what.format(name=name), source=source, line=step.line, hint=HOW.format(name=name))
                for name in missing
            ]
        )
    count = tasks_of(step, nodes, tasks)
    some = next((name for name in SOME_NODES if step.option(name) is not None), None)
    on = step.option("nodes")
    all_tasks = step.option("ntasks")
    if step.is_srun and not some and count not in (None, "1") and (module := _module(step.program)) is not None:
        step.launch = module
        return step
    shown = step.shown()
    if not step.is_srun or not step.program:
        why = f"the step `{shown}` starts no Python file"
    elif len(steps) > 1:
        shown = "; ".join(one.shown() for one in steps)
        why = f"none of the {len(steps)} steps ({shown}) starts a Python file, and a spec has only one command"
    elif count not in (None, "1"):
        why = f"`{shown}` starts {count} tasks on each node, but a spec's command starts once on each node"
    elif (on is not None and on != str(nodes)) or (all_tasks is not None and all_tasks != str(nodes)) or some:
        which = f"--nodes={on}" if on is not None else f"--ntasks={all_tasks}" if all_tasks is not None else f"--{some}"
        why = f"`{shown}` has {which}, but a spec's command starts once on each of the {nodes} nodes"
    else:
        return step
    hint = "run the file with sbatch as before, or write a spec with a script or a command"
    raise ConfigError([Problem(why, source=source, line=step.line, hint=hint)])


def _unset_names(words: Sequence[str]) -> list[str]:
    """Return the names of the variables in `words` whose values are unknown, except variables that Slurm sets."""
    text = re.sub(r"\$\([^()]*\)|`[^`]*`", "", " ".join(words))
    return [name for name in dict.fromkeys(names_in(text)) if not name.startswith("SLURM")]


def tasks_of(step: Step, nodes: int, of_file: str | None) -> str | None:
    """Return the number of tasks per node: from the step if the step sets it, otherwise from the file's options.

    Args:
        nodes: number of nodes of the job.
        of_file: tasks per node in the file's options; None if the file does not set them.
    """
    if (found := step.option("ntasks-per-node", "tasks-per-node")) is not None:
        return found
    found = step.option("ntasks")
    if found is not None and found.isdecimal() and int(found) and int(found) % nodes == 0:
        return str(int(found) // nodes)
    return of_file


def _module(words: Sequence[str]) -> Launch | None:
    """Parse `python -m package`, which each task of srun starts; return None for other commands."""
    if len(words) < 3 or not re.fullmatch(r"python[0-9.]*", words[0].rpartition("/")[2]):
        return None
    at = 2 if words[1] == "-u" else 1
    if words[at] != "-m" or len(words) < at + 2:
        return None
    return Launch(
        "python", words[at + 1], list(words[at + 2 :]), program=words[0], is_module=True, is_unbuffered=at == 2
    )


def _no_step(script: Script, nodes: int, source: str) -> ConfigError:
    hint = "run the file with sbatch as before; import reads files that train with srun or a launcher"
    for text, line in script.hidden:
        message = (
            f"a step is in a statement that import cannot follow, such as a loop: {text.strip().splitlines()[0][:80]}"
        )
        hint = "move the step out of it, with literal values, or write a spec"
        return ConfigError([Problem(message, source=source, line=line, hint=hint)])
    for text, line in script.others:
        if found := _MPI.search(text):
            message = f"{found[1]} starts all processes from the first node, but a spec's command runs on each node"
            return ConfigError([Problem(message, source=source, line=line, hint=hint)])
    if script.alone:
        words, line = script.alone[-1]
        message = f"{' '.join(words)[:80]} runs only on the first of {nodes} nodes"
        hint = "write srun before it, or --nodes=1"
        return ConfigError([Problem(message, source=source, line=line, hint=hint)])
    first = next((text.strip().splitlines()[0][:80] for text, _line in script.others if text.strip()), "")
    line = script.others[0][1] if script.others else 1
    message = "has no step with srun or a launcher" + (f", only commands for the first node: {first}" if first else "")
    return ConfigError([Problem(message, source=source, line=line, hint=hint)])
