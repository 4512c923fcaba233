"""An interval of training without faults: when each step ends, and when each snapshot is safe.

The times are computed by arithmetic instead of one event per step, so that simulating a month takes milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hyperpod_ext.runtime.simulator.settings import SimulatedTier
from hyperpod_ext.runtime.snapshot.manifest import save_id_of


@dataclass(frozen=True, slots=True)
class SimulatedSnapshot:
    """The snapshots that all ranks take at one step."""

    step: int
    generation: int
    captured_at: float
    ready_at: float

    @property
    def save_id(self) -> str:
        return save_id_of(self.generation, self.step)


@dataclass(frozen=True, slots=True)
class FaultFreeInterval:
    """An interval of training in one generation, from `step` at time `start` on. All times are in seconds."""

    start: float
    step: int
    generation: int
    step_s: float
    tiers: Mapping[str, SimulatedTier]

    def ends(self, step: int) -> float:
        """Return the time at which `step` and taking its snapshots are done."""
        saving = sum(
            (step // tier.every_steps - self.step // tier.every_steps) * tier.blocked for tier in self.tiers.values()
        )
        return self.start + (step - self.step) * self.step_s + saving

    def newest(self, moment: float) -> int:
        """Return the newest step that is done, including its snapshot, at time `moment`."""
        low, high = self.step, self.step + max(0, int((moment - self.start) / self.step_s)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.ends(middle) <= moment else (low, middle)
        return low

    def blocked(self, until: int) -> float:
        """Return the time in seconds that snapshots took from training, up to the end of step `until`."""
        return self.ends(until) - self.start - (until - self.step) * self.step_s

    def held(self, name: str, moment: float, count: int) -> list[SimulatedSnapshot]:
        """Return the newest snapshots that are safe in a tier at time `moment`, newest first, at most `count`."""
        return [held for held, _ in zip(self._back(self.tiers[name], moment), range(count), strict=False)]

    def captured(self, name: str, moment: float) -> int:
        """Return the number of copies to the tier that were started up to time `moment`."""
        tier = self.tiers[name]
        count = self.newest(moment) // tier.every_steps - self.step // tier.every_steps
        return -(-count // self._stride(tier)) if count > 0 else 0

    def _back(self, tier: SimulatedTier, moment: float) -> Iterator[SimulatedSnapshot]:
        first, stride = self.step // tier.every_steps + 1, self._stride(tier)
        last = self.newest(moment) // tier.every_steps
        for index in range(last - (last - first) % stride, first - 1, -stride):
            captured = self.ends(index * tier.every_steps)
            if captured + tier.latency <= moment:
                yield SimulatedSnapshot(index * tier.every_steps, self.generation, captured, captured + tier.latency)

    def _stride(self, tier: SimulatedTier) -> int:
        """Return n if every n-th due snapshot is copied to the tier: a copy starts only when the previous copy has
        arrived."""
        every = tier.every_steps
        period = every * self.step_s + sum(other.blocked * every / other.every_steps for other in self.tiers.values())
        return max(1, math.ceil(tier.latency / period - 1e-9))
