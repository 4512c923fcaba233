"""The saved state of a sampler: a few numbers, which are checked when the state is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.mixing import Segment, quotas_of
from hyperpod_ext.runtime.data.positions import Cursor

VERSION = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """The fields of a sampler's saved state. Some fields must match the sampler that loads the state."""

    order: str
    seed: int
    fingerprint: str
    cursor: Cursor
    asked_batch: tuple[int, int]
    """Global batch size and micro-batch size that the script passed as arguments."""
    batch: tuple[int, int]
    """Global batch size and micro-batch size when the state was saved. The script may change these sizes during the
    run."""
    asked_weights: tuple[float, ...] | None
    segment: Segment | None
    length: int | None
    """Number of samples in an epoch. The length is not saved, because the fingerprint contains the length."""

    def to_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "v": VERSION,
            "order": self.order,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "epoch": self.cursor.epoch,
            "place": self.cursor.place,
            "step": self.cursor.step,
            "batch": [*self.asked_batch, *self.batch],
        }
        if self.segment is not None:
            state["mix"] = {
                "asked": list(self.asked_weights or ()),
                "weights": list(self.segment.weights),
                "start": self.segment.start,
                "drawn": list(self.segment.drawn),
            }
        return state

    def check_same(self, here: Saved) -> None:
        """Raise JobFailedError unless this saved state has the same samples, in the same order, as the present state
        `here`."""
        if self.fingerprint != here.fingerprint:
            raise JobFailedError(
                f"the samples are not those of the saved run: fingerprint {here.fingerprint}, saved "
                f"{self.fingerprint} (each ends with the number of samples)",
                hint="Restore the data of the saved run, or start a new run.",
            )
        for name, then, now in (
            ("order (of shuffle)", self.order, here.order),
            ("seed", self.seed, here.seed),
            ("mixture", self.segment is not None, here.segment is not None),
        ):
            if then != now:
                raise JobFailedError(
                    f"{name} is {now!r} here and {then!r} in the saved run: samples would repeat, others be left out",
                    hint="Use the value of the saved run, or start a new run.",
                )
        if here.length is not None and self.cursor.place > here.length:
            raise damaged(f"place {self.cursor.place} is beyond the {here.length} samples")
        if self.segment is not None and here.segment is not None:
            if len(self.segment.weights) != len(here.segment.weights):
                raise damaged(f"{len(self.segment.weights)} weights for {len(here.segment.weights)} sources")
            if self.cursor.place < self.segment.start:
                raise damaged(f"place {self.cursor.place} before the segment at {self.segment.start}")


def read_state(state: Any) -> Saved:
    """Parse a saved state, and check it as far as possible without the sampler that loads it.

    Raises:
        JobFailedError: `state` is not the state of a sampler, or has another format version.
    """
    if not isinstance(state, dict) or "v" not in state:
        raise damaged("it is not the state of an elastic sampler")
    if state["v"] != VERSION:
        raise JobFailedError(
            f"data position: saved in format {state['v']!r}, but this version reads {VERSION}",
            hint="Continue with the version of hyperpod_ext that saved it.",
        )
    batch = _numbers(state, "batch")
    if len(batch) != 4 or 0 in batch:
        raise damaged(f"batch is {batch}")
    segment = asked = None
    if "mix" in state:
        mix = state["mix"]
        if not isinstance(mix, dict):
            raise damaged("mix is not a table")
        asked, weights = _weights(mix, "asked"), _weights(mix, "weights")
        segment = Segment(_number(mix, "start"), weights, tuple(_numbers(mix, "drawn")))
        if not len(segment.drawn) == len(weights) == len(asked):
            raise damaged("mix has lists of different lengths")
        quotas_of(weights)
    return Saved(
        order=_text(state, "order"),
        seed=_number(state, "seed"),
        fingerprint=_text(state, "fingerprint"),
        cursor=Cursor(_number(state, "epoch"), _number(state, "place"), _number(state, "step")),
        asked_batch=(batch[0], batch[1]),
        batch=(batch[2], batch[3]),
        asked_weights=asked,
        segment=segment,
        length=None,
    )


def damaged(what: str) -> JobFailedError:
    """Return the error for an invalid saved state."""
    return JobFailedError(
        f"data position cannot be read: {what}",
        hint="Pass a dict that state_dict() returned, or load an earlier checkpoint.",
    )


def _number(state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise damaged(f"{name} is {value!r}")
    return value


def _numbers(state: dict[str, Any], name: str) -> list[int]:
    values = state.get(name)
    if not isinstance(values, list | tuple) or any(type(value) is not int or value < 0 for value in values):
        raise damaged(f"{name} is {values!r}")
    return list(values)


def _weights(state: dict[str, Any], name: str) -> tuple[float, ...]:
    values = state.get(name)
    if not isinstance(values, list | tuple) or any(
        not isinstance(value, int | float) or not math.isfinite(value) for value in values
    ):
        raise damaged(f"{name} is {values!r}")
    return tuple(float(value) for value in values)


def _text(state: dict[str, Any], name: str) -> str:
    value = state.get(name)
    if not isinstance(value, str):
        raise damaged(f"{name} is {value!r}")
    return value
