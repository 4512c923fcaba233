"""Reads the settings of an agent from its command line (the flags of torchrun) and from the environment (the job's
settings)."""

from __future__ import annotations

import argparse
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.config.resize import allowed_sizes
from hyperpod_ext.counts import count
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.files import write_atomically
from hyperpod_ext.ports import free_port
from hyperpod_ext.runtime.coordinator.interval_tuner import by_clock
from hyperpod_ext.runtime.detection.preflight import check_node
from hyperpod_ext.runtime.ipc.environment import (
    ENV_AGENT_SOCKET,
    ENV_CHAOS,
    ENV_MEMORY_SOCKET,
    ENV_SECRET_FILE,
    read_secret,
)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """All settings of the agent of one node."""

    config: RuntimeConfig
    node: int
    host: str
    port: int
    argv: list[str]
    """The training script and its arguments."""
    run_dir: Path
    socket_dir: Path
    secret_file: Path
    secret: bytes
    chaos: bool = True
    join_timeout_s: float = 600.0
    rejoin: bool = False
    """Whether this agent replaces a lost agent of a running job."""
    listen: tuple[str, int] | None = None
    """If the HyperPod operator runs the job, the address at which this agent listens for other agents; otherwise None.
    The operator sends this address to all nodes."""
    others: tuple[tuple[str, int], ...] = ()
    """Addresses of a running job's agents, one of which runs the coordinator. If `others` is empty, the agent uses the
    address of node 0."""
    keep_events: bool = False
    """Whether to upload the job's event log to the first durable tier, because the run directory is lost with the
    machine."""

    @property
    def agent_socket(self) -> Path:
        return self.socket_dir / f"node{self.node}.agent"

    @property
    def memory_socket(self) -> Path:
        return self.socket_dir / f"node{self.node}.memory"

    @property
    def next_memory_socket(self) -> Path:
        """Socket of the memory server that will replace the server at `memory_socket`."""
        return self.socket_dir / f"node{self.node}.next"

    def worker_environ(self) -> dict[str, str]:
        """Return the environment variables of the fork server, which every worker inherits. The fork server must have
        workers' variables already, because libraries read some variables on import."""
        environ = {
            **os.environ,
            ENV_RUNTIME: self.config.model_dump_json(),
            ENV_SECRET_FILE: str(self.secret_file),
            ENV_AGENT_SOCKET: str(self.agent_socket),
            ENV_MEMORY_SOCKET: str(self.memory_socket),
        }
        # one thread by default, as with torchrun, because the workers of a node share its cores
        environ.setdefault("OMP_NUM_THREADS", "1")
        if interface := self.config.interface:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                environ.setdefault(variable, interface)
        elif self.host in ("127.0.0.1", "::1", "localhost"):
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environ


def parse(argv: list[str]) -> argparse.Namespace:
    description = "`python -m hyperpod_ext.runtime.agent [flags] -- script.py [args]`: run one node of a job."
    parser = argparse.ArgumentParser(prog="python -m hyperpod_ext.runtime.agent", description=description)
    parser.add_argument(
        "--nnodes",
        type=int,
        default=1,
        help="number of nodes, without spares; for an elastic job, the number of nodes at the start",
    )
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, help="workers on each node")
    parser.add_argument(
        "--node-rank",
        "--node_rank",
        type=int,
        default=0,
        help="number of this node, from 0; a node whose number is nnodes or higher is a spare",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        type=_endpoint,
        default="127.0.0.1:29400",
        metavar="HOST:PORT",
        help="address of node 0; with one node, port 0 selects a free port",
    )
    parser.add_argument(
        "--rdzv-timeout", type=float, default=600.0, metavar="SECONDS", help="maximum time to wait for node 0"
    )
    parser.add_argument(
        "--rejoin",
        action="store_true",
        help="replace a lost node of a running job; --rdzv-endpoint is then the address of the coordinator",
    )
    parser.add_argument(
        "--keep-events",
        action="store_true",
        help="also upload the job's events to its first durable tier: the run directory is lost with this machine",
    )
    parser.add_argument("script", help="training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args(argv)


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host.strip(":") or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.endswith("]")):
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return text


def read_settings(arguments: argparse.Namespace, run_dir: Path, private: Path) -> NodeSettings:
    """Return the settings of this agent.

    Raises:
        JobFailedError: the flags contradict the job's settings, or this node fails a check.
    """
    config = _config(arguments)
    check_node(config, Path(arguments.script))
    if ENV_SECRET_FILE in os.environ:
        secret_file = Path(os.environ[ENV_SECRET_FILE])
    elif arguments.nnodes == 1 and not config.spares and not config.checkpoint.durable():
        secret_file = private / "secret"
        write_atomically(secret_file, secrets.token_hex(32))
    else:
        raise JobFailedError(
            f"{ENV_SECRET_FILE} is not set; several nodes, and checkpoints that outlive them, need the job's secret",
            hint="Write at least 16 random bytes to a file of mode 600, the same on every node and at every start.",
        )
    host, port = _where_node_0_is(arguments)
    return NodeSettings(
        config=config,
        node=arguments.node_rank,
        host=host,
        port=port,
        argv=[arguments.script, *arguments.script_args],
        run_dir=run_dir,
        socket_dir=private,
        secret_file=secret_file,
        secret=read_secret(secret_file),
        chaos=os.environ.get(ENV_CHAOS) != "off",
        join_timeout_s=config.restart.node_wait_s if arguments.rejoin else arguments.rdzv_timeout,
        rejoin=arguments.rejoin,
        keep_events=arguments.keep_events,
    )


def _where_node_0_is(arguments: argparse.Namespace) -> tuple[str, int]:
    host, _, port = arguments.rdzv_endpoint.rpartition(":")
    host = host.strip("[]")  # remove the brackets of an IPv6 address
    if int(port):
        return host, int(port)
    if arguments.nnodes == 1 and not arguments.rejoin:
        # a single node can use any free port, as with torchrun
        return host, free_port(host)
    raise JobFailedError(
        f"--rdzv-endpoint {arguments.rdzv_endpoint}: nodes cannot find each other without a port",
        hint="Give every node the same port, one that is free on node 0.",
    )


def _begun_with(config: RuntimeConfig, elastic: Elastic, existing: int) -> RuntimeConfig:
    """Return the settings of an elastic job that is started on `existing` nodes. Nodes that the chosen job size does
    not need become spares."""
    sizes = allowed_sizes(elastic, config.nodes, config.workers_per_node, config.global_batch_size)
    most = max(existing - config.spares, min(existing, config.nodes))
    if not (fit := [size for size in sizes if size <= most]):
        there, fits = count(existing, "node"), " or ".join(map(str, sizes))
        message = f"{config.name} cannot start on {there} (--nnodes): it needs {fits}"
        raise JobFailedError(message, hint="Start it on more nodes, or lower elastic.min_nodes.")
    return config.model_copy(update={"nodes": max(fit)})


def _config(arguments: argparse.Namespace) -> RuntimeConfig:
    """Return the job's settings from the environment, or default settings if the agent was started by hand.

    Raises:
        JobFailedError: the flags contradict the job's settings.
    """
    shape = {"nodes": arguments.nnodes, "workers_per_node": arguments.nproc_per_node}
    if ENV_RUNTIME not in os.environ:
        return RuntimeConfig(name="job", **shape)
    config = by_clock(RuntimeConfig.from_json(os.environ[ENV_RUNTIME]))
    if os.environ.get(ENV_CHAOS) == "off":
        # no durable tiers, because a reference run must not read or write durable checkpoints
        passing = tuple(tier for tier in config.checkpoint.tiers if not isinstance(tier, DurableTier))
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"tiers": passing})})
    if config.elastic is not None and arguments.nnodes != config.nodes:
        config = _begun_with(config, config.elastic, arguments.nnodes)
        shape["nodes"] = config.nodes
    if (config.nodes, config.workers_per_node) != tuple(shape.values()):
        raise JobFailedError(
            f"--nnodes {arguments.nnodes} --nproc-per-node {arguments.nproc_per_node} contradicts {ENV_RUNTIME}, "
            f"which is for {count(config.nodes, 'node')} of {count(config.workers_per_node, 'worker')}",
            hint=f"Write --nnodes {config.nodes} --nproc-per-node {config.workers_per_node}, or unset {ENV_RUNTIME}.",
        )
    return config
