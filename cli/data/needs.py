"""Packages that the data commands need."""

from __future__ import annotations

import importlib.util


def need_packages() -> None:
    """Check that the packages that read and write stores are installed.

    Raises:
        HyperpodExtError: one is missing. The hint has the command that installs it.
    """
    from hyperpod_ext.errors import HyperpodExtError

    if missing := [name for name in ("numpy", "awscrt") if importlib.util.find_spec(name) is None]:
        raise HyperpodExtError(f"{' and '.join(missing)} is not here", hint="pip install 'hyperpod-ext[runtime]'")
