"""The network between nodes is cut and healed: each node in a network namespace of its own, on one bridge."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import events

from hyperpod_ext.processes import descendants, is_alive

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LONG = {"HPX_TEST_STEPS": "100000", "HPX_TEST_SECONDS": "0.02"}
LEASE_S = 6.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Names of three namespaces with addresses 10.78.0.1 to .3; the host's end of the link of the first is hpxp0."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"hpxp{node}" for node in range(3)]
    with Path("/tmp/hpx-netns.lock").open("w") as lock:  # the names are the whole machine's
        fcntl.flock(lock, fcntl.LOCK_EX)
        _take_down(names)
        try:
            ip("link", "add", "hpxpbr", "type", "bridge")
            ip("link", "set", "hpxpbr", "up")
            for node, name in enumerate(names):
                ip("netns", "add", name)
                ip("link", "add", name, "type", "veth", "peer", "name", "hpxin", "netns", name)
                ip("link", "set", name, "master", "hpxpbr", "up")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "hpxin", "up")
                ip("-n", name, "addr", "add", f"10.78.0.{node + 1}/24", "dev", "hpxin")
        except subprocess.CalledProcessError as error:
            _take_down(names)
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        try:
            yield names
        finally:
            _take_down(names)


def _take_down(names: list[str]) -> None:
    for words in (*(["link", "del", name] for name in [*names, "hpxpbr"]), *(["netns", "del", name] for name in names)):
        subprocess.run(["ip", *words], check=False, capture_output=True)


@pytest.mark.parametrize(
    ("node", "cut_s"), [(1, 8), (0, 30), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((0, 8), (1, 30)))]
)
def test_the_minority_stops_within_its_lease_and_the_majority_goes_on(job, network, tmp_path, node, cut_s):
    place = tmp_path / "checkpoints"
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(place), "every_steps": 50, "keep": 1000}]
    running = job(
        spares=1,
        host="10.78.0.1",
        port=29555,
        namespaces=network,
        env={"HPX_TEST_NORM": "LayerNorm", **LONG, "GLOO_SOCKET_IFNAME": "hpxin"},
        settings={"checkpoint": {"tiers": tiers}, "restart": {"lease_s": LEASE_S}},
    ).start()
    running.until("imported", node=2)
    running.until("step", step=60)
    pids = [running.agents[node].pid, *descendants(running.agents[node].pid)]
    ip("link", "set", network[node], "down")
    cut = time.monotonic()
    try:
        assert running.agents[node].wait() == 7
        stopped = time.monotonic() - cut
        assert not any(is_alive(pid) for pid in pids if pid != running.agents[node].pid)
        while len(events(running, "go")) < 2:
            time.sleep(0.05)
        went_on = events(running, "go")[-1]
        time.sleep(max(0.0, cut + cut_s - time.monotonic()))
    finally:
        ip("link", "set", network[node], "up")
    healed = events(running, "step")[-1]["step"]
    running.until("step", step=healed + 100)
    running.stop()
    print(f"node {node} stopped {stopped:.2f} s after the cut; the others went on after {went_on['t'] - cut:.2f} s")
    assert "no majority" in (running.folder / f"node{node}.log").read_text()
    assert [its["node"] for its in events(running, "coordinator")] == ([1] if node == 0 else [])
    _assert_one_history(place)


def _assert_one_history(place: Path) -> None:
    """Every step has one manifest at most, and later steps are of the same or a later generation."""
    found = []
    for manifest in place.glob("*/step-*/manifest.json"):
        match = re.fullmatch(r"step-(\d+)-g(\d+)", manifest.parent.name)
        assert match is not None
        found.append((int(match[1]), int(match[2])))
    steps = sorted(found)
    assert len(steps) > 2
    assert len({step for step, _ in steps}) == len(steps)
    generations = [generation for _, generation in steps]
    assert generations == sorted(generations)
    assert len(set(generations)) == 2
