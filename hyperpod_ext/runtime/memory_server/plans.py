"""Layouts of images that are known on this node."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan


class Plans:
    """Plans by digest."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}

    def add(self, document: dict[str, Any], digest: str) -> Plan:
        """Read and keep a plan.

        Raises:
            CorruptSnapshotError: it is not what its digest says.
        """
        if digest not in self._plans:
            self._plans[digest] = read_plan(document, digest)
        return self._plans[digest]

    def get(self, digest: str) -> Plan | None:
        return self._plans.get(digest)

    def __getitem__(self, digest: str) -> Plan:
        plan = self._plans.get(digest)
        if plan is None:
            raise NotFoundError(f"the plan {digest[:12]}… is not known here")
        return plan
