"""Imports a container's command, which is a launcher, or a shell that starts a launcher. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hyperpod_ext.jobs.imports.launch import Launch, parse_launch
from hyperpod_ext.jobs.imports.placeholders import VARIABLE
from hyperpod_ext.jobs.imports.shell import read_script, variables_of_env
from hyperpod_ext.jobs.imports.shell_parts import shown

REFERENCE = re.compile(r"\$\$|\$\((\w+)\)")
"""Pattern of a variable that Kubernetes replaces in a command, `$(NAME)`, or of an escaped dollar, `$$`."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_AT_RUN_TIME = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOSTNAME", "NNODES", "JOB_COMPLETION_INDEX"}
_AT_RUN_TIME |= {"HOME", "PATH", "PWD", "USER"}
"""Variables that operators and images set when the job runs, besides PET_* and SLURM_*, so that the import does not
need their values."""


@dataclass
class Started:
    """The launcher that a command starts, and the other effects of the command."""

    launch: Launch | None
    exports: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    """Folder in which the launcher starts; None if the command does not set it."""
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Names of variables in the command's words whose values are unknown."""


def read_words(words: Sequence[str], known: Mapping[str, str], elsewhere: Collection[str] = ()) -> Started:
    """Parse the words of a container's command.

    Args:
        known: variables of the container with known values.
        elsewhere: names of variables of the container whose values are not in the file, such as values from Secrets.
    """
    given = [expanded(word, known) for word in words]
    if _shell_at(given) is not None:
        started = _of_shell(given, known)
    else:
        variables, given = variables_of_env(given)
        started = Started(parse_launch(given), exports=variables)
        started.missing = list(dict.fromkeys(match[1] or match[3] for one in given for match in VARIABLE.finditer(one)))
    for word in words:
        for name in re.findall(r"(?<!\$)\$\((\w+)\)", word):
            if name in elsewhere:
                started.left_out.append(
                    f"{word[:100]}: Kubernetes would replace {name}, but the spec passes it as text"
                )
    return started


def expanded(text: str, known: Mapping[str, str]) -> str:
    """Replace `$(NAME)` with the value of the container's variable NAME, and `$$` with `$`, as Kubernetes does."""
    return REFERENCE.sub(lambda match: "$" if match[0] == "$$" else known.get(match[1], match[0]), text)


def _shell_at(words: Sequence[str]) -> tuple[int, int] | None:
    """Return the positions of a shell and of its script in the words of a command; None if there is no shell."""
    for start, word in enumerate(words):
        if word.rpartition("/")[2] not in SHELLS:
            continue
        for at in range(start + 1, len(words)):
            if not words[at].startswith("-"):
                break
            if re.fullmatch(r"-[a-z]*c[a-z]*", words[at]) and at + 1 < len(words):
                return start, at + 1 + (words[at + 1] == "--")
    return None


def _of_shell(words: Sequence[str], known: Mapping[str, str]) -> Started:
    """Parse the words of `bash -c SCRIPT NAME ARGS`, possibly with other words before the shell."""
    at = _shell_at(words)
    assert at is not None, "the caller has looked"
    start, script = at
    given = shlex.join(words[script + 2 :])  # skip the first word, which becomes `$0`
    text = re.sub(r"\"?\$[@*]\"?", lambda _match: given, words[script])
    started = _of_script(text, known)
    if start:
        started.left_out.append(f"the words before the shell: {shlex.join(words[:start])}")
    return started


def _begins(words: Sequence[str]) -> bool:
    return parse_launch(words) is not None or _shell_at(words) is not None


def _of_script(text: str, known: Mapping[str, str]) -> Started:
    script = read_script(text, "", known, _begins)
    steps: list[tuple[list[str], int, Started]] = []
    for words, line in script.steps:
        inner = Started(parse_launch(words)) if _shell_at(words) is None else _of_shell(words, known)
        steps.append((words, line, inner))
    trains = [at for at, (_words, _line, one) in enumerate(steps) if one.launch is not None]
    launchers = [at for at in trains if (launch := steps[at][2].launch) is not None and launch.launcher != "python"]
    if not trains:
        return Started(None)
    chosen = (launchers or trains)[-1]
    _words, line, started = steps[chosen]
    launch = started.launch
    not_run = "a line of the shell next to the launcher is not run"
    for name, (value, _line) in script.exports.items():
        if re.search(r"\$[\w({]|`", value):
            started.left_out.append(f"export {name}={value[:80]}: is evaluated when the job runs")
        else:
            started.exports[name] = value
    started.folder = script.folders[chosen] or started.folder
    started.left_out += [f"{not_run}: {shown(other)}" for other, _line in script.others]
    started.notes += [f"of the shell: {remark}" for remark, _line in script.remarks]
    started.notes += [f"{not_run}, and nothing depends on it: {shown(other)}" for other, _line in script.unused()]
    started.left_out += [f"{not_run}: {shlex.join(one)[:100]}" for one in script.prepare]
    others = [words for at, (words, _line, _started) in enumerate(steps) if at != chosen]
    started.left_out += [f"{not_run}: {shlex.join(words)[:100]}" for words in others]
    started.left_out += [f"of the shell: {note}" for note, _line in script.notes]
    if launch is None:
        return started
    if launch.before[:1] == ["exec"]:
        launch.before.pop(0)
    asked = [launch.script, *launch.args, launch.workers or "", *launch.other_options().values()]
    for one in asked:
        names = [match[1] or match[3] for match in VARIABLE.finditer(re.sub(r"\$\([^()]*\)|`[^`]*`", "", one))]
        started.missing += [
            name for name in names if name not in _AT_RUN_TIME and not name.startswith(("PET_", "SLURM"))
        ]
        if re.search(r"\$[\w({]|`", one):
            started.left_out.append(f"{one[:100]}: is evaluated when the job runs, but the spec passes it as text")
    started.missing = list(dict.fromkeys(started.missing))
    return started
