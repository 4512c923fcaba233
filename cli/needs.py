"""Packages that commands need."""

from __future__ import annotations

import importlib.util


def need_packages(*names: str) -> None:
    """Check that packages of the runtime are installed.

    Raises:
        HyperpodExtError: a package is missing. The hint has the command that installs it.
    """
    from hyperpod_ext.errors import HyperpodExtError

    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        message = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
        raise HyperpodExtError(message, hint="pip install 'hyperpod-ext[runtime]'")
