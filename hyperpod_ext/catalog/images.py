"""Container images that AWS publishes, by region."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("images.json")


@functools.cache
def _images() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text())
    return found


def checkpointless_image(region: str) -> str | None:
    """AWS's checkpointless container in `region`, or None where AWS names none."""
    known = _images()["checkpointless"]
    account = known["accounts"].get(region)
    if account is None:
        return None
    return f"{account}.dkr.ecr.{region}.amazonaws.com/{known['repository']}:{known['tag']}"


def checkpointless_regions() -> list[str]:
    """Regions that have it."""
    return sorted(_images()["checkpointless"]["accounts"])


def region_of(image: str) -> str | None:
    """The region of an ECR registry that `image` comes from, or None for other registries."""
    host = image.partition("/")[0]
    parts = host.split(".")
    return parts[3] if len(parts) >= 6 and parts[1:3] == ["dkr", "ecr"] else None
