"""Facts about AWS and Kubernetes as data files, each with its source, and look-ups in them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def facts(file: str) -> Any:
    """Return the content of a data file of this package."""
    return json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
