"""A job's events as lines that tell what happens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LONGEST_LINE = 160


class Story:
    """Remembers how far each run is, and says what is worth saying."""

    def __init__(self, run: str = "main") -> None:
        self._begin(run)

    def _begin(self, run: str) -> None:
        self.run = run
        self.step = 0
        self.of: int | None = None
        self.loss: float | None = None
        self._faulty = False

    def tell(self, event: Mapping[str, Any]) -> list[str]:
        """Take in one event; returns the lines to show for it."""
        lines = []
        if event["run"] != self.run:
            self._begin(event["run"])
            lines.append("the same job once more, undisturbed, to compare with")
        match event["event"]:
            case "job_started":
                lines.append(f"starting {event.get('world_size', '?')} ranks on {event.get('nodes', '?')} nodes")
            case "step":
                self._take_step(event)
            case "fault":
                self._faulty = True
                what = "is gone" if event.get("died", True) else "failed"
                lines.append(f"rank {event['rank']} {what} in step {event['step']}: {_first_line(event['cause'])}")
            case "memory_lost":
                what = f"node {event['node']}: {_first_line(event['cause'])}"
                lines.append(f"{what}; another one is started, and training goes on")
            case "node_lost":
                lines.append(f"node {event['node']} is lost: {_first_line(event['cause'])}")
            case "node_replaced":
                ranks = ", ".join(str(rank) for rank in event["ranks"])
                lines.append(f"node {event['node']} takes ranks {ranks}")
            case "awaiting_node":
                lines.append(
                    f"no spare is left; waiting {event['seconds']:g} s for another node in place of {event['node']}"
                )
            case "coordinator":
                lines.append(f"node {event['node']} coordinates the job from here on")
            case "go" if self._faulty:
                self._faulty = False
                lines.append(f"recovered: all ranks go on after step {event['step']}")
            case "resize_begun":
                lines.append(f"on its way from {event['of']} to {event['nodes']} nodes")
            case "resize_refused":
                lines.append(f"the number of nodes stays as it is: {_first_line(event['why'])}")
            case "resized":
                lines.append(
                    f"goes on with {event['nodes']} nodes instead of {event['of']} after step {event['step']}, "
                    f"{event['pause_s']:.2f} s without a step"
                )
            case "homecoming" if event["step"] is not None:
                lines.append(f"step {event['step']} goes to the durable tiers")
            case "draining":
                lines += _still_to_come(event)
            case "restore_failed":
                lines.append(f"rank {event['rank']} could not restore, the next source is tried: {event['error']}")
        return lines

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self.of = event.get("of") or self.of
        if event["step"] >= self.step:
            self.step = event["step"]
            self.loss = event.get("loss", self.loss)


def _still_to_come(event: Mapping[str, Any]) -> list[str]:
    """A line for each tier that lacks something of the last step."""
    lines = []
    for tier in event["tiers"]:
        if not tier["arrived"]:
            what = (
                f"{tier['left_bytes'] / (1 << 20):.1f} MiB are still to come" if tier["left_ranks"] else "all is sent"
            )
            left = f"for {event['seconds_left']:.0f} s at most"
            lines.append(f"node {event['node']} brings its part to {tier['tier']}, {left}: {what}")
    return lines


def _first_line(cause: str) -> str:
    line = cause.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..."
