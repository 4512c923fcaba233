"""`python -m hyperpod_ext.runtime.agent [flags] -- script.py [args]`: run one node of a job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.config.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.agent.coordinator import write_report
from hyperpod_ext.runtime.agent.node import Node, NodeSettings
from hyperpod_ext.runtime.agent.preflight import check_node
from hyperpod_ext.runtime.environment import ENV_CHAOS, ENV_RUN_DIR, ENV_SECRET_FILE, ENV_SOCKET_DIR, read_secret
from hyperpod_ext.runtime.goodput import make_report

_EXIT_CODES = {"succeeded": 0, "failed": JobFailedError.exit_code, "cancelled": 130}


def main() -> None:
    arguments = _parse(sys.argv[1:])
    run_dir = Path(os.environ.get(ENV_RUN_DIR, "hpx-run"))
    run_dir.mkdir(parents=True, exist_ok=True)
    if arguments.node_rank == 0:
        (run_dir / "report.json").unlink(missing_ok=True)  # of an earlier run in the same place
    with _socket_dir() as private:
        try:
            state = _run(arguments, run_dir, private)
        except HyperpodExtError as error:
            print(f"hyperpod_ext agent, node {arguments.node_rank}: {error}", file=sys.stderr)  # noqa: T201
            if arguments.node_rank == 0 and not (run_dir / "report.json").exists():
                world_size = arguments.nnodes * arguments.nproc_per_node
                write_report(run_dir, make_report([], state="failed", error=error.to_json(), world_size=world_size))
            sys.exit(error.exit_code)
    sys.exit(_EXIT_CODES[state])


@contextlib.contextmanager
def _socket_dir() -> Iterator[Path]:
    """Private directory for sockets: the one we are given, or one of our own that goes with us."""
    if ENV_SOCKET_DIR in os.environ:
        yield Path(os.environ[ENV_SOCKET_DIR])
        return
    with tempfile.TemporaryDirectory(prefix="hpx-") as private:
        yield Path(private)


def _run(arguments: argparse.Namespace, run_dir: Path, private: Path) -> str:
    config = _config(arguments)
    check_node(config, Path(arguments.script))
    if ENV_SECRET_FILE in os.environ:
        secret_file = Path(os.environ[ENV_SECRET_FILE])
    elif arguments.nnodes == 1 and not config.checkpoint.durable():
        secret_file = private / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))
    else:
        raise JobFailedError(
            f"{ENV_SECRET_FILE} is not set; several nodes, and checkpoints that outlive them, need the job's secret",
            hint="Write at least 16 random bytes to a file of mode 600, the same on every node and at every start.",
        )
    host, _, port = arguments.rdzv_endpoint.rpartition(":")
    settings = NodeSettings(
        config=config,
        node=arguments.node_rank,
        host=host,
        port=int(port),
        argv=[arguments.script, *arguments.script_args],
        run_dir=run_dir,
        socket_dir=private,
        secret_file=secret_file,
        secret=read_secret(secret_file),
        chaos=os.environ.get(ENV_CHAOS) != "off",
        join_timeout_s=arguments.rdzv_timeout,
    )

    async def run() -> str:
        return await Node(settings).run()

    return asyncio.run(run())


def _config(arguments: argparse.Namespace) -> RuntimeConfig:
    """The job's settings, or defaults for a script started by hand; flags that contradict them are refused."""
    shape = {"nodes": arguments.nnodes, "workers_per_node": arguments.nproc_per_node}
    if ENV_RUNTIME not in os.environ:
        return RuntimeConfig(name="job", **shape)
    config = RuntimeConfig.model_validate_json(os.environ[ENV_RUNTIME])
    if os.environ.get(ENV_CHAOS) == "off":  # the run to compare with: it begins from nothing, and leaves nothing
        passing = tuple(tier for tier in config.checkpoint.tiers if not isinstance(tier, DurableTier))
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"tiers": passing})})
    if (config.nodes, config.workers_per_node) != tuple(shape.values()):
        raise JobFailedError(
            f"--nnodes {arguments.nnodes} --nproc-per-node {arguments.nproc_per_node} contradicts {ENV_RUNTIME}, "
            f"which says {config.nodes} nodes of {config.workers_per_node} workers"
        )
    return config


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hyperpod_ext.runtime.agent", description=__doc__)
    parser.add_argument("--nnodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, help="workers on each node")
    parser.add_argument("--node-rank", "--node_rank", type=int, default=0, help="number of this node, from 0")
    parser.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", default="127.0.0.1:29400", metavar="HOST:PORT", help="where node 0 is"
    )
    parser.add_argument(
        "--rdzv-timeout", type=float, default=600.0, metavar="SECONDS", help="how long to look for node 0"
    )
    parser.add_argument("script", help="training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
