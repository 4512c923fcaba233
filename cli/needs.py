"""Checks that the Python packages that a command needs are installed."""

from __future__ import annotations

import importlib.util


def need_packages(*names: str) -> None:
    """Check that Python packages of the extra `runtime` are installed.

    Raises:
        HyperpodExtError: a package is missing. The error's hint has the command that installs the package.
    """
    from hyperpod_ext.errors import HyperpodExtError

    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        message = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
        raise HyperpodExtError(message, hint="pip install 'hyperpod-ext[runtime]'")
