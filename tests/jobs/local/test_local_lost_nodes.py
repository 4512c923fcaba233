"""What the local engine does about nodes that die: shell stands in for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ext.jobs.local.result import EMPTY_REPORT, NodeEnd, final_report

RUN = """
import json, sys
from pathlib import Path
from hyperpod_ext.jobs.local.nodes import Cancellation, GracePeriod, NodeCommand, run_nodes
patience, scripts = json.loads(sys.argv[2]), sys.argv[3:]
nodes = [NodeCommand(("sh", "-c", script), {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1]) / f"{n}.log")
         for n, script in enumerate(scripts)]
print(json.dumps(run_nodes(nodes, Cancellation(), GracePeriod(after_failure_s=0.3, after_asking_s=60.0, **patience))))
"""
DIES = "kill -9 $$"
DIES_ONCE = "[ ${HPX_REJOIN:-no} = 1 ] || kill -9 $$; : >back"
UNTIL_IT_IS_BACK = "until [ -e back ]; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("scripts", "patience", "codes"),
    [
        ([DIES, "sleep 0.7", "sleep 0.7"], {"needed": 2}, [-9, 0, 0]),  # a spare is left: nobody is asked to end
        ([DIES, DIES, "exec sleep 600"], {"needed": 2}, [-9, -9, -15]),
        ([DIES_ONCE, UNTIL_IT_IS_BACK], {"restarts": 1}, [0, 0]),
        ([DIES, "exec sleep 600"], {"restarts": 2}, [-9, -15]),
        (["exit 3", "exec sleep 600"], {"restarts": 2}, [3, -15]),  # it ended by itself, and would again
        ([DIES_ONCE, "sleep 0.7", "sleep 0.7"], {"needed": 2, "restarts": 1}, [-9, 0, 0]),
    ],
)
def test_lost_nodes_are_started_again_where_too_few_are_left(
    tmp_path: Path, scripts: list[str], patience: dict[str, int], codes: list[int]
) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path), json.dumps(patience), *scripts]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == codes


def test_a_success_without_a_node_that_the_agents_know_is_lost_is_one() -> None:
    report = EMPTY_REPORT | {"state": "succeeded", "nodes_lost": [1]}
    assert final_report(report, [NodeEnd(1, -9), NodeEnd(0, 0), NodeEnd(2, 0)], False, "")["state"] == "succeeded"
    assert final_report(report, [NodeEnd(1, -9), NodeEnd(2, -9), NodeEnd(0, 0)], False, "")["state"] == "failed"


def test_a_success_without_a_spare_that_died_as_the_job_ended_is_one() -> None:
    report = EMPTY_REPORT | {"state": "succeeded", "spares": [2]}
    assert final_report(report, [NodeEnd(2, -9), NodeEnd(0, 0), NodeEnd(1, 0)], False, "")["state"] == "succeeded"
    ended = final_report(report, [NodeEnd(2, -9), NodeEnd(1, -9), NodeEnd(0, 0)], False, "")
    assert ended["error"]["message"] == "node 1 was killed by SIGKILL (9) after its report"
    failed = report | {"state": "failed", "error": {"code": "JobFailedError", "message": "it is over", "hint": ""}}
    assert "node 2 was killed" in final_report(failed, [NodeEnd(2, -9), NodeEnd(0, 7)], False, "")["error"]["message"]
