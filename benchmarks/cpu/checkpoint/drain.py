"""Drain to an S3 that takes bytes as fast as a socket gives them: our memory server beside S3 clients."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from checkpoint.group import BENCH, FAIR, BenchError, Group, Job, Process
from checkpoint.measure import COMPUTE_RATIO, Bench
from checkpoint.systems import MEMCPY, OURS, SYSTEMS, System

CLIENTS = ("raw PUT", "boto3 put_object, unsigned", "boto3 upload_fileobj", "obstore", "s3torchconnector")
_STEPS = 3
"""Of each window of training."""
BUSY_S = 2.0
"""How long a client goes on while the step time beside it is taken."""


def measure_drain(bench: Bench) -> None:
    sys.path.insert(0, str(BENCH.parents[1] / "tests" / "support"))
    sink = importlib.import_module("sink")
    with ExitStack() as stack:
        url = stack.enter_context(sink.running_sink())
        trainer = stack.enter_context(Group(Job(SYSTEMS[MEMCPY], "plain", bench.nbytes, 1), None))
        nbytes = trainer.described[0]["nbytes"]
        bench.tokens = bench.tokens or trainer.ask("calibrate", least_ratio=COMPUTE_RATIO)[0]["tokens"]
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        clients = {}
        for number, name in enumerate(CLIENTS):
            try:
                clients[name] = _client(bench, name, url, nbytes, logs / f"{number}.log")
                stack.callback(clients[name].kill)
            except BenchError as error:
                bench.failed(name, "drain", error)
        ours = _ours(bench, stack, url)
        print(f"drain: {', '.join(clients)}{', and ours' if ours else ''}", file=sys.stderr)
        for number in range(bench.rounds):
            for name, client in _turned(list(clients.items()), number):
                try:
                    _drain_client(bench, trainer, name, client, number, nbytes)
                except BenchError as error:
                    bench.failed(name, "drain", error)
                    del clients[name]
            if ours:
                try:
                    _drain_ours(bench, ours, number, nbytes)
                except BenchError as error:
                    bench.failed(ours.job.system, "drain", error)
                    ours = None


def _turned(items: list[Any], number: int) -> list[Any]:
    cut = number % len(items) if items else 0
    return items[cut:] + items[:cut]


def _client(bench: Bench, name: str, url: str, nbytes: int, log: Path) -> Process:
    environment = bench.environments.get("clients")
    python = sys.executable
    if name != "raw PUT" and environment:
        if environment.failure:
            raise BenchError(f"not installed: {environment.failure}")
        python = str(environment.python)
    settings = {"client": name, "url": url, "nbytes": nbytes, "parent": os.getpid()}
    environ = os.environ | FAIR | {"PYTHONPATH": str(BENCH)}
    process = Process(python, ["-m", "checkpoint.clients", json.dumps(settings)], environ, log)
    try:
        process.answer(time.monotonic() + 60)
    except BenchError:
        process.kill()
        raise
    return process


def _ours(bench: Bench, stack: ExitStack, url: str) -> Group | None:
    found: list[System] = [system for system in bench.systems if system.name == OURS]
    if not found:
        return None
    try:
        group = stack.enter_context(Group(Job(found[0], "plain", bench.nbytes, 1, overlapped=True, sink=url), None))
        group.ask("prepare")
        time.sleep(bench.settle_s)
    except BenchError as error:
        bench.failed(found[0], "drain", error)
        return None
    return group


def _drain_client(bench: Bench, trainer: Group, name: str, client: Process, number: int, nbytes: int) -> None:
    client.ask("put", least_s=0)
    alone = client.answer(time.monotonic() + 120)
    window: dict[str, Any] = {"steps": _STEPS, "tokens": bench.tokens}
    (before,) = trainer.ask("train", **window)
    client.ask("put", least_s=BUSY_S)
    time.sleep(0.1)
    (during,) = trainer.ask("train", **window)
    client.answer(time.monotonic() + 120)
    (after,) = trainer.ask("train", **window)
    _keep(bench, name, number, nbytes, alone["wall"], alone["cpu"], during["wall"], before["wall"] + after["wall"])


def _drain_ours(bench: Bench, group: Group, number: int, nbytes: int) -> None:
    """Its CPU time is that of its servers and of the trainer, from the call to the end of the drain."""
    cpu = group.ask_host("cpu")["seconds"]
    (alone,) = group.ask("drain", step=10 * number + 1)
    cpu = group.ask_host("cpu")["seconds"] - cpu + alone["cpu"]
    window: dict[str, Any] = {"steps": _STEPS, "tokens": bench.tokens}
    (before,) = group.ask("train", **window)
    (during,) = group.ask("train", **window, save_steps=[0], first_save=10 * number + 2)
    (after,) = group.ask("train", **window)
    _keep(bench, OURS, number, nbytes, alone["wall"], cpu, during["wall"], before["wall"] + after["wall"])


def _keep(
    bench: Bench, name: str, number: int, nbytes: int, wall: float, cpu: float, during: list[float], quiet: list[float]
) -> None:
    middle = sorted(quiet)[len(quiet) // 2]
    found = {
        "seconds": wall,
        "gb_per_s": nbytes / wall / 1e9,
        "cpu_s": cpu,
        "cpu_s_per_gb": cpu / nbytes * 1e9,
        "step_ratio": sum(during) / len(during) / middle,
    }
    bench.keep("drain", "plain", name, number, **found)
