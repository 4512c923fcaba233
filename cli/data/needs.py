"""What the commands need from outside, said before they begin."""

from __future__ import annotations

import importlib.util


def need_packages() -> None:
    """Say what is missing on a machine that cannot read or write stores.

    Raises:
        HyperpodExtError: with the command that installs it.
    """
    from hyperpod_ext.errors import HyperpodExtError

    if missing := [name for name in ("numpy", "awscrt") if importlib.util.find_spec(name) is None]:
        raise HyperpodExtError(f"{' and '.join(missing)} is not here", hint="pip install 'hyperpod-ext[runtime]'")
