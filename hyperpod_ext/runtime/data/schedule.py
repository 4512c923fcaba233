"""Learning rates that depend only on the step number, so that a resize or a fault does not change them."""

from __future__ import annotations

import math
from typing import Literal

from hyperpod_ext.errors import JobFailedError


def learning_rate(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    final: float = 0.0,
    shape: Literal["cosine", "linear", "constant"] = "cosine",
) -> float:
    """Return the learning rate of step `step`. Steps are counted from 1 to `total_steps`.

    The learning rate rises to `peak` in `warmup_steps` equal parts, then falls to `final` at step `total_steps`. Later
    steps stay at `final`. With shape "constant", the learning rate stays at `peak` after the warm-up.

    Raises:
        JobFailedError: the step is invalid, or there are more warm-up steps than steps.
    """
    if step < 1 or not 0 <= warmup_steps <= total_steps or shape not in ("cosine", "linear", "constant"):
        raise JobFailedError(
            f"learning_rate: an argument is not valid: step={step}, total_steps={total_steps}, "
            f"warmup_steps={warmup_steps}, shape={shape!r}",
            hint='step must be at least 1, warmup_steps from 0 to total_steps, shape "cosine", "linear" or "constant".',
        )
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if shape == "constant":
        return peak
    falling = total_steps - warmup_steps
    done = min(1.0, (step - warmup_steps) / falling) if falling else 1.0
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return final + (peak - final) * left
