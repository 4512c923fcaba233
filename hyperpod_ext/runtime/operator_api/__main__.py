"""`python -m hyperpod_ext.runtime.operator_api [flags] -- train.py [args]`: runs our agent under AWS's operator.

The program is the first process of a pod in a HyperPodPyTorchJob, in place of `hyperpodrun`. The program serves the
operator's requests, and runs this node's agent with the rank and the addresses that it gets by `/start`. The workers'
output goes to the pod's output, as `rank 2 | ...`.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.config.resize import allowed_sizes
from hyperpod_ext.errors import ConflictError, HyperpodExtError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import become_subreaper, kill_descendants
from hyperpod_ext.runtime.agent.__main__ import socket_dir
from hyperpod_ext.runtime.agent.children import ForkServer, MemoryServer, Prepared
from hyperpod_ext.runtime.container_kubernetes import print_logs
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR
from hyperpod_ext.runtime.operator_api.agent_here import AgentHere
from hyperpod_ext.runtime.operator_api.server import OperatorApi, serving
from hyperpod_ext.standard_streams import lose_unwritable_output


def main() -> None:
    lose_unwritable_output()
    arguments = parse(sys.argv[1:])
    run_dir = Path(os.environ.get(ENV_RUN_DIR, "hpx-run"))
    logs = run_dir / "logs"
    make_private_folder(logs)
    try:
        with socket_dir() as private:
            code = _print_and_serve(arguments, run_dir, private)
    except HyperpodExtError as error:
        sys.stderr.write(f"hyperpod_ext: {error}\n")
        code = error.exit_code
    sys.exit(code)


def _print_and_serve(arguments: argparse.Namespace, run_dir: Path, private: Path) -> int:
    config = RuntimeConfig.from_json(os.environ[ENV_RUNTIME]) if ENV_RUNTIME in os.environ else None
    ended = threading.Event()
    printer = threading.Thread(target=print_logs, args=(run_dir / "logs", ended))
    become_subreaper()
    # import now, so that a spare is ready when it gets a rank; fork before any thread starts
    preload = (config or RuntimeConfig(name="job", nodes=1, workers_per_node=1)).restart.preload
    prepared = Prepared(ForkServer(preload, os.environ), MemoryServer(os.environ))
    agent = AgentHere(arguments, run_dir, private, prepared)
    printer.start()
    try:
        return _serve(arguments, agent, _sizes(arguments, config))
    finally:
        kill_descendants(os.getpid())
        ended.set()
        printer.join()


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hyperpod_ext.runtime.operator_api",
        description="Run one pod of a job for AWS's HyperPod training operator, with this project's agent.",
        epilog="example: python -m hyperpod_ext.runtime.operator_api --nnodes 2 --nproc-per-node 8 -- train.py",
    )
    parser.add_argument("--nnodes", type=int, default=1, help="nodes of the job, without spares")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, help="workers on each node")
    parser.add_argument("--rdzv-port", type=int, default=29400, help="port on the first node at which agents meet")
    parser.add_argument(
        "--server-host", default="0.0.0.0", help="address at which to serve the operator; `::` for IPv6"
    )
    parser.add_argument("--server-port", type=int, default=8080, help="port at which to serve the operator")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_network,
        metavar="NETWORK",
        help="network that may send orders, such as 10.1.0.0/16; repeatable; default: the first sender",
    )
    parser.add_argument("script", help="training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(argv)


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _serve(arguments: argparse.Namespace, agent: AgentHere, sizes: Collection[int]) -> int:
    """Serve the operator until the pod must end. Returns the exit code of the pod's first process."""
    api = OperatorApi(agent, arguments.nnodes, arguments.allow, sizes)
    host, port = arguments.server_host, arguments.server_port
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serving(api, host, port))
        except OSError as error:
            hint = "Pods of two jobs cannot share a node's network: remove kubernetes.host_network, or use other nodes."
            why = os.strerror(error.errno or 0)
            raise ConflictError(f"cannot serve the operator at {host}:{port}: {why}", hint=hint) from None
        return agent.run(api)


def _sizes(arguments: argparse.Namespace, config: RuntimeConfig | None) -> tuple[int, ...]:
    """Return the numbers of nodes with which an elastic job may run; empty if the job is not elastic."""
    if config is None or config.elastic is None:
        return ()
    return allowed_sizes(config.elastic, arguments.nnodes, arguments.nproc_per_node, config.global_batch_size)


if __name__ == "__main__":
    main()
