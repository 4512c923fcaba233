"""Calls to AWS whose answer is lost: each is made once, and what another made is not taken for ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import CUT, AwsStandIn, Failure, aws_here
from clusters import EKS, GROUP, LEAST, SLURM, cluster
from training_jobs import S3_TIER, job

from hyperpod_ext.clusters import existing, service
from hyperpod_ext.clusters.changes import update_cluster_request
from hyperpod_ext.errors import ConflictError, UnknownOutcomeError
from hyperpod_ext.jobs.contract import records
from hyperpod_ext.jobs.job_files.job_report import TrainingJobRecord
from hyperpod_ext.jobs.plan import Plan, make_plan
from hyperpod_ext.jobs.sagemaker import client as client_module
from hyperpod_ext.jobs.submit import submit

LOST = {"closed": (CUT, ""), "500": (500, "InternalFailure"), "503": (503, "ServiceUnavailable")}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AwsStandIn]:
    monkeypatch.setattr(client_module, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(client_module, "_LONGEST_DELAY_S", 0.001)
    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("")
    with aws_here(monkeypatch) as state:
        yield state


def plan(folder: Path, **fields: Any) -> Plan:
    return make_plan(job(nodes=2, checkpoint=S3_TIER, **fields), target="sagemaker", source_dir=folder)


def lost(how: str, times: int = 1, done: bool = True) -> Failure:
    status, code = LOST[how]
    return Failure(status, code, times=times, done=done)


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("spec", [LEAST, EKS, SLURM], ids=["least", "eks", "slurm"])
def test_a_cluster_whose_answer_was_lost_is_the_one_created(aws: AwsStandIn, spec: dict[str, Any], how: str) -> None:
    asked = cluster(spec)
    aws.failures["CreateCluster"] = lost(how)
    assert service.create(asked, service.checked_create_request(asked)).endswith("cluster/abcdefghijkl")
    assert (len(aws.clusters), aws.count("CreateCluster")) == (1, 2)


def test_a_cluster_whose_answers_are_all_lost_is_found(aws: AwsStandIn) -> None:
    asked = cluster()
    aws.failures["CreateCluster"] = lost("500", times=99)
    assert service.create(asked, service.checked_create_request(asked)).endswith("cluster/abcdefghijkl")


@pytest.mark.parametrize("fields", [{"instance_groups": [GROUP | {"count": 9}]}, {"tags": {"team": "b"}}])
def test_another_cluster_is_not_taken_for_the_one_whose_answer_was_lost(
    aws: AwsStandIn, fields: dict[str, Any]
) -> None:
    there, asked = cluster(), cluster(**fields)
    service.create(there, service.checked_create_request(there))
    aws.failures["CreateCluster"] = lost("closed", done=False)
    with pytest.raises(ConflictError, match="exists and differs") as caught:
        service.create(asked, service.checked_create_request(asked))
    assert ("InstanceCount: 4 -> 9" in caught.value.message) or ("Tags.team: nothing -> b" in caught.value.message)
    assert "hp-ext cluster describe research" in caught.value.hint


def test_a_cluster_that_is_being_deleted_is_not_taken(aws: AwsStandIn) -> None:
    asked = cluster()
    service.create(asked, service.checked_create_request(asked))
    aws.clusters["research"]["ClusterStatus"] = "Deleting"
    aws.failures["CreateCluster"] = lost("500", done=False)
    with pytest.raises(ConflictError, match="exists, with status Deleting"):
        service.create(asked, service.checked_create_request(asked))


def test_a_cluster_of_which_aws_says_nothing_may_exist(aws: AwsStandIn) -> None:
    asked = cluster()
    aws.failures |= {"CreateCluster": lost("500", times=99), "DescribeCluster": Failure(400, "AccessDeniedException")}
    with pytest.raises(UnknownOutcomeError, match="an earlier attempt may have succeeded") as caught:
        service.create(asked, service.checked_create_request(asked))
    assert "hp-ext cluster list" in caught.value.hint


def test_an_update_and_a_deletion_whose_answers_were_lost_are_done(aws: AwsStandIn) -> None:
    there, asked = cluster(), cluster(instance_groups=[GROUP | {"count": 9}])
    service.create(there, service.checked_create_request(there))
    _, found = service.changes(asked)
    aws.failures["UpdateCluster"] = lost("500", times=99)
    service.update(asked, update_cluster_request(asked, found), "arn", found)
    assert service.changes(asked)[1] == []

    aws.on_DeleteCluster = lambda request: aws.clusters["research"].update(ClusterStatus="Deleting")  # type: ignore[attr-defined]
    aws.failures["DeleteCluster"] = lost("closed", times=99)
    assert existing.delete({"ClusterName": "research"}, "us-west-2").endswith("cluster/abcdefghijkl")


@pytest.mark.parametrize("how", LOST)
def test_a_training_job_whose_answer_was_lost_is_the_one_submitted(aws: AwsStandIn, tmp_path: Path, how: str) -> None:
    aws.failures["CreateTrainingJob"] = lost(how)
    aws.failures["CreateSecret"] = lost(how)
    assert str(submit(plan(tmp_path))) == "sagemaker://us-west-2/tiny-gpt"
    assert (len(aws.jobs), len(aws.secrets)) == (1, 1)
    assert records.recall("sagemaker", "tiny-gpt", TrainingJobRecord)["job_name"] in aws.jobs


def test_another_training_job_is_not_taken_for_the_one_whose_answer_was_lost(aws: AwsStandIn, tmp_path: Path) -> None:
    real = aws.on_CreateTrainingJob

    def of_another(request: dict[str, Any]) -> Any:
        other = json.loads(json.dumps(request))
        other["ResourceConfig"]["InstanceCount"] = 7
        aws.jobs.setdefault(request["TrainingJobName"], other | {"TrainingJobStatus": "InProgress"})
        return real(request)

    aws.on_CreateTrainingJob = of_another  # type: ignore[method-assign]
    aws.failures["CreateTrainingJob"] = lost("500", done=False)
    with pytest.raises(ConflictError, match=r"ResourceConfig\.InstanceCount: 7 -> 2"):
        submit(plan(tmp_path))


def test_a_second_submission_sees_a_job_of_which_nothing_was_known(aws: AwsStandIn, tmp_path: Path) -> None:
    aws.failures["CreateTrainingJob"] = lost("closed", times=5)
    aws.failures["DescribeTrainingJob"] = Failure(500, "InternalFailure", times=5)
    with pytest.raises(UnknownOutcomeError):
        submit(plan(tmp_path))
    with pytest.raises(ConflictError, match="a job named tiny-gpt is running"):
        submit(plan(tmp_path))
    assert len(aws.jobs) == 1
