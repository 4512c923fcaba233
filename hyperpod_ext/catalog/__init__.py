"""Facts about AWS and Kubernetes, in data files with their sources, and functions that look facts up."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def facts(file: str) -> Any:
    """Return the content of the JSON file `file` in this folder."""
    return json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
