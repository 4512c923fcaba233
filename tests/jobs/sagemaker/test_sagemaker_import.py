"""CreateTrainingJob requests of others: each member is in the request that the spec renders to, or reported by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.report import Imported
from hyperpod_ext.jobs.sagemaker.request import training_job_request

S3 = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket-a/train", "S3DataDistributionType": "ShardedByS3Key"}
REQUEST: dict[str, Any] = {
    "TrainingJobName": "tiny",
    "RoleArn": "arn:aws:iam::123456789012:role/r",
    "AlgorithmSpecification": {"TrainingImage": "repo/image:1", "TrainingInputMode": "FastFile"},
    "HyperParameters": {
        "sagemaker_program": '"train.py"',
        "sagemaker_submit_directory": '"s3://bucket-a/code.tar.gz"',
        "sagemaker_torch_distributed_enabled": "true",
        "lr": "0.001",
    },
    "InputDataConfig": [
        {"ChannelName": "plain", "DataSource": {"S3DataSource": S3}},
        {"ChannelName": "piped", "DataSource": {"S3DataSource": S3}, "InputMode": "Pipe"},
        {"ChannelName": "shuffled", "DataSource": {"S3DataSource": S3}, "ShuffleConfig": {"Seed": 7}},
        {
            "ChannelName": "records",
            "DataSource": {
                "S3DataSource": S3
                | {"S3DataType": "AugmentedManifestFile", "AttributeNames": ["a"], "InstanceGroupNames": ["g"]}
            },
            "InputMode": "Pipe",
            "RecordWrapperType": "RecordIO",
        },
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://bucket-a/out"},
    "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 4, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    "ExperimentConfig": {"ExperimentName": "e", "TrialComponentDisplayName": "shown"},
    "ProfilerConfig": {"S3OutputPath": "s3://bucket-a/prof", "ProfilingIntervalInMilliseconds": 500},
    "ProfilerRuleConfigurations": [{"RuleConfigurationName": "r", "RuleEvaluatorImage": "repo/rules:1"}],
    "Environment": {"A": "b"},
}


def read(**changed: Any) -> Imported:
    return import_file(json.dumps(REQUEST | changed, indent=1), "request.json")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for name, below in items:
        name = below["ChannelName"] if isinstance(below, dict) and "ChannelName" in below else name
        yield from leaves(below, f"{path}.{name}".lstrip("."))


def test_each_member_is_rendered_again_or_reported_with_its_line() -> None:
    found = read()
    rendered = dict(leaves(training_job_request(found.job, "tiny")))
    said = "\n".join([*found.left_out, *found.notes])
    assert json.loads(rendered.pop("HyperParameters.lr")) == "0.001"  # an argument, which is a text
    asked = dict(leaves(REQUEST))
    del asked["HyperParameters.lr"]
    missing = [path for path, value in asked.items() if rendered.get(path) != value and f"{path}:" not in said]
    assert missing == []
    assert [one.partition(": ")[0] for one in found.left_out] == ["request.json:84"]  # where the profile goes
    assert found.job.workers_per_node == 8


def test_channels_have_the_mode_of_the_job_and_keep_members_that_a_spec_lacks() -> None:
    job = read().job
    modes = {name: one.mode for name, one in job.sagemaker.channels.items() if one.kind == "s3"}
    assert modes == {"plain": "FastFile", "piped": "Pipe"}
    channels = {one["ChannelName"]: one for one in job.overlay.sagemaker.request["InputDataConfig"]}
    assert channels["shuffled"]["InputMode"] == "FastFile"
    assert channels["records"] == REQUEST["InputDataConfig"][3]
    without = copy.deepcopy(REQUEST["AlgorithmSpecification"]) | {"TrainingInputMode": "File"}
    assert read(AlgorithmSpecification=without).job.sagemaker.channels["plain"].mode == "File"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name",
    [
        "sagemaker_distributed_dataparallel_enabled",
        "sagemaker_mpi_enabled",
        "sagemaker_pytorch_ddp_enabled",
        "sagemaker_parameter_server_enabled",
    ],
)
def test_another_way_to_start_processes_is_refused_by_name(name: str) -> None:
    values = REQUEST["HyperParameters"] | {name: "true"}
    with pytest.raises(ConfigError, match=rf"request.json:\d+: HyperParameters.{name}: .* starts the processes"):
        read(HyperParameters=values)
    found = read(HyperParameters=values | {name: "false"})
    assert found.job.workers_per_node == 8


def test_a_job_without_a_distribution_is_reported_first() -> None:
    values = {name: value for name, value in REQUEST["HyperParameters"].items() if "torch" not in name}
    found = read(HyperParameters=values)
    assert "so the image starts one process on each node, without ranks" in found.left_out[0]


def test_hyperparameters_of_sagemaker_that_nothing_reads_are_reported() -> None:
    values = REQUEST["HyperParameters"] | {"sagemaker_s3_output": '"s3://bucket-a/x"'}
    assert "HyperParameters.sagemaker_s3_output: is not carried" in "\n".join(read(HyperParameters=values).left_out)


def test_a_member_that_an_overlay_refuses_takes_no_other_with_it() -> None:
    algorithm = REQUEST["AlgorithmSpecification"] | {
        "ContainerEntrypoint": ["x"],
        "EnableSageMakerMetricsTimeSeries": True,
    }
    found = read(AlgorithmSpecification=algorithm)
    assert found.job.overlay.sagemaker.request["AlgorithmSpecification"] == {"EnableSageMakerMetricsTimeSeries": True}
    assert "AlgorithmSpecification.ContainerEntrypoint.0: is not carried" in "\n".join(found.left_out)


def test_values_that_are_the_defaults_stay_written() -> None:
    written = read(EnableManagedSpotTraining=False).written()["sagemaker"]
    assert (written["spot"], written["volume_gib"]) == (False, 30)


def test_a_request_with_tabs_and_a_repeated_member_is_read_with_its_lines() -> None:
    text = json.dumps(REQUEST, indent="\t").replace(
        '{\n\t"TrainingJobName"', '{\n\t"Extra": 1,\n\t"Extra": 2,\n\t"TrainingJobName"'
    )
    named = "\n".join(import_file(text, "request.json").left_out)
    assert "request.json:3: Extra: is written twice" in named
