"""Job files that others have published, kept beside the repository and not in it."""

from __future__ import annotations

from pathlib import Path

PUBLIC = Path(__file__).parents[2].parent / "shared" / "public-jobs"
