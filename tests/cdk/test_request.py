"""The cluster in the template is the request that `hp-ext cluster create` would send, member by member."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cdk_app import Templates, kept, new_app, synthesise
from cfn_account import Account, client
from clusters import EKS, GROUP, PLAN, ROLE, ROLLOUT, SLURM, STORAGE, VPC
from deployments import CASES, IMPORTED, deployment
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hyperpod_ext.clusters.bindings import Bindings, Mount, bound
from hyperpod_ext.clusters.deployment import problems
from hyperpod_ext.clusters.request import create_cluster_request
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load
from hyperpod_ext.jobs.sagemaker.strict import check_request

pytestmark = pytest.mark.slow  # the CDK starts node, which takes seconds

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEPLOYED = {name: deployment(CASES[name]) for name in ("eks", "slurm", "least")} | {
    name: load(ClusterConfig, EXAMPLES / name / "cluster.yaml") for name in ("10-cluster-eks", "11-cluster-slurm")
}


def values_of(config: ClusterConfig, account: Account) -> Bindings:
    """What a person would copy out of the account's consoles."""
    outputs = account.outputs(f"{config.name}-storage") | account.outputs(f"{config.name}-cluster")
    subnets = client("ec2").describe_subnets()["Subnets"]
    named = {tag["Value"]: one["SubnetId"] for one in subnets for tag in one.get("Tags", []) if tag["Key"] == "Name"}
    assert config.infrastructure is not None
    zones = config.infrastructure.network.zones
    places = {group: zones.index(zone) + 1 for group, zone in config.infrastructure.network.group_zones.items()}
    roles = {one["Description"]: one["Arn"] for one in client("iam").list_roles()["Roles"] if "Description" in one}
    bucket = outputs.get("LifecycleBucket")
    slurm = config.orchestrator == "slurm"
    return Bindings(
        subnets=tuple(outputs["SubnetIds"].split(",")),
        security_groups=tuple(outputs["SecurityGroupIds"].split(",")),
        group_subnets={group: named[f"{config.name}-Machines{place}"] for group, place in places.items()},
        execution_role=outputs["ExecutionRoleArn"],
        cluster_role=roles.get(f"HyperPod adds and removes machines of {config.name}"),
        eks_cluster_arn=None if slurm else account.outputs(f"{config.name}-eks")["EksClusterArn"],
        mount=Mount(outputs["FileSystemDns"], outputs["FileSystemMount"], "/fsx") if slurm else None,
        lifecycle_source=f"s3://{bucket}/lifecycle" if bucket else None,
        lifecycle_script="on_init_complete.sh" if bucket else None,
    )


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, True) for name in DEPLOYED), ("eks", False), ("slurm", False)], ids=str
)
def test_what_reaches_sagemaker_is_the_request(name: str, scale: bool, account: Account, tmp_path: Path) -> None:
    config = DEPLOYED[name]
    assert list(problems(config)) == []
    account.deploy(config.name, synthesise(config, tmp_path, scale=scale))
    ((_, sent),) = account.world.sagemaker.calls
    assert sent == create_cluster_request(bound(config, values_of(config, account), scale=scale))
    assert check_request("CreateCluster", sent) == []


def test_a_cluster_in_what_is_there_already_is_the_request_as_it_is(synthesised: Callable[..., Templates]) -> None:
    properties = synthesised("imported")["cluster"]["Resources"]["Cluster"]["Properties"]
    assert properties == create_cluster_request(deployment(IMPORTED))


WHOLE = EKS["instance_groups"][0]
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(0, 6758),
    "execution_role": st.just("arn:aws:iam::123456789012:role/other"),
    "lifecycle": st.sampled_from([WHOLE["lifecycle"], {"source": "s3://sagemaker-a", "on_init_complete": "x.sh"}]),
    "threads_per_core": st.integers(1, 2),
    "storage": st.lists(st.sampled_from([STORAGE[0], STORAGE[1], STORAGE[2], STORAGE[3]]), max_size=3),
    "deep_health_checks": st.lists(st.sampled_from(WHOLE["deep_health_checks"]), unique=True),
    "training_plan": st.just(PLAN),
    "vpc": st.just(WHOLE["vpc"]),
    "network_interface": st.sampled_from(["efa", "efa-only"]),
    "image": st.sampled_from(["default", WHOLE["image"]]),
    "image_release": st.from_regex(r"\A[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\Z"),
    "scheduled_update": st.sampled_from([WHOLE["scheduled_update"], {"schedule": "cron(0 0 1 * ? *)"}]),
    "auto_patch": st.sampled_from([{"strategy": "WhenIdle"}, {"strategy": "WhenAllIdle", "rollout": ROLLOUT}]),
    "capacity": st.sampled_from(["spot", "on-demand"]),
    "other_types": st.just(["ml.p5e.48xlarge"]),
}
ON_EKS: dict[str, st.SearchStrategy[Any]] = {
    "labels": st.dictionaries(st.from_regex(r"\A[a-z]{1,9}\Z"), st.from_regex(r"\A[a-z0-9]{1,9}\Z"), max_size=3),
    "taints": st.lists(st.sampled_from(WHOLE["taints"]), max_size=1),
}
SLURM_PARTS = [{"node_type": "Compute", "partition": "dev"}, {"node_type": "Login"}, {"node_type": "Controller"}]
ONLY_IN_THE_API = ("scheduled_update", "deep_health_checks")
RESTRICTED = [{name: value for name, value in EKS["restricted_groups"][0].items() if name not in ONLY_IN_THE_API}]


@st.composite
def clusters(draw: Any) -> str:
    """Spec of any cluster that names all that it needs, with every member that CloudFormation has."""
    eks = draw(st.booleans())
    names = draw(st.lists(st.from_regex(r"\A[a-z][a-z0-9]{0,9}\Z"), min_size=1, max_size=4, unique=True))
    own = ON_EKS if eks else {"slurm": st.sampled_from(SLURM_PARTS)}
    groups = [GROUP | {"name": name} | draw(st.fixed_dictionaries({}, optional=PARTS | own)) for name in names]
    spec: dict[str, Any] = {
        "name": draw(st.from_regex(r"\A[A-Za-z][A-Za-z0-9]{0,20}\Z")),
        "region": "us-west-2",
        "execution_role": ROLE,
        "vpc": VPC,
        "instance_groups": groups,
        "node_recovery": draw(st.sampled_from(["Automatic", "None"])),
        "continuous_provisioning": draw(st.booleans()),
        "tags": draw(st.dictionaries(st.from_regex(r"\A[a-z]{1,9}\Z"), st.from_regex(r"\A[a-z ]{0,9}\Z"), max_size=3)),
        "infrastructure": {"network": {"vpc_id": "vpc-0123456789abcdef0"}},
    }
    if eks:
        spec["eks_cluster_arn"] = EKS.get("eks_cluster_arn")
        spec |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "tiered_storage": st.sampled_from([{}, {"enabled": False}, {"memory_percent": 0}]),
                    "auto_scaling": st.sampled_from([{}, {"enabled": False}]),
                    "cluster_role": st.just(ROLE),
                    "restricted_groups": st.just(RESTRICTED),
                    "restricted_environment": st.just(EKS["restricted_environment"]),
                },
            )
        )
        if spec.get("auto_scaling") == {}:
            spec["cluster_role"] = ROLE  # or one is made
    else:
        spec["orchestrator"] = "slurm"
        spec["slurm"] = draw(st.sampled_from([{}, SLURM["slurm"], {"strategy": "Managed"}]))
    return json.dumps(spec)


def generated(number: int) -> list[str]:
    """Specs of so many different clusters."""
    found: dict[str, str] = {}

    @settings(max_examples=2 * number, database=None, deadline=None, phases=[Phase.generate])
    @given(spec=clusters())
    def collect(spec: str) -> None:
        found[ClusterConfig.model_validate_json(spec).model_dump_json(exclude={"name"})] = spec

    collect()
    assert len(found) >= number
    return list(found.values())[:number]


def properties_of(configs: list[ClusterConfig], folder: Path) -> list[dict[str, Any]]:
    """The cluster's properties in the template of each, all synthesised at once."""
    from constructs import Construct  # not above: it starts node
    from hyperpod_cdk.cluster import ClusterStack
    from hyperpod_cdk.eks import existing_eks
    from hyperpod_cdk.network import existing_places
    from hyperpod_cdk.storage import BucketLocation, Stored

    app = new_app(folder, validate=False)
    stored = Stored(None, BucketLocation(""), BucketLocation(""), None, None)  # type: ignore[arg-type]  # roles are given: nobody asks
    names = []
    for place, config in enumerate(configs):
        eks = existing_eks(config) if config.orchestrator == "eks" else None
        scope = Construct(app, f"a{place}")
        stack = ClusterStack(scope, config, existing_places(config), stored, eks, scale=True)
        names.append(stack.template_file)
    app.synth()
    templates = [json.loads((folder / name).read_text()) for name in names]
    return [template["Resources"]["Cluster"]["Properties"] for template in templates]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [20, pytest.param(500, marks=pytest.mark.thorough)])
def test_any_cluster_is_the_request(tmp_path: Path, number: int) -> None:
    example = load(ClusterConfig, EXAMPLES / "08-cluster" / "cluster.yaml")

    def configs_of(specs: list[str]) -> list[ClusterConfig]:
        configs = [ClusterConfig.model_validate_json(spec) for spec in specs]
        return [*configs, example.model_copy(update={"infrastructure": configs[0].infrastructure})]

    def made() -> tuple[list[str], list[dict[str, Any]]]:
        specs = generated(number)
        return specs, properties_of(configs_of(specs), tmp_path)

    same = settings.default.derandomize  # in every run
    specs, found = kept(made, number, example.model_dump_json()) if same else made()
    assert len(specs) == number
    configs = configs_of(specs)
    for config, properties in zip(configs, found, strict=True):
        assert properties == create_cluster_request(config)
        assert check_request("CreateCluster", properties) == []
