"""hp-ext node reboot and replace, over HTTP."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from aws_stand_in import AwsStandIn, Failure, aws_here
from command import Done, call_hp_ext

OPERATIONS = {"reboot": "BatchRebootClusterNodes", "replace": "BatchReplaceClusterNodes"}


def node_id(number: int) -> str:
    return f"i-{number:017x}"


def hp_ext(*arguments: str) -> Done:
    return call_hp_ext("node", *arguments, "--region", "us-west-2")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsStandIn]:
    """A cluster of 30 nodes, of which the last is not Running."""
    with aws_here(monkeypatch) as state:
        for number in range(30):
            state.nodes.append(
                {
                    "ClusterName": "research",
                    "InstanceGroupName": "workers",
                    "InstanceId": node_id(number),
                    "NodeLogicalId": f"workers-{number}",
                    "InstanceType": "ml.p5.48xlarge",
                    "LaunchTime": 1.8e9,
                    "InstanceStatus": {"Status": "Running" if number < 29 else "Pending"},
                    "PrivateDnsHostname": f"ip-10-1-0-{number}.us-west-2.compute.internal",
                }
            )
        yield state


@pytest.mark.parametrize("action", OPERATIONS)
def test_a_node_is_found_by_each_of_its_names_and_asked_for_once(aws: AwsStandIn, action: str) -> None:
    names = [node_id(3), "workers-3", f"hyperpod-{node_id(3)}", "ip-10-1-0-3", node_id(7)]
    done = hp_ext(action, "research", *names, "--yes", "-o", "json")
    assert (done.code, done.json["outcomes"]) == (0, [{"id": node_id(n), "accepted": True} for n in (3, 7)])
    sent = [request for operation, request in aws.calls if operation == OPERATIONS[action]]
    assert sent == [{"ClusterName": "research", "NodeIds": [node_id(3), node_id(7)]}]


@pytest.mark.parametrize("action", OPERATIONS)
def test_a_dry_run_and_no_answer_send_nothing(aws: AwsStandIn, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = hp_ext(action, "research", "workers-3", "--dry-run", "-o", "json")
    assert (dry.code, dry.json["requests"]) == (0, [{"ClusterName": "research", "NodeIds": [node_id(3)]}])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = hp_ext(action, "research", "workers-3", "workers-4")
    assert (asked.code, f"{action.capitalize()} 2 nodes?" in asked.stderr) == (130, True)
    assert aws.count(OPERATIONS[action]) == 0


def test_more_nodes_than_a_request_takes_go_in_several(aws: AwsStandIn) -> None:
    done = hp_ext("reboot", "research", *(node_id(number) for number in range(28)), "--yes", "-o", "json")
    assert [len(request["NodeIds"]) for request in done.json["requests"]] == [25, 3]
    assert (done.code, len(done.json["outcomes"]), aws.count("BatchRebootClusterNodes")) == (0, 28, 2)


def test_a_name_that_is_no_nodes_stops_all(aws: AwsStandIn) -> None:
    told = hp_ext("replace", "research", "workers-3", "worker-4", "--yes")
    assert (told.code, aws.count("BatchReplaceClusterNodes")) == (6, 0)
    assert "research has no node worker-4" in told.stderr
    assert "workers-4" in told.stderr


def test_a_node_that_is_refused_is_named_with_the_reason_and_the_others_go_on(aws: AwsStandIn) -> None:
    done = hp_ext("replace", "research", node_id(29), node_id(3), "--yes", "-o", "json")
    outcomes = {one["id"]: one["accepted"] for one in done.json["outcomes"]}
    assert (done.code, outcomes) == (5, {node_id(3): True, node_id(29): False})
    assert "refused: InvalidInstanceStatus" in hp_ext("replace", "research", node_id(29), "--yes").stdout


def test_who_may_not_is_told_so(aws: AwsStandIn) -> None:
    aws.failures["BatchRebootClusterNodes"] = Failure(400, "AccessDeniedException")
    assert hp_ext("reboot", "research", node_id(3), "--yes").code == 4
