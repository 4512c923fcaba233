"""Hands a plan to its target: exactly the files that were shown."""

from __future__ import annotations

from hyperpod_ext.launch.handle import JobHandle
from hyperpod_ext.launch.plan import Plan
from hyperpod_ext.launch.render import check_shell
from hyperpod_ext.launch.targets import get_target


def submit(plan: Plan) -> JobHandle:
    """Start the job.

    Raises:
        ConflictError: its name, or a port it must have, is in use.
    """
    for name, text in plan.files.items():
        if name.endswith(".sh"):
            check_shell(name, text)
    return get_target(plan.target).submit(plan)
