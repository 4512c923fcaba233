"""Writes an agent's last message to the agent's log and, on Kubernetes, to the status of the pod."""

from __future__ import annotations

import contextlib
import os
import sys

from hyperpod_ext.config.last_word import HINT, OF_JOB, OF_NODE

ENV_FILE = "HPX_TERMINATION_LOG"
"""Environment variable with the path of the container's termination log, if the pod does not use the default path."""
_FILE = "/dev/termination-log"
_MOST_BYTES = 4096
"""Maximum size of a termination message on Kubernetes."""


def say(words: str) -> None:
    """Print a message of this agent to stderr."""
    print(f"hyperpod_ext agent, {words}", file=sys.stderr)  # noqa: T201


def of_failed_job(why: str, hint: str) -> str:
    """Return the message about why the job failed, and write it to the pod's status."""
    keep(why, hint)
    return "\n".join(filter(None, (why, hint))) or "the job failed; look for the reason in the coordinator's report"


def keep(message: str, hint: str = "", node: int | None = None) -> None:
    """Write to the pod's status why the job failed or, if `node` is given, why this node had to stop. An empty
    `message` clears the pod's status."""
    head = OF_JOB if node is None else f"{OF_NODE} {node}: "
    text = head + message + (f"{HINT}{hint}" if hint else "") if message else ""
    with contextlib.suppress(OSError):  # the termination log exists only in Kubernetes containers
        descriptor = os.open(os.environ.get(ENV_FILE, _FILE), os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode()[:_MOST_BYTES])
