"""Missing Python packages, and the command that installs them."""

from __future__ import annotations

import importlib.util

_EXTRAS = {"awscrt": "runtime", "cryptography": "runtime", "numpy": "runtime", "boto3": "s3", "pyarrow": "arrow"}
"""The pip extra of this project that installs a package, by the name of the package."""


def missing_packages(*names: str) -> tuple[str, str] | None:
    """Return the names of the missing packages with their verb, such as `torch is`, and the command that installs all
    of them. None if no package is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    extras = ",".join(dict.fromkeys(_EXTRAS[name] for name in missing if name in _EXTRAS))
    others = [name for name in missing if name not in _EXTRAS]
    command = " ".join(["pip install", *others, *([f"'hyperpod-ext[{extras}]'"] if extras else [])])
    return f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'}", command
