"""`python -m hyperpod_ext.runtime.memory_server --socket PATH`: run one node's memory server."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from hyperpod_ext.config.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.environment import ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.memory_server.capacity import usable_bytes
from hyperpod_ext.runtime.memory_server.regions import Regions
from hyperpod_ext.runtime.memory_server.server import Server


def main() -> None:
    parser = argparse.ArgumentParser(prog="hyperpod_ext.runtime.memory_server", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--parent", type=int, help="process id to die with; its memory goes with it")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's business; it stops us
    config = RuntimeConfig.model_validate_json(os.environ[ENV_RUNTIME])
    tier = config.checkpoint.memory()
    budget = tier.budget_mib << 20 if tier is not None and tier.budget_mib is not None else None
    secret = read_secret(Path(os.environ[ENV_SECRET_FILE]))
    regions = Regions(job=config.name, secret=secret, budget=budget, usable_bytes=usable_bytes)
    Server(arguments.socket, regions).serve()


if __name__ == "__main__":
    main()
