"""Waiting for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 100.0
"""After so long a test fails. It is never what is tested: a busy machine takes many times as long as a quiet one."""


def until(condition: Callable[[], Any], what: str | Callable[[], str] = "it did not come to that") -> Any:
    """Look until `condition` gives something true, and return that; `what` is said where it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.005)
    return found
