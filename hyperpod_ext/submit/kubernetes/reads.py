"""Which parts of a spec become part of a pod."""

from __future__ import annotations

READS = frozenset(
    {
        *("working_dir", "resources", "libraries", "scheduling", "node_groups", "volumes", "relaunch", "timeouts"),
        *("labels", "annotations", "kubernetes"),
    }
)
"""Optional parts of a spec that pods are made from."""
