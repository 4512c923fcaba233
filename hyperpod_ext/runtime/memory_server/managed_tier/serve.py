"""Starts the HTTP API of the managed tier, and defines its command-line arguments, which other commands include."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hyperpod_ext.errors import ConflictError
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.memory_server.managed_tier.api import ApiServer, holders_of
from hyperpod_ext.runtime.memory_server.managed_tier.blobs import Blobs
from hyperpod_ext.runtime.memory_server.slots.host_memory import usable_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments that `serve` needs, except `--parent`, which the caller adds."""
    parser.add_argument(
        "--listen", required=True, type=_address, metavar="HOST:PORT", help="AWS's client connects to port 9200"
    )
    parser.add_argument("--budget-mib", type=_positive, help="memory for all blobs; default: the node's free memory")
    parser.add_argument("--open-reset", action="store_true", help="let anybody reset everything, as AWS's API does")


def serve(arguments: argparse.Namespace) -> NoReturn:
    """Serve the HTTP API until this process ends."""
    host, port = arguments.listen
    budget = None if arguments.budget_mib is None else arguments.budget_mib << 20
    blobs = Blobs(budget=budget, usable_bytes=usable_bytes)
    try:
        server = ApiServer(host, port, blobs, _may_reset(arguments.open_reset))
    except OSError as error:
        raise ConflictError(f"cannot listen on {host} port {port}: {error}") from error
    shown = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"AWS's managed tier API is served on http://{shown}:{server.server_address[1]}\n")
    server.serve_forever()
    raise AssertionError("serve_forever returned")


def _may_reset(anybody: bool) -> Callable[[str], bool]:
    """Return a function that checks the token of requests that delete everything. Without a secret in this process, the
    function refuses every token."""
    if anybody:
        return lambda _: True
    secret_file = os.environ.get(ENV_SECRET_FILE)
    return holders_of(read_secret(Path(secret_file))) if secret_file else lambda _: False


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
