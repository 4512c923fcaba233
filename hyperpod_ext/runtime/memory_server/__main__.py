"""Run one node's memory server, which serves workers on a Unix socket, or scripts written for AWS's client over HTTP.

python -m hyperpod_ext.runtime.memory_server --socket PATH --parent PID
python -m hyperpod_ext.runtime.memory_server --socket PATH --lock PATH --idle-exit-s SECONDS
python -m hyperpod_ext.runtime.memory_server --listen HOST:PORT --managed-tier-api
python -m hyperpod_ext.runtime.memory_server --orders DESCRIPTOR --parent PID

The first form (`--socket` with `--parent`) serves the workers of an agent, and ends when the agent ends. The second
form (`--idle-exit-s`) is started by a training script that has no agent, and serves successive runs of the job, with
any world size. With `--idle-exit-s`, the server ends once no process has been connected to it for SECONDS. The third
form (`--managed-tier-api`) serves scripts that use AWS's client. The fourth form (`--orders`) imports modules, and then
waits until the agent sends the arguments of the first form through the pipe DESCRIPTOR.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.processes import die_with_parent, wait_readable
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.memory_server.client.start import EVENTS
from hyperpod_ext.runtime.memory_server.event_log import NodeEventLog
from hyperpod_ext.runtime.memory_server.idle_exit import IdleExit
from hyperpod_ext.runtime.memory_server.node_numbers import NodeNumbers
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import own_group
from hyperpod_ext.runtime.memory_server.server import Server
from hyperpod_ext.runtime.memory_server.slots.host_memory import usable_bytes
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.standard_streams import lose_unwritable_output

_PROG = "python -m hyperpod_ext.runtime.memory_server"
_API, _ORDERS = "--managed-tier-api", "--orders"
_LATER = ("awscrt.checksums", "cryptography.hazmat.primitives.ciphers")
"""Modules that a server started with `--orders` imports in advance, because they are otherwise imported only at their
first use."""


def main() -> None:
    lose_unwritable_output()
    if _ORDERS in sys.argv:
        _wait_for_orders()
    try:
        _serve_api() if _API in sys.argv else _serve_workers()
    except HyperpodExtError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def _wait_for_orders() -> None:
    """Import the modules that a memory server needs, then read the server's arguments and environment, which the agent
    (the parent process) writes as JSON to a pipe. If the agent closes the pipe without writing, no server is needed,
    and this process ends."""
    parser = argparse.ArgumentParser(prog=_PROG)
    parser.add_argument(_ORDERS, type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    _ignore_signals(argparse.Namespace(parent=arguments.parent, idle_exit_s=None))
    waits = not wait_readable(arguments.orders, 0)
    # if the arguments have already arrived, importing modules in advance would only delay the server's start
    for module in _LATER if waits else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with os.fdopen(arguments.orders) as orders:
        text = orders.read()
    if not text:
        sys.exit(0)
    order = json.loads(text)
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = [sys.argv[0], *order["arguments"]]


def _serve_api() -> None:
    from hyperpod_ext.runtime.memory_server.managed_tier.serve import add_arguments, serve

    parser = _parser()
    parser.add_argument(_API, action="store_true", help="serve the HTTP API of AWS's managed tiered checkpointing")
    add_arguments(parser)
    serve(_parse(parser))


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__, formatter_class=shape)
    parser.add_argument("--parent", type=int, help="process id; when that process ends, this server ends, too")
    return parser


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    return arguments


def _serve_workers() -> None:
    parser = _parser()
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--later", type=Path, help="second path, to which another process may rename the socket")
    parser.add_argument("--node", type=int, default=0, help="number of this node")
    parser.add_argument(_API, action="store_true", help="serve AWS's client; add --help to list the options for that")
    parser.add_argument("--idle-exit-s", type=float, help="end after this many seconds without a client; needs --lock")
    parser.add_argument("--lock", type=Path, help="lock file, held while a process starts, finds or ends this server")
    arguments = _parse(parser)
    if (arguments.idle_exit_s is None) != (arguments.lock is None):
        parser.error("--idle-exit-s and --lock must be given together")
    _ignore_signals(arguments)
    config = RuntimeConfig.model_validate_json(os.environ[ENV_RUNTIME])
    memory = NodeMemory(
        config.checkpoint,
        job=config.name,
        secret=read_secret(Path(os.environ[ENV_SECRET_FILE])),
        node=arguments.node,
        nodes=config.nodes,
        owners=config.workers_per_node,
        usable_bytes=usable_bytes,
        most_nodes=config.most_nodes,
        group=own_group(),
        encrypted=config.encrypted,
    )
    if arguments.lock and (memory.uploaders or config.metrics is not None):
        store = next((each.checkpoints.store for each in memory.uploaders if not each.tier.on_node), None)
        directory, secret = arguments.socket.with_suffix(EVENTS), read_secret(Path(os.environ[ENV_SECRET_FILE]))
        memory.event_log = NodeEventLog(directory, store, lambda: memory.number, NodeNumbers(config, store, secret))
    idle_exit = IdleExit(arguments.socket, arguments.lock, arguments.idle_exit_s) if arguments.lock else None
    Server(arguments.socket, memory, config, idle_exit, arguments.later).serve()


def _ignore_signals(arguments: argparse.Namespace) -> None:
    """Ignore signals that a terminal or a scheduler sends to every process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C and stops this process
    # ignore the SIGTERM that Slurm sends to all processes of a job step: snapshots must still be uploaded
    if arguments.parent is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # keep running when the terminal in which training was started is closed
    if arguments.idle_exit_s is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


if __name__ == "__main__":
    main()
