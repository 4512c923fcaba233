"""Imports a container's command that starts no Python file, as the spec's `command`. Pure.

The rendered job starts the command in the same way as the imported job: once on each node, without a launcher, and with
the environment variables and the port of Kubeflow's operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.how import HOW
from hyperpod_ext.jobs.imports.placeholders import names_in
from hyperpod_ext.jobs.kubernetes.imports.command import REFERENCE, SHELLS, expanded

STARTS_NO_PYTHON = "the command starts no Python file by a launcher"
_OPERATOR_PORT = 23456
"""Default rendezvous port of Kubeflow's operator."""
_PORT_NAME = "pytorchjob-port"
_IN_EVERY_POD = {"HOME", "HOSTNAME", "PATH", "PWD", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "USER"}


def raw_command(container: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a spec for a container whose command starts no Python file.

    Returns None if the rendered job would not start the same command.

    Raises:
        ConfigError: the command has placeholders without a value.
    """
    command = [str(word) for word in container.get("command") or []]
    if not command:
        # a container without a command runs the image's own program, which a spec cannot express
        return None
    words = command + [str(word) for word in container.get("args") or []]
    variables = {str(one.get("name")): one for one in container.get("env") or []}
    known = {name: str(one.get("value", "")) for name, one in variables.items() if not one.get("valueFrom")}
    if any(match[1] in variables.keys() - known.keys() for word in words for match in REFERENCE.finditer(word)):
        return None  # the file lacks the value of a variable in the command
    words = [expanded(word, known) for word in words]
    shell = len(words) > 2 and words[0].rpartition("/")[2] in SHELLS and re.fullmatch("-[a-z]*c", words[1])
    if missing := list(dict.fromkeys(_placeholders(words[2:3] if shell else words, variables.keys(), bool(shell)))):
        text = "the command needs a value for {name}"
        raise ConfigError(
            [Problem(text.format(name=name), path="command", hint=HOW.format(name=name)) for name in missing]
        )
    ports = [one.get("containerPort") for one in container.get("ports") or [] if one.get("name") == _PORT_NAME]
    port = {"port": ports[0] if ports else _OPERATOR_PORT}
    return {"command": words, "mode": "plain", "launched_workers": 1, "rendezvous": port}


def starts_no_python(error: ConfigError) -> bool:
    """Return whether the only problem in `error` is that the command starts no Python file."""
    return [problem.message for problem in error.problems] == [STARTS_NO_PYTHON]


def _placeholders(words: list[str], variables: Any, shell: bool) -> list[str]:
    """Return the names of variables in the command whose values are unknown.

    Args:
        words: words of the command, or the script of a shell.
        variables: names of the container's variables.
        shell: whether a shell runs the words. For a shell, variables that the script sets, or that exist in every pod,
            are not returned.
    """
    text = "\n".join(words)
    assigned = set(re.findall(r"\b(\w+)=|\bfor\s+(\w+)\s+in\b|\bread\s+(?:-\w+\s+)*(\w+)", text)) if shell else set()
    own = {name for names in assigned for name in names}
    allowed = own | set(variables) | _IN_EVERY_POD if shell else set()
    return [
        name for name in names_in(text) if name not in allowed and not name.startswith("PET_") and not name.isdigit()
    ]
