"""The values that `hp-ext top` shows, from a job's meters. The values are computed where `hp-ext` runs, or in the pod
that counts events."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.runtime.metrics.meters import Meters


def summary(meters: Meters) -> dict[str, Any]:
    """Return the values of one job as a JSON object. Values that are not known yet are null."""
    took = [rank.step_s for rank in meters.ranks.values() if rank.step_s is not None]
    step_s = max(took, default=None)
    step, of = meters.step, meters.of
    left = None if of is None or step is None or step_s is None else (of - step) * step_s
    return {
        "state": meters.state,
        "step": step,
        "of": of,
        "loss": meters.loss,
        "step_s": None if step_s is None else round(step_s, 4),
        "left_s": None if left is None else round(left, 1),
        "goodput": None if meters.goodput is None else round(meters.goodput, 4),
        "world_size": meters.world_size,
        "nodes": meters.nodes,
        "generation": meters.generation,
        "faults": meters.faults.total(),
        "recoveries": meters.recoveries,
        "steps_lost": meters.steps_lost,
        "nodes_lost": meters.nodes_lost,
        "seconds": {phase: round(seconds, 3) for phase, seconds in meters.seconds.items()},
        "tiers": {tier: {"newest_step": newest} for tier, newest in sorted(meters.tiers.items())},
        "ranks": [
            {
                "rank": rank,
                "node": now.node,
                "phase": now.phase,
                "step": now.step,
                "step_s": None if now.step_s is None else round(now.step_s, 4),
            }
            for rank, now in sorted(meters.ranks.items())
        ],
    }
