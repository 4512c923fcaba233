"""Versions of torch and of trainers with which recovery from faults was tested.

docs/compatibility.md and docs/integrations.md list these versions."""

from __future__ import annotations

import functools
import os
import re
import sys

TRIED = {
    "accelerate": ("1.15", "1.15"),
    "deepspeed": ("0.19", "0.19"),
    "lightning": ("2.6", "2.6"),
    "torch": ("2.6", "2.15"),
    "transformers": ("5.23", "5.23"),
}
"""Oldest and newest tested version of each package, without the patch number."""


@functools.cache
def warn_if_untried(package: str, version: str) -> None:
    """Warn once, in rank 0's log, if `version` is older or newer than the tested versions in `TRIED`."""
    oldest, newest = TRIED[package]
    if os.environ.get("RANK", "0") != "0" or _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        return
    tried = f"{package} {oldest}" if oldest == newest else f"{package} {oldest} to {newest}"
    sys.stderr.write(
        f"hyperpod_ext: warning: {package} {version} was not tested; recovery was tested with {tried}. Before a "
        "long job, run a short one by `hp-ext create-job --kill rank=0@step=5`, and compare its losses with those of a "
        "run without a fault.\n"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: 2 and 16 for `2.16.0a0+git`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
