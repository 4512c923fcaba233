"""The layouts (plans) of the snapshots that this node stores or receives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan

_NEWEST = 64
"""Number of unused plans (plans of no snapshot on this node) to keep. A rank adds its plan before its first save, so a
new plan is unused at first."""


class Plans:
    """Plans (snapshot layouts) by digest. A tensor that grows causes a new plan at each save, so the least recently
    used plans that belong to no snapshot are dropped.

    Args:
        in_use: returns the digests of the plans that snapshots on this node use.
    """

    def __init__(self, in_use: Callable[[], Collection[str]] = tuple) -> None:
        self._plans: dict[str, Plan] = {}
        self._in_use = in_use
        self._lock = threading.Lock()

    def add(self, document: dict[str, Any], digest: str) -> Plan:
        """Parse a plan, and store it under its digest.

        Raises:
            CorruptSnapshotError: the plan does not match its digest.
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
        """Return a plan and mark it as used; None if the plan is unknown."""
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
