"""The experiments, in the order of their worth: what is unknown and decides most comes first.

`plan.py` runs them; docs/gpu.md has a table of them, which is made from this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from results import Row


@dataclass(frozen=True)
class Experiment(Row):
    """A function `run(lane) -> Figures` of a module in `experiments/`, made in a process of its own."""

    module: str
    limit_s: float
    """After that it is ended, with all that it has started."""
    measures: bool = False
    """Part of `make bench-gpu`."""
    shared: bool = False
    """Its ranks are to be of one node, on lane `multi-rank`."""


PLAN: tuple[Experiment, ...] = (Experiment("E1", "ranks that share a GPU add up", "equal sums", "sums", 90.0),)
