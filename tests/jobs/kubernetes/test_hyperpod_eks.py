"""What a spec becomes on HyperPod with EKS."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.contract.launcher_text import RANKED_LINES
from hyperpod_ext.jobs.plan import make_plan

IMAGE = "1.dkr.ecr.us-west-2.amazonaws.com/train:1"
FROM_POD = {"fieldRef": {"fieldPath": "metadata.name"}}
EXAMPLES = ["job", "elastic", "checkpointless", "managed-tier"]


def job(**fields: object) -> JobConfig:
    document = {"name": "a", "script": "train.py", "image": IMAGE} | fields
    return JobConfig.model_validate_json(json.dumps(document))


def rendered(spec: JobConfig, **more: Any) -> dict[str, Any]:
    """The HyperPodPyTorchJob as a YAML reader sees it."""
    found: dict[str, Any] = yaml.safe_load(make_plan(spec, target="hyperpod-eks", **more).files["job.yaml"])
    return found


def container(spec: JobConfig, **more: Any) -> dict[str, Any]:
    (only,) = rendered(spec, **more)["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def expanded(text: str, environment: dict[str, str]) -> str:
    """Text as Kubernetes hands it to a process: `$$` is `$`, and `$(NAME)` its value if there is one."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda m: "$" if m[1] == "$" else environment.get(m[2], m[0]),
        text,
    )


def environment(spec: JobConfig) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in container(spec).get("env", []):
        if "value" in entry:
            found[entry["name"]] = expanded(entry["value"], found)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_rendered_for_the_examples_is_what_the_repository_shows(
    name: str, golden: Callable[[Path, str], None], root: Path
) -> None:
    folder = root / "examples" / "04-hyperpod-eks"
    cluster = load(ClusterConfig, folder / "cluster.yaml") if name == "checkpointless" else None
    plan = make_plan(load(JobConfig, folder / f"{name}.yaml"), cluster, "hyperpod-eks", folder)
    for file, text in plan.files.items():
        golden(folder / "rendered" / name / file, text)


NASTY = [
    'it\'s "$HOME" `id` \\ two\nlines',
    "$(A)",
    "$$",
    "${local_rank}",
    "$$(A)",
    "a$",
    "y",
    "1e3",
    "null",
    " lead",
    "tail ",
    "ünï☃\t",
]


@pytest.mark.parametrize("text", NASTY)
def test_environment_reaches_the_process_letter_for_letter(text: str) -> None:
    assert environment(job(env={"A": "B", "NASTY": text}))["NASTY"] == text


@pytest.mark.parametrize("text", NASTY)
def test_arguments_reach_the_script_letter_for_letter(text: str, tmp_path: Path) -> None:
    show = tmp_path / "hyperpodrun"
    show.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    show.chmod(0o755)
    (_, _), (script,) = container(spec := job(args=["--text", text]))["command"], container(spec)["args"]
    command = ["/bin/sh", "-c", expanded(script, {"A": "B"})]
    done = subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, check=True)
    # as the launcher gives them to the script
    words = [Template(word).safe_substitute(local_rank="0") for word in done.stdout.decode().split("\0")[:-1]]
    assert words[words.index("train.py") :] == ["train.py", "--text", text]


def test_the_launcher_takes_the_place_of_the_shell() -> None:
    script = container(job())["args"][0]
    assert script.splitlines()[-2].startswith("exec hyperpodrun ")
    assert "|" not in script


def test_the_launcher_restarts_in_process_for_those_who_can_and_never_waits_for_ever() -> None:
    def flags(mode: str, **fields: Any) -> str:
        return str(container(job(nodes=2, workers_per_node=4, mode=mode, **fields))["args"][0])

    assert "--inprocess-restart --inprocess-timeout 60" in flags("ours")
    assert "--inprocess" not in flags("ours", elastic={"min_nodes": 1, "max_nodes": 4}), "which never get SIGUSR1"
    assert "--inprocess-restart" in flags("aws-checkpointless")
    assert "--inprocess" not in flags("plain") + flags("aws-managed-tier")
    assert all("--nproc-per-node 4 " in flags(mode) for mode in ("ours", "plain", "aws-managed-tier"))


@pytest.mark.parametrize(("timeouts", "bound"), [({}, "1800"), ({"fault_s": 900}, "900")])
def test_a_checkpointless_job_waits_for_a_rank_that_hangs_as_long_as_it_says(timeouts: Any, bound: str) -> None:
    spec = job(mode="aws-checkpointless", nodes=2, timeouts=timeouts)
    assert f"--inprocess-restart --inprocess-timeout {bound} " in container(spec)["args"][0]
    assert environment(spec)["INPROCESS_RESTART_TIMEOUT"] == bound


def test_the_runtime_gets_the_whole_of_its_settings() -> None:
    spec = job(
        nodes=2, workers_per_node=2, checkpoint={"tiers": [{"kind": "peer"}, {"kind": "s3", "uri": "s3://bbb/p"}]}
    )
    assert RuntimeConfig.model_validate_json(environment(spec)["HPX_RUNTIME"]) == RuntimeConfig.of(spec)
    assert environment(spec)["HPX_SECRET_FILE"] == "/var/run/hyperpod-ext/secret"


def test_the_jobs_secret_is_only_named_and_only_its_owner_reads_it() -> None:
    pod = rendered(job())["spec"]["replicaSpecs"][0]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if "projected" in one]
    (source,) = volume["projected"]["sources"]
    assert (source["secret"]["name"], volume["projected"]["defaultMode"]) == ("a-hpx", 0o400)


@pytest.mark.parametrize(
    ("fields", "pods"),
    [
        ({"nodes": 2}, 2),
        ({"nodes": 2, "spares": 1}, 3),
        ({"nodes": 2, "elastic": {"min_nodes": 1, "max_nodes": 6}}, 6),
        ({"nodes": 3, "node_groups": [{"name": "a", "nodes": 1}, {"name": "b", "nodes": 2, "spares": 1}]}, 4),
    ],
)
def test_pods_are_kept_apart_on_as_many_nodes_as_there_are_pods(fields: dict[str, Any], pods: int) -> None:
    queue = {"queue": "team-localqueue"}
    for one in rendered(job(**fields, scheduling=queue))["spec"]["replicaSpecs"]:
        (constraint,) = one["template"]["spec"]["topologySpreadConstraints"]
        assert (constraint["minDomains"], constraint["maxSkew"]) == (pods, 1)
        assert constraint["whenUnsatisfiable"] == "DoNotSchedule"
        assert "podAntiAffinity" not in one["template"]["spec"].get("affinity", {})
    together = rendered(job(**fields, scheduling=queue | {"spread": False}))["spec"]["replicaSpecs"][0]["template"][
        "spec"
    ]
    assert "topologySpreadConstraints" not in together


def test_nothing_is_privileged_unless_it_is_asked_for() -> None:
    text = make_plan(
        job(nodes=2, workers_per_node=8, resources={"instance_type": "ml.p5.48xlarge"}), target="hyperpod-eks"
    ).files["job.yaml"]
    assert "privileged" not in text
    assert "hostNetwork" not in text
    asked = job(kubernetes={"privileged": True, "host_network": True})
    assert container(asked)["securityContext"] == {"privileged": True}
    assert rendered(asked)["spec"]["replicaSpecs"][0]["template"]["spec"]["hostNetwork"] is True


def test_the_network_policy_lets_the_operator_in_and_nobody_else() -> None:
    policy = yaml.safe_load(make_plan(job(), target="hyperpod-eks").files["network-policy.yaml"])["spec"]
    members, operator = policy["ingress"]
    assert members["from"] == [{"podSelector": policy["podSelector"]}]
    ranges = [range(one["port"], one["endPort"] + 1) for one in members["ports"] if one["protocol"] == "TCP"]
    assert [port for port in range(1, 65536) if not any(port in one for one in ranges)] == [8080], "nor other members"
    assert {"protocol": "UDP"} in members["ports"]
    assert operator["ports"] == [{"protocol": "TCP", "port": 8080}]
    names = operator["from"][0]["namespaceSelector"]["matchLabels"]
    assert names == {"kubernetes.io/metadata.name": "aws-hyperpod"}
    pod = rendered(job())["spec"]["replicaSpecs"][0]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pod.items()
    off = job(kubernetes={"network_policy": False})
    assert list(make_plan(off, target="hyperpod-eks").files) == ["job.yaml"]


@pytest.mark.parametrize(
    ("fields", "gpu", "efa"),
    [
        ({"nodes": 2, "workers_per_node": 8, "resources": {"instance_type": "ml.p5.48xlarge"}}, "8", "32"),
        ({"nodes": 2, "workers_per_node": 8, "resources": {"instance_type": "ml.p5en.48xlarge"}}, "8", "16"),
        ({"nodes": 1, "workers_per_node": 8, "resources": {"instance_type": "ml.p5.48xlarge"}}, "8", None),
        ({"nodes": 2, "workers_per_node": 4, "resources": {"instance_type": "ml.p5.48xlarge"}}, "4", None),
        ({"nodes": 2, "workers_per_node": 4, "resources": {"accelerators": 4, "efa": 2}}, "4", "2"),
        ({"resources": {"instance_type": "ml.c5.4xlarge"}}, None, None),
    ],
)
def test_accelerators_and_efa_follow_from_the_machine(fields: dict[str, Any], gpu: str | None, efa: str | None) -> None:
    resources = container(job(**fields)).get("resources", {})
    for kind in ("requests", "limits"):
        found = resources.get(kind, {})
        assert (found.get("nvidia.com/gpu"), found.get("vpc.amazonaws.com/efa")) == (gpu, efa)


def test_only_the_variables_that_the_libraries_need_are_set() -> None:
    def of(**libraries: str) -> set[str]:
        spec = job(nodes=2, resources={"accelerators": 1, "efa": 1}, libraries=libraries, mode="plain")
        return set(environment(spec))

    assert of() == {"NCCL_SOCKET_IFNAME", "FI_EFA_USE_HUGE_PAGE"} | set(RANKED_LINES)
    assert of(ofi_nccl="1.6.0") == of() | {"FI_EFA_USE_DEVICE_RDMA"}
    assert of(ofi_nccl="1.5") == of(ofi_nccl="1.6.0") | {"FI_PROVIDER", "NCCL_PROTO"}
    assert of(ofi_nccl="1.16.0", libfabric="1.22.0") == of()
    assert environment(job(nodes=2, mode="plain")) == RANKED_LINES


def test_a_variable_of_the_job_wins_over_ours() -> None:
    spec = job(nodes=2, resources={"accelerators": 1, "efa": 1}, env={"NCCL_SOCKET_IFNAME": "eth7"})
    assert environment(spec)["NCCL_SOCKET_IFNAME"] == "eth7"


def test_the_image_of_aws_launch_article_is_chosen_by_name(root: Path) -> None:
    short = "sagemaker-hyperpod/pytorch-training:2.3.0-checkpointless"
    cluster = load(ClusterConfig, root / "examples/04-hyperpod-eks/cluster.yaml")
    for mode in ("aws-checkpointless", "plain"):
        text = make_plan(job(mode=mode, image=short, nodes=2), cluster, target="hyperpod-eks").files["job.yaml"]
        assert f"658645717510.dkr.ecr.{cluster.region}.amazonaws.com/{short}" in text


def test_both_generations_of_aws_switches_are_set_and_the_spec_wins() -> None:
    names = ("HPCT_USE_CONN_DATA", "TORCH_SKIP_TCPSTORE", "HPCT_USE_ROOTLESS")
    found = environment(job(mode="aws-checkpointless", nodes=2, env={"HPCT_USE_ROOTLESS": "0"}))
    assert [found[name] for name in names] == ["1", "1", "0"]
    assert not set(names) & set(environment(job()))


def test_the_checkpointless_image_is_that_of_the_region(root: Path) -> None:
    cluster = {
        "name": "c",
        "region": "eu-west-1",
        "instance_groups": [{"name": "g", "instance_type": "ml.p5.48xlarge", "count": 2}],
    }
    where = ClusterConfig.model_validate_json(json.dumps(cluster))
    spec = job(mode="aws-checkpointless", image=None, nodes=2)
    assert container(spec, cluster=where)["image"].startswith("942446708630.dkr.ecr.eu-west-1.amazonaws.com/")
    nowhere = where.model_copy(update={"region": "ca-west-1"})
    with pytest.raises(UnsupportedError, match="HPX132"):
        make_plan(spec, nowhere, "hyperpod-eks")


def test_a_template_of_ones_own_is_taken_and_what_it_lacks_is_told(tmp_path: Path) -> None:
    from hyperpod_ext.errors import ConfigError
    from hyperpod_ext.jobs.contract.render import own_templates

    own = tmp_path / "hyperpod_eks" / "start.sh.j2"
    own.parent.mkdir()
    own.write_text("exec mine {{ command | map('quote') | join(' ') }}\n")
    with own_templates(tmp_path):
        assert container(job())["args"] == ["exec mine train.py\n"]
    own.write_text("exec {{ nothing }}\n")
    with own_templates(tmp_path), pytest.raises(ConfigError, match=r"start\.sh\.j2.*'nothing' is undefined"):
        make_plan(job(), target="hyperpod-eks")


def test_whoever_collects_numbers_reaches_their_port() -> None:
    plan = make_plan(job(metrics={}), target="hyperpod-eks")
    assert not any("metrics" in warning for warning in plan.warnings)
    ingress = yaml.safe_load(plan.files["network-policy.yaml"])["spec"]["ingress"]
    assert ingress[-1] == {"ports": [{"protocol": "TCP", "port": 9464}]}


def test_parity_needs_our_agents() -> None:
    from hyperpod_ext.errors import ConfigError

    tiers = {"tiers": [{"kind": "memory"}, {"kind": "peer", "parity": 3}]}
    with pytest.raises(ConfigError, match="hyperpodrun does not support parity"):
        make_plan(job(nodes=3, checkpoint=tiers), target="hyperpod-eks")
    make_plan(job(nodes=3, checkpoint=tiers, kubernetes={"launcher": "ours"}), target="hyperpod-eks")


def test_our_agent_serves_the_operator_where_the_spec_says_so() -> None:
    only = {"launcher": "ours", "operator_addresses": ["10.1.0.0/16"]}
    queue = {"queue": "team-localqueue"}
    spec = job(nodes=2, workers_per_node=2, spares=1, kubernetes=only, scheduling=queue)
    text = container(spec)["args"][0]
    assert "exec python3 -m hyperpod_ext.runtime.operator_api --nnodes 2 --nproc-per-node 2 --rdzv-port 29400" in text
    assert "--server-port 8080 --allow 10.1.0.0/16" in text
    assert text.rstrip().endswith("-- train.py")
    assert container(spec)["ports"] == [{"containerPort": 8080}]
    assert RuntimeConfig.from_json(environment(spec)["HPX_RUNTIME"]).spares == 0, "spares are the operator's"
    assert rendered(spec)["spec"]["replicaSpecs"][0]["spares"] == 1


def test_our_agents_leave_their_last_word_where_the_pod_says() -> None:
    elsewhere = {"container": {"terminationMessagePath": "/dev/last-word"}}
    assert environment(job(kubernetes=elsewhere | {"launcher": "ours"}))["HPX_TERMINATION_LOG"] == "/dev/last-word"
    assert "HPX_TERMINATION_LOG" not in environment(job(kubernetes=elsewhere))  # hyperpodrun leaves none
    assert "HPX_TERMINATION_LOG" not in environment(job(kubernetes={"launcher": "ours"}))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"mode": "plain"}, "kubernetes.launcher"),
        ({"kubernetes": {"operator_addresses": ["10.1.0.0/16"]}}, "kubernetes.operator_addresses"),
        ({"metrics": {"port": 8080}}, "metrics.port"),
        ({"metrics": {"port": 8080}, "kubernetes": {}}, "metrics.port"),
        ({"rendezvous": {"port": 8080}}, "rendezvous.port"),
    ],
)
def test_what_the_launcher_cannot_do_is_refused_by_field(fields: dict[str, Any], path: str) -> None:
    asked = {"nodes": 2, "kubernetes": {"launcher": "ours"}} | fields
    with pytest.raises(UnsupportedError) as refused:
        make_plan(job(**asked), target="hyperpod-eks")
    assert path in [problem.path for problem in refused.value.problems]


_NNODES = {"name": "NNODES", "value": "2"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"env": {"NNODES": "2"}}, "env.NNODES"),
        (
            {"kubernetes": {"secret_env": [{"name": "NNODES", "secret": "s", "key": "k"}]}},
            "kubernetes.secret_env.0.name",
        ),
        (
            {"kubernetes": {"container": {"env": [{"name": "NNODES", "valueFrom": FROM_POD}]}}},
            "kubernetes.container.env.0.name",
        ),
        ({"overlay": {"kubernetes": {"container": {"env": [_NNODES]}}}}, "overlay.kubernetes.container.env.0"),
    ],
)
def test_the_number_of_nodes_is_the_operators_to_tell(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        make_plan(job(**fields), target="hyperpod-eks")
    assert [(one.path, "the operator" in one.message) for one in caught.value.problems] == [(path, True)]
    make_plan(job(**fields), target="kubeflow")  # where nothing reads it but the script


@pytest.mark.parametrize(("written", "waits"), [({}, 900.0), ({"node_wait_s": 30}, 30.0)])
def test_a_pod_of_ours_is_waited_for_longer_than_a_process_unless_the_spec_says(
    written: dict[str, Any], waits: float
) -> None:
    spec = job(nodes=2, restart=written, kubernetes={"launcher": "ours"})
    assert RuntimeConfig.from_json(environment(spec)["HPX_RUNTIME"]).restart.node_wait_s == waits


def test_a_network_that_is_none_is_a_mistake_of_its_field() -> None:
    with pytest.raises(ValueError, match="operator_addresses"):
        job(kubernetes={"launcher": "ours", "operator_addresses": ["the operator"]})


@pytest.mark.parametrize(
    ("fields", "forked"),
    [
        ({}, True),
        ({"kubernetes": {"fork_server": False}}, False),
        ({"mode": "plain"}, False),
        ({"elastic": {"min_nodes": 1, "max_nodes": 3}}, True),
    ],
)
def test_workers_of_ours_come_from_the_pods_fork_server(fields: dict[str, Any], forked: bool) -> None:
    (start,) = container(job(**fields))["args"]
    assert ("-m hyperpod_ext.runtime.prefork \\\n    train.py" in start) is forked
