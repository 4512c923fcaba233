"""The numbers of a job that runs, read over HTTP while a rank of it is killed."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HELD = {"HPX_TEST_STEPS": "30", "HPX_TEST_HOLD": "[[1, 0, 16], [2, 0, 24]]"}
SHOWN = {"host": "127.0.0.1", "port": 0}


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def numbers(text: str) -> dict[str, float]:
    return {
        name: float(value) for line in text.splitlines() if line[0] != "#" for name, _, value in [line.rpartition(" ")]
    }


def test_a_kill_is_seen_in_the_numbers_of_the_job_that_goes_on(job: Any) -> None:
    run = job(settings={"metrics": SHOWN}, env=HELD, fault={"what": "after optimizer", "rank": 1, "step": 20}).start()
    port = run.until("metrics_shown")["port"]
    run.until("step", step=15, rank=0)
    before, began = numbers(read(port)), time.time()
    (run.folder / "let-go-16").touch()
    run.until("step", step=22, rank=0)
    after = numbers(read(port))
    assert before['hpx_step{hpx_job="tiny"}'] >= 15
    assert after['hpx_faults_total{hpx_job="tiny",kind="signal",escalation_level="process"}'] == 1
    assert after['hpx_recoveries_total{hpx_job="tiny"}'] == 1
    assert after['hpx_recovery_seconds_count{hpx_job="tiny"}'] == 1
    assert after['hpx_generation{hpx_job="tiny"}'] == 2
    assert (
        began - 1 <= after['hpx_last_step_timestamp_seconds{hpx_job="tiny"}'] <= time.time() + 1
    )  # gauges are rounded
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(port, "/")
    (run.folder / "let-go").touch()
    report = run.wait()
    assert report["state"] == "succeeded"


def test_a_port_that_is_taken_is_told_and_does_not_end_the_job(job: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        run = job(nodes=1, workers_per_node=1, settings={"metrics": SHOWN | {"port": taken}}).start()
        assert run.wait()["state"] == "succeeded"
    assert f"127.0.0.1:{taken}" in run.until("metrics_failed")["cause"]
    assert "set metrics.port to another one" in (run.folder / "node0.log").read_text()
