"""One recovery of NVRx's in-process restart and of torchft: the same training, the same kill, their own ways."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path

from checkpoint.peers import environment
from recovery_report import NVRX, TORCHFT, Recovery, Stamp, nvrx_recovery, torchft_recovery
from recovery_sides import Setup, SideError, kill_when_due, last_words, read_attempts, running, wait

GLOO_TIMEOUT_S = 10.0
"""Of NVRx's side, as its example for CPUs has it: gloo cannot be aborted, so survivors wait it out."""
LIGHTHOUSE = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
"""Of torchft, as its documentation starts it."""


@dataclass(frozen=True)
class Peer:
    name: str
    """Of its environment in checkpoint/pins.txt."""
    about: str


PEERS = {
    NVRX: Peer(
        "nvrx",
        "the script uses `inprocess.Wrapper` with its defaults. The gloo timeout is {timeout:g} s, as in the example "
        "of NVRx for CPUs. The job has one more process than ranks, in reserve. After a kill, surviving processes keep "
        "their model and optimizer objects, and load the state from a DCP checkpoint, which is saved every "
        "{save_every} steps",
    ),
    TORCHFT: Peer(
        "torchft",
        "each rank is a replica group under its own torchrun, with a lighthouse. The settings are those of torchft's "
        "example for DDP: gloo timeout 5 s, heartbeat timeout 5 s, state from a live rank. One part of torchft was "
        "changed so that survivors do not end: the gradient hook of its DDP, which asserts that no all-reduce on the "
        "CPU has failed",
    ),
}


def nvrx_command(setup: Setup, folder: str = "FOLDER") -> list[str]:
    options = ["--ranks", str(setup.job.world_size), "--gloo-timeout", f"{GLOO_TIMEOUT_S:g}"]
    return ["python", "benchmarks/cpu/nvrx_train.py", *setup.arguments(folder), *options]


def torchft_command(setup: Setup, folder: str = "FOLDER") -> list[str]:
    command = ["torchrun", "--standalone", "--nproc-per-node", "1", "--max-restarts", "3"]
    command += ["benchmarks/cpu/torchft_train.py", *setup.arguments(folder)]
    return [*command, "--ranks", str(setup.job.world_size)]


def measure_nvrx(setup: Setup, scratch: Path) -> Recovery:
    """Five processes for four ranks; the one in reserve fills the gap."""
    command = [str(environment("nvrx").python), *nvrx_command(setup, str(scratch))[1:]]
    size = setup.job.world_size + 1
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports(3)), "WORLD_SIZE": str(size)}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(running(command, scratch, {**base, "RANK": str(number), "LOCAL_RANK": str(number)}))
            for number in range(size)
        ]
        target = setup.kill_rank
        kill_t = kill_when_due(setup, scratch / f"process{target}.jsonl", processes[target], scratch)
        for number, process in enumerate(processes):
            if number != target:
                wait(process, scratch)
    calls: dict[int, dict[int, list[Stamp]]] = {}
    for file in scratch.glob("process*.jsonl"):
        into: list[Stamp] = []
        for line in file.read_text().splitlines():
            if (stamp := json.loads(line))["event"] == "called":
                into = calls.setdefault(stamp["iteration"], {}).setdefault(stamp["rank"], [])
            into.append(stamp)
    if sorted(calls) != [0, 1]:
        raise SideError(f"NVRx called the function {len(calls)} times where two were wanted\n{last_words(scratch)}")
    return nvrx_recovery(calls[0], calls[1], kill_t, setup.kill_step)


def measure_torchft(setup: Setup, scratch: Path) -> Recovery:
    """A replica group for each rank; the dead one's torchrun starts it again."""
    python = environment("torchft").python
    command = [str(python), "-m", "torch.distributed.run", *torchft_command(setup, str(scratch))[1:]]
    port = _free_ports(1)
    lighthouse = [str(python.with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}", *LIGHTHOUSE]
    env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    with running(lighthouse, scratch, {}), contextlib.ExitStack() as stack:
        processes = [
            # its managers meet in the store that torchrun shares
            stack.enter_context(
                running(command, scratch, {**env, "REPLICA_GROUP_ID": str(rank)}, _NOT_SHARED),
            )
            for rank in range(setup.job.world_size)
        ]
        stamps = scratch / f"rank{setup.kill_rank}.attempt0.jsonl"
        kill_t = kill_when_due(setup, stamps, processes[setup.kill_rank], scratch)
        for process in processes:
            wait(process, scratch)
    attempts = read_attempts(scratch)
    if sorted(attempts) != [0, 1] or list(attempts[1]) != [setup.kill_rank]:
        raise SideError(f"torchft: attempts {attempts.keys()}\n{last_words(scratch)}")
    return torchft_recovery(attempts[0], attempts[1][setup.kill_rank], kill_t, setup.kill_step)


_NOT_SHARED = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE",)


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with contextlib.ExitStack() as probes:
            first = int(probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
            try:
                for port in range(first + 1, first + count):
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return first
