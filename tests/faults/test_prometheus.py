"""A real Prometheus scrapes a job that loses a rank; what the dashboard and the alert rules ask for is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus import program, prometheus

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

OBSERVABILITY = Path(__file__).parents[2] / "templates" / "observability"
SILENT = {"Steps that a tier is behind"}
"""Panels that a job without tiers beside memory has nothing for."""


@pytest.fixture(scope="module")
def promtool() -> str:
    return program("promtool")


def test_the_alert_rules_are_whole_and_fire_when_they_should(promtool: str) -> None:
    for command in (["check", "config", "prometheus.yaml"], ["test", "rules", "alerts.test.yaml"]):
        done = subprocess.run([promtool, *command], cwd=OBSERVABILITY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_is_scraped_while_it_loses_a_rank(job: Any, promtool: str, tmp_path: Path) -> None:
    run = job(
        settings={"metrics": {"host": "127.0.0.1", "port": 0}},
        env={"HPX_TEST_STEPS": "100000", "HPX_TEST_SECONDS": "0.02"},
    ).start()
    target = f"127.0.0.1:{run.until('metrics_shown')['port']}"
    with prometheus(tmp_path / "prometheus", OBSERVABILITY / "alerts.yaml", target) as found:
        assert found.until("up == 1")[0][0]["job"] == "hyperpod_ext"
        # it tells how fast a counter rises from two samples: one must have been taken before the fault
        assert found.until("hpx_recovery_seconds_count")[0][1] == 0
        os.kill(run.until("joined", rank=1)["pid"], signal.SIGKILL)
        labels, count = found.until("hpx_faults_total > 0")[0]
        assert (labels["hpx_job"], count) == ("tiny", 1)
        assert (labels["kind"], labels["escalation_level"]) == ("signal", "process")
        ((_, earlier),) = found.until("hpx_step")
        found.until(f"hpx_step > {earlier}")
        found.until("rate(hpx_recovery_seconds_count[1h]) > 0")
        found.until("rate(hpx_steps_total[5s]) > 0")
        dashboard = json.loads((OBSERVABILITY / "dashboard.json").read_text())
        for panel in dashboard["panels"]:
            for asked in panel["targets"]:
                expression = asked["expr"].replace("$hpx_job", "tiny").replace("$__rate_interval", "5s")
                assert found.query(expression) or panel["title"] in SILENT, expression
        rules = [rule for group in found.get("rules")["groups"] for rule in group["rules"]]
        assert [rule["health"] for rule in rules] == ["ok"] * 8
    with urllib.request.urlopen(f"http://{target}/metrics") as answer:
        checked = subprocess.run([promtool, "check", "metrics"], input=answer.read(), capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
