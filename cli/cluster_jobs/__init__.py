"""Commands for one job on a cluster: describe, exec, port-forward and delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperpod_ext.jobs.contract.handle import JobHandle


def check_exists(handle: JobHandle) -> None:
    """Check that a local job exists. Without this check, the error for a missing job would be about the job's target.

    Raises:
        NotFoundError: there is no local job with this name.
    """
    from hyperpod_ext.jobs.local.store import find

    if handle.target == "local":
        find(handle.name)


def run(command: Sequence[str]) -> int:
    """Run a command on this machine, connected to this terminal, and return its exit code.

    Raises:
        UnreachableError: the program is not installed on this machine.
    """
    import subprocess

    from hyperpod_ext.errors import UnreachableError

    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        hint = "install it; or use --dry-run, and run the shown command on another machine"
        raise UnreachableError(f"{command[0]} is not installed on this machine", hint=hint) from None
