"""Job files that others have published, kept beside the repository and not in it, or where HPX_PUBLIC_JOBS says."""

from __future__ import annotations

import os
from pathlib import Path

_BESIDE = Path(__file__).parents[2].parent / "shared" / "public-jobs"
PUBLIC = Path(os.environ.get("HPX_PUBLIC_JOBS", _BESIDE))
