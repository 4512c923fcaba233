"""Serve AWS's managed tier API: `python -m hyperpod_ext.runtime.memory_server.managed_tier --listen HOST:PORT`."""

from __future__ import annotations

import argparse

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.memory_server.managed_tier.serve import add_arguments, serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="hyperpod_ext.runtime.memory_server.managed_tier", description=__doc__)
    add_arguments(parser)
    try:
        serve(parser.parse_args())
    except HyperpodExtError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
