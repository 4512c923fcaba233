"""Make the environments that tests need beside ours, two at a time: `python tests/support/environments.py`.

What cannot be had here is told; the tests that need it say so again, and under CI they fail.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aws_client_env
import hyperpodrun_env
import s3_server
import sdk_venvs

ALL: dict[str, Callable[[], Any]] = {
    "s3": s3_server.install,
    "moto": lambda: sdk_venvs.install("moto"),
    "hyperpodrun": hyperpodrun_env.install,
    "aws-client": aws_client_env.install,
}
"""Those of `make test`, the slowest first."""


def make(name: str) -> str:
    """What went wrong, if anything did."""
    began = time.monotonic()
    try:
        ALL[name]()
    except Exception as error:  # whatever it is, the other environments are still of use
        return f"{name}: {error}"
    if (took := time.monotonic() - began) > 1:
        sys.stderr.write(f"made the environment {name} in {took:.0f} s\n")
    return ""


def main() -> None:
    with ThreadPoolExecutor(2) as pool:
        for said in filter(None, pool.map(make, sys.argv[1:] or ALL)):
            sys.stderr.write(f"{said}\n")


if __name__ == "__main__":
    main()
