"""Layouts of images that are known on this node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan

_NEWEST = 64
"""Plans kept though no snapshot has them yet or any more: a rank adds its plan before its first save."""


class Plans:
    """Plans by digest. Tensors that grow give a new one at each save: those that are not in use are dropped, the one
    used longest ago first.

    Args:
        in_use: digests of the plans of snapshots that are held.
    """

    def __init__(self, in_use: Callable[[], Collection[str]] = tuple) -> None:
        self._plans: dict[str, Plan] = {}
        self._in_use = in_use
        self._lock = threading.Lock()

    def add(self, document: dict[str, Any], digest: str) -> Plan:
        """Read and keep a plan.

        Raises:
            CorruptSnapshotError: it is not what its digest says.
        """
        if (known := self.get(digest)) is not None:
            return known
        plan = read_plan(document, digest)
        with self._lock:
            self._plans[digest] = plan
            if len(self._plans) > _NEWEST:
                used = set(self._in_use())
                unused = [digest for digest in self._plans if digest not in used]
                for old in unused[:-_NEWEST]:
                    del self._plans[old]
        return plan

    def get(self, digest: str) -> Plan | None:
        """The plan, if it is known; it counts as used now."""
        with self._lock:
            plan = self._plans.pop(digest, None)
            if plan is not None:
                self._plans[digest] = plan
            return plan

    def __getitem__(self, digest: str) -> Plan:
        plan = self.get(digest)
        if plan is None:
            raise NotFoundError(f"the plan {digest[:12]}… is not known here")
        return plan
