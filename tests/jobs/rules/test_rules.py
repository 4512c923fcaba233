"""Each domain rule finds what it is for, and nothing once that is mended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.base import Config
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.files.repair import overlaps
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import TARGETS
from hyperpod_ext.jobs.rules import Context, all_rules, needed

P5 = {"instance_type": "ml.p5.48xlarge"}
GB200 = {"instance_type": "ml.p6e-gb200.36xlarge"}
WHOLE = {"workers_per_node": 8, "resources": P5}
AWS = {"mode": "aws-checkpointless"}
ARTICLE = "sagemaker-hyperpod/pytorch-training:2.3.0-checkpointless"
OURS = {"nodes": 2, "kubernetes": {"launcher": "ours"}}
ELASTIC = {"elastic": {"min_nodes": 2, "max_nodes": 4}, "nodes": 2, "mode": "plain"}
GROUPED = {"nodes": 4, "node_groups": [{"name": "a", "nodes": 2}, {"name": "b", "nodes": 2}]}
RULE = {"name": "loss", "pattern": "loss ([0-9.]+)", "every_s": 60}


def context(fields: dict[str, Any], target: str | None = "hyperpod-eks", region: str | None = None) -> Context:
    document = {"name": "a", "script": "train.py", "image": "repo/train:1"} | fields
    cluster = None
    if region:
        groups = [{"name": "g", "instance_type": "ml.p5.48xlarge", "count": 2}]
        text = json.dumps({"name": "c", "region": region, "instance_groups": groups})
        cluster = ClusterConfig.model_validate_json(text)
    return Context(JobConfig.model_validate_json(json.dumps(document)), cluster, target)


def volumes(*paths: str) -> list[dict[str, str]]:
    return [{"kind": "host", "path": path, "host_path": "/x"} for path in paths]


def named(key: str, value: Any) -> dict[str, Any]:
    return {"kubernetes": {key: value}}


FROM_POD = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
SPACE: dict[str, Any] = {"name": "a", "emptyDir": {}}
CLAIM: dict[str, Any] = {"kind": "claim", "path": "/fsx", "claim": "fsx-claim"}
SECRET: dict[str, Any] = {"kind": "secret", "path": "/keys", "secret": "keys"}
RUN: dict[str, Any] = {"mode": "run", "kubernetes": {"launcher": "ours"}}
NFS = {"server": "fs", "path": "/"}
MOUNT = {"name": "a", "mountPath": "/a"}


def inside(*, above: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"kubernetes": {"container": fields} | (above or {})}


def pod(*, above: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"kubernetes": {"pod": fields} | (above or {})}


def beside(**fields: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "log", "image": "repo/log:1"} | fields])


def mounting(path: str) -> dict[str, Any]:
    return inside(volumeMounts=[{"name": "a", "mountPath": path}], above={"pod": {"volumes": [SPACE]}})


def store(path: str = "/fsx", **source: Any) -> dict[str, Any]:
    return inside(volumeMounts=[{"name": "a", "mountPath": path}], above={"pod": {"volumes": [{"name": "a"} | source]}})


def tier(path: str, *mounted: dict[str, Any]) -> dict[str, Any]:
    return {"checkpoint": {"tiers": [{"kind": "file", "path": path}]}, "volumes": list(mounted)}


def disk(path: str, *mounted: dict[str, Any]) -> dict[str, Any]:
    return {"checkpoint": {"tiers": [{"kind": "disk", "path": path}]}, "volumes": list(mounted)}


def limits(name: str, most: object) -> dict[str, Any]:
    return inside(resources={"limits": {name: most}})


def sleeping(seconds: int) -> dict[str, Any]:
    return inside(lifecycle={"preStop": {"sleep": {"seconds": seconds}}})


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # id, wrong, mended, the field that is named
    ("HPX101", ELASTIC | AWS, ELASTIC, "elastic"),
    ("HPX103", ELASTIC | {"nodes": 5}, ELASTIC, "nodes"),
    ("HPX103", ELASTIC | {"elastic": {"min_nodes": 4, "max_nodes": 2}}, ELASTIC, "elastic.min_nodes"),
    ("HPX103", ELASTIC | {"elastic": {"min_nodes": 1, "max_nodes": 4, "sizes": [4, 2]}}, ELASTIC, "elastic.sizes"),
    ("HPX103", ELASTIC | {"elastic": {"min_nodes": 1, "max_nodes": 4, "sizes": [2, 8]}}, ELASTIC, "elastic.sizes.1"),
    ("HPX103", ELASTIC | {"elastic": {"min_nodes": 1, "max_nodes": 4, "sizes": [1, 4]}}, ELASTIC, "nodes"),
    ("HPX104", {"spares": 1}, {"spares": 1, "scheduling": {"queue": "q"}}, "spares"),
    (
        "HPX105",
        AWS | {"resources": {"instance_type": "ml.trn1.32xlarge"}},
        AWS | {"resources": P5},
        "resources.instance_type",
    ),
    ("HPX106", AWS | {"nodes": 1}, AWS | {"nodes": 2}, "nodes"),
    ("HPX107", {"mode": "plain", "checkpoint": {"tiers": []}}, {"checkpoint": {"tiers": []}}, "checkpoint"),
    ("HPX111", WHOLE | {"workers_per_node": 9}, WHOLE, "workers_per_node"),
    ("HPX111", {"resources": P5 | {"accelerators": 9}}, WHOLE, "resources.accelerators"),
    ("HPX112", {"resources": P5 | {"accelerators": 8}}, WHOLE, "workers_per_node"),
    ("HPX113", {"resources": P5 | {"efa": 33}}, {"resources": P5 | {"efa": 32}}, "resources.efa"),
    ("HPX114", WHOLE | {"resources": P5 | {"efa": 4}}, WHOLE | {"nodes": 2}, "resources.efa"),
    ("HPX114", WHOLE | {"nodes": 2, "resources": P5 | {"efa": 16}}, WHOLE | {"nodes": 2}, "resources.efa"),
    ("HPX115", {"resources": P5 | {"cpus": 192}}, {"resources": P5 | {"cpus": 180}}, "resources.cpus"),
    (
        "HPX115",
        {"resources": P5 | {"memory_mib": 2048 * 1024}},
        {"resources": P5 | {"memory_mib": 1024}},
        "resources.memory_mib",
    ),
    (
        "HPX116",
        {"resources": {"hugepages_mib": 2}},
        {"resources": {"hugepages_mib": 2, "memory_mib": 9}},
        "resources.hugepages_mib",
    ),
    ("HPX117", {"resources": {"instance_type": "ml.p5.49xlarge"}}, {"resources": P5}, "resources.instance_type"),
    (
        "HPX118",
        {"resources": {"memory_mib": 99}, "shared_memory_mib": 100},
        {"resources": {"memory_mib": 100}, "shared_memory_mib": 100},
        "shared_memory_mib",
    ),
    (
        "HPX118",
        {"resources": {"memory_mib": 99}, "checkpoint": {"tiers": [{"kind": "memory", "budget_mib": 100}]}},
        {"resources": {"memory_mib": 99}},
        "checkpoint.tiers",
    ),
    ("HPX127", GROUPED | {"spares": 1}, GROUPED, "spares"),
    (
        "HPX127",
        GROUPED | {"spares": 1},
        GROUPED | {"node_groups": [{"name": "a", "nodes": 2, "spares": 1}, {"name": "b", "nodes": 2}]},
        "spares",
    ),
    ("HPX128", tier("/fsx/ck"), tier("/fsx/ck", CLAIM), "checkpoint.tiers.0.path"),
    ("HPX178", RUN, RUN | {"volumes": [CLAIM]}, "volumes"),
    (
        "HPX178",
        RUN | {"volumes": [{"kind": "scratch", "path": "/tmp/a"}]},
        RUN | {"volumes": volumes("/fsx")},
        "volumes",
    ),
    ("HPX178", RUN | {"volumes": [CLAIM | {"read_only": True}]}, {}, "volumes"),
    (
        "HPX128",
        tier("/fsx/ck", CLAIM | {"path": "/fs"}),
        tier("/fs/ck", CLAIM | {"path": "/fs/"}),
        "checkpoint.tiers.0.path",
    ),
    (
        "HPX128",
        tier("checkpoints", CLAIM),
        tier("checkpoints", CLAIM) | {"working_dir": "/fsx"},
        "checkpoint.tiers.0.path",
    ),
    (
        "HPX128",
        tier("/fsx/ck", {"kind": "scratch", "path": "/fsx"}),
        tier("/fsx/ck", {"kind": "host", "path": "/fsx", "host_path": "/fsx"}),
        "checkpoint.tiers.0.path",
    ),
    (
        "HPX128",
        tier("/fsx/ck", CLAIM | {"read_only": True}),
        tier("/fsx/ck", CLAIM | {"read_only": True}, CLAIM | {"path": "/fsx/ck"}),
        "checkpoint.tiers.0.path",
    ),
    ("HPX128", disk("nvme/ck"), disk("/nvme/ck"), "checkpoint.tiers.0.path"),
    (
        "HPX128",
        disk("/scratch/ck", {"kind": "scratch", "path": "/scratch"}),
        disk("/nvme/ck", {"kind": "host", "path": "/nvme", "host_path": "/mnt/k8s-disks/0"}),
        "checkpoint.tiers.0.path",
    ),
    ("HPX128", disk("/fsx/ck", CLAIM), tier("/fsx/ck", CLAIM), "checkpoint.tiers.0.path"),
    ("HPX128", tier("/fsx/../x", CLAIM), tier("/x/../fsx", CLAIM), "checkpoint.tiers.0.path"),
    ("HPX128", mounting("/fsx") | tier("/fsx/ck"), store(nfs=NFS) | tier("/fsx/ck"), "checkpoint.tiers.0.path"),
    (
        "HPX128",
        store(nfs=NFS | {"readOnly": True}) | tier("/fsx/ck"),
        store(persistentVolumeClaim={"claimName": "a"}) | tier("/fsx/ck"),
        "checkpoint.tiers.0.path",
    ),
    (
        "HPX128",
        tier("/fsx/ck") | {"overlay": {"kubernetes": {"container": {"volumeMounts": [MOUNT]}}}},
        tier("/a/ck") | {"overlay": {"kubernetes": {"container": {"volumeMounts": [MOUNT]}}}},
        "checkpoint.tiers.0.path",
    ),
    (
        "HPX124",
        {"nodes": 2, "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "peer"}], "when_busy": "skip"}},
        {"nodes": 2, "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "peer"}]}},
        "checkpoint.when_busy",
    ),
    (
        "HPX124",
        disk("/nvme") | {"nodes": 2, "checkpoint": {"tiers": [{"kind": "disk", "path": "/nvme"}], "when_busy": "skip"}},
        disk("/nvme") | {"nodes": 2},
        "checkpoint.when_busy",
    ),
    (
        "HPX125",
        {"workers_per_node": 2, "resources": {"accelerator_resource": "nvidia.com/mig-1g.10gb"}},
        {"resources": {"accelerator_resource": "nvidia.com/mig-1g.10gb"}},
        "resources.accelerator_resource",
    ),
    (
        "HPX125",
        {"resources": {"accelerators": 2, "accelerator_resource": "nvidia.com/mig-1g.10gb"}},
        {"resources": {"accelerators": 1, "accelerator_resource": "nvidia.com/mig-1g.10gb"}},
        "resources.accelerators",
    ),
    ("HPX131", {"image": None}, {}, "image"),
    (
        "HPX139",
        {"nodes": 2, "resources": GB200},
        {"nodes": 2, "resources": GB200 | {"efa": 8}},
        "resources.instance_type",
    ),
    ("HPX139", {"nodes": 2, "resources": GB200}, {"nodes": 1, "resources": GB200}, "resources.instance_type"),
    ("HPX137", {"image": ARTICLE}, {"image": f"658645717510.dkr.ecr.us-west-2.amazonaws.com/{ARTICLE}"}, "image"),
    ("HPX138", {"env": {"HPCT_USE_CONN_DATA": "0"}}, {"env": {"HPCT_USE_CONN_DATA": "1"}}, "env.HPCT_USE_CONN_DATA"),
    (
        "HPX138",
        {"env": {"TORCH_SKIP_TCPSTORE": "0"}},
        AWS | {"env": {"TORCH_SKIP_TCPSTORE": "0"}},
        "env.TORCH_SKIP_TCPSTORE",
    ),
    ("HPX131", AWS | {"image": None}, AWS, "image"),
    ("HPX134", {"image": "repo/train"}, {"image": "repo/train@sha256:" + "0" * 64}, "image"),
    ("HPX134", {"image": "host:5000/train:latest"}, {"image": "host:5000/train:v2"}, "image"),
    *(
        ("HPX136", {"image": wrong}, {"image": right}, "image")
        for wrong, right in [
            ("my image:1", "my-image:1"),
            ("HTTPS://x/Train:1", "x/train:1"),
            ("https://a.b/c:1", "localhost:5000/c:1"),
            ("a.b/Train:1", "A.b/train__x/y-z.w:V_1.0"),
            ("a:1:2", f"a.b:1/c:1@sha256:{'0' * 64}"),
            ("a@sha256:1", f"a@sha256:{'0' * 64}"),
            ("/fsx/images/a.sqsh", "a"),
        ]
    ),
    (
        "HPX130",
        {"resources": P5, "scheduling": {"node_selector": {"node.kubernetes.io/instance-type": "ml.p4d.24xlarge"}}},
        {"resources": P5, "scheduling": {"node_selector": {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}}},
        "scheduling.node_selector.node.kubernetes.io/instance-type",
    ),
    (
        "HPX130",
        {
            "resources": P5,
            "node_groups": [{"name": "g", "nodes": 1, "node_selector": {"beta.kubernetes.io/instance-type": "ml.a.b"}}],
        },
        {"scheduling": {"node_selector": {"node.kubernetes.io/instance-type": "ml.p4d.24xlarge"}}},
        "node_groups.0.node_selector.beta.kubernetes.io/instance-type",
    ),
    (
        "HPX141",
        {"scheduling": {"priority": "high"}},
        {"scheduling": {"priority": "high", "queue": "q"}},
        "scheduling.priority",
    ),
    (
        "HPX141",
        {"scheduling": {"topology": {"level": "a.b/c"}}},
        {"scheduling": {"topology": {"level": "a.b/c"}, "queue": "q"}},
        "scheduling.topology",
    ),
    (
        "HPX142",
        named("namespace", "hyperpod-ns-a"),
        named("namespace", "hyperpod-ns-a") | {"scheduling": {"queue": "q"}},
        "scheduling.queue",
    ),
    ("HPX143", {"name": "n" * 52}, {"name": "n" * 51}, "name"),
    (
        "HPX144",
        named("host_network", True),
        {"kubernetes": {"host_network": True, "network_policy": False}},
        "kubernetes.host_network",
    ),
    ("HPX145", {"volumes": volumes("/a", "/a/")}, {"volumes": volumes("/a", "/a/b")}, "volumes.1.path"),
    (
        "HPX145",
        {"volumes": volumes("/var/run/hyperpod-ext")},
        {"mode": "plain", "volumes": volumes("/var/run/hyperpod-ext")},
        "volumes.0.path",
    ),
    ("HPX145", {"volumes": [CLAIM | {"path": "/"}]}, {"volumes": [CLAIM]}, "volumes.0.path"),
    ("HPX145", {"volumes": [CLAIM | {"path": "/dev"}]}, {"volumes": volumes("/device")}, "volumes.0.path"),
    (
        "HPX145",
        {"volumes": [CLAIM | {"path": "/dev/shm"}]},
        {"volumes": [{"kind": "scratch", "path": "/dev/shm", "in_memory": True}]},
        "volumes.0.path",
    ),
    (
        "HPX145",
        {"volumes": volumes("/dev/shm/")},
        {"volumes": [{"kind": "host", "path": "/dev/shm", "host_path": "/dev/shm"}]},
        "volumes.0.path",
    ),
    (
        "HPX145",
        store("/dev/shm", nfs=NFS),
        store("/dev/shm", emptyDir={"medium": "Memory"}),
        "kubernetes.container.volumeMounts.0.mountPath",
    ),
    ("HPX129", {"volumes": [CLAIM | {"path": "/opt/ml/input/config"}]}, {"volumes": [CLAIM]}, "volumes.0.path"),
    (
        "HPX129",
        {"volumes": volumes("/opt/ml")},
        {"volumes": volumes("/opt/ml"), "kubernetes": {"launcher": "ours"}},
        "volumes.0.path",
    ),
    (
        "HPX129",
        store("/opt/ml/input", persistentVolumeClaim={"claimName": "a"}),
        store("/opt/ml/input", emptyDir={}),
        "kubernetes.container.volumeMounts.0.mountPath",
    ),
    ("HPX146", named("privileged", True), {}, "kubernetes.privileged"),
    (
        "HPX147",
        {"nodes": 3, "node_groups": [{"name": "g", "nodes": 2}]},
        {"nodes": 2, "node_groups": [{"name": "g", "nodes": 2}]},
        "nodes",
    ),
    (
        "HPX147",
        ELASTIC | {"node_groups": [{"name": "g", "nodes": 2}]},
        ELASTIC | {"node_groups": [{"name": "g", "nodes": 2, "max_nodes": 4}]},
        "elastic.max_nodes",
    ),
    ("HPX147", {"nodes": 2, "node_groups": [{"name": "g", "nodes": 1}] * 2}, {}, "node_groups.1.name"),
    ("HPX148", {"annotations": {"a": "x" * 300_000}}, {"annotations": {"a": "x" * 1000}}, "annotations"),
    (
        "HPX149",
        {"scheduling": {"tolerations": [{"key": "a", "value": "b"}]}},
        {"scheduling": {"tolerations": [{"key": "a", "operator": "Equal", "value": "b"}]}},
        "scheduling.tolerations.0.value",
    ),
    (
        "HPX149",
        {"scheduling": {"tolerations": [{"key": "a", "operator": "Equal"}]}},
        {"scheduling": {"tolerations": [{"key": "a"}]}},
        "scheduling.tolerations.0",
    ),
    (
        "HPX149",
        {"scheduling": {"tolerations": [{"seconds": 1}]}},
        {"scheduling": {"tolerations": [{"seconds": 1, "effect": "NoExecute"}]}},
        "scheduling.tolerations.0.seconds",
    ),
    (
        "HPX150",
        {"env": {"A": "x"}, **named("secret_env", [{"name": "A", "secret": "s", "key": "k"}])},
        {"env": {"A": "x"}},
        "kubernetes.secret_env.0.name",
    ),
    ("HPX150", named("secret_env", [{"name": "HPX_A", "secret": "s", "key": "k"}]), {}, "kubernetes.secret_env.0.name"),
    ("HPX151", {"labels": {"hyperpod-ext/job": "b"}}, {"labels": {"team": "b"}}, "labels.hyperpod-ext/job"),
    ("HPX151", {"annotations": {"kueue.x-k8s.io/queue-name": "b"}}, {}, "annotations.kueue.x-k8s.io/queue-name"),
    ("HPX152", {"env": {"A": "x\0y"}}, {"env": {"A": "x"}}, "env.A"),
    ("HPX152", {"args": ["a", "\0"]}, {"args": ["a"]}, "args.1"),
    (
        "HPX145",
        {"volumes": volumes("/a")} | mounting("/a"),
        mounting("/a"),
        "kubernetes.container.volumeMounts.0.mountPath",
    ),
    ("HPX160", {"env": {"RANK": "0"}}, {"env": {"MY_RANK": "0"}}, "env.RANK"),
    ("HPX160", {"env": {"MASTER_ADDR": "a"}}, {"env": {"NNODES": "2"}}, "env.MASTER_ADDR"),
    (
        "HPX160",
        named("secret_env", [{"name": "WORLD_SIZE", "secret": "s", "key": "k"}]),
        named("secret_env", [{"name": "SIZE", "secret": "s", "key": "k"}]),
        "kubernetes.secret_env.0.name",
    ),
    ("HPX150", {"env": {"A": "x"}} | inside(env=[FROM_POD]), inside(env=[FROM_POD]), "kubernetes.container.env.0.name"),
    ("HPX155", inside(volumeMounts=[MOUNT]), mounting("/a"), "kubernetes.container.volumeMounts.0.name"),
    ("HPX155", beside(volumeMounts=[MOUNT]), beside(), "kubernetes.pod.containers.0.volumeMounts.0.name"),
    (
        "HPX155",
        inside(volumeDevices=[{"name": "a", "devicePath": "/dev/a"}]),
        {},
        "kubernetes.container.volumeDevices.0.name",
    ),
    ("HPX155", inside(resources={"claims": [{"name": "a"}]}), {}, "kubernetes.container.resources.claims.0.name"),
    ("HPX156", inside(env=[FROM_POD | {"name": "RANK"}]), inside(env=[FROM_POD]), "kubernetes.container.env.0.name"),
    ("HPX156", pod(volumes=[SPACE | {"name": "shm"}]), pod(volumes=[SPACE]), "kubernetes.pod.volumes.0.name"),
    (
        "HPX156",
        {"volumes": volumes("/a")} | pod(volumes=[SPACE | {"name": "host-0"}]),
        pod(volumes=[SPACE | {"name": "host-0"}]),
        "kubernetes.pod.volumes.0.name",
    ),
    ("HPX156", mounting("/var/run"), mounting("/var/run/other"), "kubernetes.container.volumeMounts.0.mountPath"),
    (
        "HPX156",
        mounting(f"{labels.SECRET_DIR}/key"),
        {"mode": "plain"} | mounting(f"{labels.SECRET_DIR}/key"),
        "kubernetes.container.volumeMounts.0.mountPath",
    ),
    (
        "HPX156",
        {"mode": "plain", "volumes": [SECRET]} | inside(securityContext={"runAsUser": 1000}),
        {"mode": "plain", "volumes": [SECRET]}
        | inside(securityContext={"runAsUser": 1000}, above={"pod": {"securityContext": {"fsGroup": 1000}}}),
        "kubernetes.container.securityContext.runAsUser",
    ),
    (
        "HPX156",
        inside(securityContext={"readOnlyRootFilesystem": True}),
        {"volumes": volumes("/tmp")} | inside(securityContext={"readOnlyRootFilesystem": True}),
        "kubernetes.container.securityContext.readOnlyRootFilesystem",
    ),
    (
        "HPX156",
        inside(securityContext={"runAsUser": 1000}),
        {"mode": "plain"} | inside(securityContext={"runAsUser": 1000}),
        "kubernetes.container.securityContext.runAsUser",
    ),
    (
        "HPX156",
        pod(securityContext={"runAsNonRoot": True}),
        pod(securityContext={"runAsNonRoot": True, "fsGroup": 1000}),
        "kubernetes.pod.securityContext.runAsNonRoot",
    ),
    (
        "HPX157",
        inside(securityContext={"allowPrivilegeEscalation": False}, above={"privileged": True}),
        inside(securityContext={"allowPrivilegeEscalation": False}),
        "kubernetes.container.securityContext.allowPrivilegeEscalation",
    ),
    (
        "HPX157",
        inside(securityContext={"procMount": "Unmasked"}),
        {},
        "kubernetes.container.securityContext.procMount",
    ),
    ("HPX157", pod(hostUsers=False, above={"host_network": True}), pod(hostUsers=False), "kubernetes.pod.hostUsers"),
    (
        "HPX157",
        pod(securityContext={"sysctls": [{"name": "net.a", "value": "1"}]}, above={"host_network": True}),
        pod(securityContext={"sysctls": [{"name": "net.a", "value": "1"}]}),
        "kubernetes.pod.securityContext.sysctls.0.name",
    ),
    (
        "HPX157",
        inside(volumeMounts=[MOUNT | {"mountPropagation": "Bidirectional"}]),
        inside(volumeMounts=[MOUNT | {"mountPropagation": "Bidirectional"}], above={"privileged": True}),
        "kubernetes.container.volumeMounts.0.mountPropagation",
    ),
    (
        "HPX157",
        inside(ports=[{"containerPort": 9000, "hostPort": 1}], above={"host_network": True}),
        inside(ports=[{"containerPort": 9000, "hostPort": 9000}], above={"host_network": True}),
        "kubernetes.container.ports.0.hostPort",
    ),
    ("HPX158", beside(name="worker"), beside(name="node"), "kubernetes.pod.containers.0.name"),
    ("HPX158", inside(ports=[{"containerPort": 8080}]), {}, "kubernetes.container.ports.0.containerPort"),
    ("HPX158", beside(ports=[{"containerPort": 1}] * 2), {}, "kubernetes.pod.containers.0.ports.1.containerPort"),
    (
        "HPX159",
        {"resources": {"cpus": 9}} | limits("cpu", 8.5),
        {"resources": {"cpus": 9}} | limits("cpu", "9000m"),
        "kubernetes.container.resources.limits.cpu",
    ),
    (
        "HPX159",
        limits("nvidia.com/gpu", 1),
        limits("a.com/b", 1),
        "kubernetes.container.resources.limits.nvidia.com/gpu",
    ),
    ("HPX159", limits("disk", 1), limits("memory", "1Gi"), "kubernetes.container.resources.limits.disk"),
    ("HPX159", sleeping(31), sleeping(30), "kubernetes.container.lifecycle.preStop.sleep.seconds"),
    (
        "HPX161",
        {"relaunch": {"after_restarts": 5, "max_process_restarts": 4}},
        {"relaunch": {"after_restarts": 4, "max_process_restarts": 4}},
        "relaunch.after_restarts",
    ),
    (
        "HPX161",
        {"relaunch": {"after_restarts": 5, "max_times": 0}},
        {"relaunch": {"after_restarts": 5, "max_times": 1}},
        "relaunch.after_restarts",
    ),
    ("HPX162", {"log_rules": [RULE | {"pattern": "(loss"}]}, {"log_rules": [RULE]}, "log_rules.0.pattern"),
    (
        "HPX162",
        {"log_rules": [RULE | {"threshold": 2.5}]},
        {"log_rules": [RULE | {"threshold": 2.5, "operator": "gt"}]},
        "log_rules.0",
    ),
    (
        "HPX162",
        {"log_rules": [RULE | {"threshold": 2.5, "operator": "gt", "pattern": "loss"}]},
        {"log_rules": [RULE]},
        "log_rules.0.pattern",
    ),
    ("HPX163", {"log_rules": [{"name": "a", "pattern": "b"}]}, {"log_rules": [RULE]}, "log_rules.0"),
    ("HPX164", {"log_rules": [RULE, RULE]}, {"log_rules": [RULE, RULE | {"name": "b"}]}, "log_rules.1.name"),
    ("HPX165", named("termination_grace_s", 24), named("termination_grace_s", 25), "kubernetes.termination_grace_s"),
    ("HPX167", OURS | {"restart": {"node_wait_s": 30}}, OURS, "restart.node_wait_s"),
    (
        "HPX167",
        OURS | {"restart": {"node_wait_s": 299}},
        OURS | {"restart": {"node_wait_s": 300}},
        "restart.node_wait_s",
    ),
    (
        "HPX167",
        OURS | {"restart": {"node_wait_s": 59}, "spares": 1},
        OURS | {"restart": {"node_wait_s": 60}, "spares": 1},
        "restart.node_wait_s",
    ),
    ("HPX166", {"timeouts": {"run_s": 9, "start_s": 10}}, {"timeouts": {"run_s": 9, "start_s": 9}}, "timeouts.start_s"),
    (
        "HPX171",
        {"nodes": 3, "parallelism": {"pipeline": 2}},
        {"nodes": 4, "parallelism": {"pipeline": 2}},
        "parallelism",
    ),
    (
        "HPX171",
        {"nodes": 2, "workers_per_node": 2, "parallelism": {"pipeline": 3}},
        {"nodes": 3, "workers_per_node": 2, "parallelism": {"pipeline": 2}},
        "parallelism",
    ),
    (
        "HPX172",
        {"nodes": 2, "parallelism": {"tensor": 2}},
        {"workers_per_node": 2, "parallelism": {"tensor": 2}},
        "parallelism.tensor",
    ),
    ("HPX174", {"env": {"HF_TOKEN": "hf_" + "a" * 34}}, {"env": {"HF_TOKEN_PATH": "/run/token"}}, "env.HF_TOKEN"),
    ("HPX173", ELASTIC | {"global_batch_size": 4}, ELASTIC | {"global_batch_size": 12}, "global_batch_size"),
]
OTHERS = {
    "HPX175",
    "HPX176",
    "HPX177",
    "HPX102",
    "HPX120",
    "HPX123",
    "HPX126",
    "HPX121",
    "HPX122",
    "HPX108",
    "HPX109",
    "HPX110",
    "HPX119",
    "HPX132",
    "HPX133",
    "HPX135",
    "HPX153",
    "HPX154",
}
"""Rules that look at more than the spec: their tests are below."""


def found(rule: str, seen: Context) -> list[str]:
    return [".".join(map(str, finding.path)) for finding in all_rules()[rule].find(seen)]


@pytest.mark.parametrize(("rule", "wrong", "mended", "path"), CASES)
def test_a_rule_finds_what_it_is_for(rule: str, wrong: dict[str, Any], mended: dict[str, Any], path: str) -> None:
    assert found(rule, context(wrong)) == [path]
    assert found(rule, context(mended)) == []


def test_every_rule_has_a_test_a_cause_and_a_fix() -> None:
    assert {case[0] for case in CASES} | OTHERS == set(all_rules())
    for known in all_rules().values():
        assert known.id.startswith("HPX1")
        assert known.title
        assert known.cause.endswith(".")
        assert known.fix.endswith(".")


class Watched:
    """A config that notes which of its fields are read."""

    def __init__(self, config: Config, path: Path, seen: set[Path]) -> None:
        self._config, self._path, self._seen = config, path, seen

    def __getattr__(self, name: str) -> Any:
        computed = getattr(type(self._config), name, None)
        if isinstance(computed, property) and computed.fget is not None:
            return computed.fget(self)
        value, path = getattr(self._config, name), (*self._path, name)
        if isinstance(value, tuple) and value and isinstance(value[0], Config):
            return tuple(Watched(one, path, self._seen) for one in value)
        if isinstance(value, Config):
            return Watched(value, path, self._seen)
        self._seen.add(path)
        return value


class WatchedContext:
    """A context of a job alone that notes what of the job is read, and whether that is all."""

    def __init__(self, job: JobConfig) -> None:
        self.paths: set[Path] = set()
        self.job = Watched(job, (), self.paths)
        self.more = False

    def __getattr__(self, name: str) -> Any:
        self.more = self.more or name != "node_shares"  # which is of the job alone
        return getattr(Context(self.job), name)  # type: ignore[arg-type]


def test_errors_that_a_job_alone_shows_name_the_fields_that_they_are_read_from() -> None:
    """Those are told of a spec with mistakes in other fields, too; nothing is concluded from a field that is wrong."""
    for rule, wrong, mended, _path in CASES:
        known = all_rules()[rule]
        if known.severity != "error" or rule == "HPX148":  # which weighs all that there is
            continue
        for fields in (wrong, mended, mended | ELASTIC):
            seen: Any = WatchedContext(context(fields).job)
            list(known.find(seen))
            named = [path for path in seen.paths if any(overlaps(read, path) for read in known.reads)]
            assert not known.reads or (len(named) == len(seen.paths) and not seen.more), rule
            assert known.reads or seen.more or fields is not wrong, rule


@pytest.mark.parametrize("target", [None, *TARGETS])
def test_rules_of_modules_that_are_not_loaded_find_nothing(target: str | None) -> None:
    for _, wrong, _, _ in CASES:
        seen = context(wrong, target)
        left_out = [one for one in all_rules().values() if one.look.__module__.rpartition(".")[2] not in needed(seen)]
        assert [one.id for one in left_out if list(one.find(seen))] == []


def test_a_laptop_job_enters_no_code_of_kubernetes() -> None:
    fields = {"name": "a", "script": "train.py", "nodes": 2, "checkpoint": {"tiers": [{"kind": "memory"}]}}
    job = JobConfig.model_validate_json(json.dumps(fields))
    assert needed(Context(job, target="local")) == ["features", "numbers", "texts"]


def test_every_finding_says_what_to_do() -> None:
    for rule, wrong, _mended, _path in CASES:
        assert all(finding.hint for finding in all_rules()[rule].find(context(wrong))), rule


def test_rules_about_the_cluster() -> None:
    wrong = {"resources": {"instance_type": "ml.p4d.24xlarge"}}
    assert found("HPX119", context(wrong, region="us-west-2")) == ["resources.instance_type"]
    assert found("HPX119", context({"resources": P5, "nodes": 3}, region="us-west-2")) == ["resources.instance_type"]
    assert found("HPX119", context({"resources": P5, "nodes": 2}, region="us-west-2")) == []
    aws = AWS | {"image": None, "nodes": 2}
    assert found("HPX132", context(aws, region="ca-west-1")) == ["image"]
    assert found("HPX132", context(aws, region="us-west-2")) == []
    for image, region, wrong in (
        (ARTICLE, "us-west-2", []),
        (ARTICLE, "ca-west-1", []),
        ("hyperpod-checkpointless-training:v1.0.0", "us-west-2", []),
        ("hyperpod-checkpointless-training:v1.0.0", "ca-west-1", ["image"]),
    ):
        assert found("HPX137", context({"image": image}, region=region)) == wrong
    assert found("HPX137", context({"image": ARTICLE}, "kubeflow", region="us-west-2")) == ["image"]
    far = {"image": "1.dkr.ecr.us-east-1.amazonaws.com/a:1"}
    assert found("HPX133", context(far, region="us-west-2")) == ["image"]
    assert found("HPX133", context(far, region="us-east-1")) == []
    theirs = "{}.dkr.ecr.{}.amazonaws.com/pytorch-training:2.8.0-gpu-py312"
    for account, region, wrong in (
        ("763104351884", "us-west-2", []),
        ("763104351884", "eu-south-1", ["image"]),
        ("692866216735", "eu-south-1", []),
        ("111122223333", "eu-south-1", []),
    ):
        assert found("HPX135", context({"image": theirs.format(account, region)})) == wrong


def test_auto_resume_needs_its_namespace() -> None:
    asked = {"relaunch": {"max_times": 2}}
    assert found("HPX153", context(asked | named("namespace", "team"), "kubeflow")) == ["relaunch.max_times"]
    assert found("HPX153", context(asked | named("namespace", "hyperpod-ns-team"), "kubeflow")) == []


def test_rules_of_kubernetes_leave_a_laptop_alone() -> None:
    fields = WHOLE | {"image": None, "spares": 1, "scheduling": {"priority": "high"}}
    for known in all_rules().values():
        assert not list(known.find(context(fields, "local"))), known.id


def test_an_elastic_job_on_a_cluster_that_buys_machines_is_warned() -> None:
    seen = context(ELASTIC, region="us-west-2")
    assert found("HPX108", seen) == []
    assert seen.cluster is not None
    buying = ClusterConfig.model_validate_json(json.dumps(seen.cluster.model_dump(mode="json") | {"auto_scaling": {}}))
    assert found("HPX108", Context(seen.job, buying, seen.target)) == ["elastic.max_nodes"]


TRAINJOB = {"kubeflow_api": "trainjob"}


def test_a_durable_tier_may_be_on_what_pods_have_elsewhere() -> None:
    on_kubeflow = context(tier("/fsx/ck"), "kubeflow")
    assert found("HPX128", on_kubeflow) == ["checkpoint.tiers.0.path"]
    of_their_own = {"kubernetes": TRAINJOB | {"training_runtime": "with-fsx"}}
    assert found("HPX128", context(tier("/fsx/ck") | of_their_own, "kubeflow")) == []
    for target in ("local", "hyperpod-slurm", None):
        assert found("HPX128", context(tier("/fsx/ck"), target)) == []
    assert found("HPX128", context({"mode": "plain"} | tier("/fsx/ck"))) == []


@pytest.mark.parametrize(
    ("rule", "wrong", "path"),
    [
        ("HPX102", ELASTIC | {"mode": "ours"}, "elastic"),
        ("HPX109", ELASTIC | {"kubernetes": TRAINJOB}, "elastic"),
        ("HPX110", {"node_groups": [{"name": "g", "nodes": 1}]}, "node_groups"),
        ("HPX154", {"kubernetes": TRAINJOB | {"host_network": True}}, "kubernetes.host_network"),
        ("HPX154", {"kubernetes": TRAINJOB, "timeouts": {"keep_s": 1}}, "timeouts.keep_s"),
        ("HPX154", pod(hostUsers=False, above=TRAINJOB), "kubernetes.pod.hostUsers"),
        ("HPX154", inside(tty=True, above=TRAINJOB), "kubernetes.container.tty"),
    ],
)
def test_what_kubeflow_cannot_say(rule: str, wrong: dict[str, Any], path: str) -> None:
    assert found(rule, context(wrong, "kubeflow")) == [path]
    assert found(rule, context(wrong, "hyperpod-eks")) == []
    assert found(rule, context(ELASTIC, "kubeflow")) == []


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"log_rules": [{"name": "a", "pattern": "b", "fault_on_match": True}]}, "log_rules.0.fault_on_match"),
        (
            {"log_rules": [{"name": "a", "pattern": "b(.*)", "threshold": 2.5, "operator": "gt"}]},
            "log_rules.0.threshold",
        ),
        (
            {"kubernetes": {"pod": {"affinity": {"podAntiAffinity": {}}}}},
            "kubernetes.pod.affinity.podAntiAffinity",
        ),
        (
            {"kubernetes": {"pod": {"volumes": [{"name": "a", "secret": {"secretName": "b"}}]}}},
            "kubernetes.pod.volumes.0.secret",
        ),
    ],
)
def test_what_the_reader_of_aws_cannot_parse_is_a_warning(fields: dict[str, Any], path: str) -> None:
    assert found("HPX175", context(fields, "hyperpod-eks")) == [path]
    assert found("HPX175", context(fields, "kubeflow")) == []


def on_cluster(fields: dict[str, Any], **more: Any) -> Context:
    """The context with members added to its cluster, or to the cluster's one group."""
    seen = context(fields, region="us-west-2")
    assert seen.cluster is not None
    document = seen.cluster.model_dump(mode="json", exclude_defaults=True)
    document["instance_groups"][0].update(more.pop("group", {}))
    return Context(seen.job, ClusterConfig.model_validate_json(json.dumps(document | more)), seen.target)


def test_rules_about_spot_and_tiered_storage() -> None:
    assert found("HPX120", on_cluster(ELASTIC, group={"capacity": "spot"})) == ["elastic"]
    assert found("HPX120", on_cluster(ELASTIC, group={"capacity": "on-demand"})) == []
    managed = {"mode": "aws-managed-tier"}
    storage = {"enabled": True, "memory_percent": 20}
    assert found("HPX121", on_cluster(managed)) == ["mode"]
    assert found("HPX121", on_cluster(managed, tiered_storage=storage)) == []
    without = {"mode": "aws-checkpointless"}
    assert found("HPX126", on_cluster(without, node_recovery="None")) == ["mode"]
    assert found("HPX126", on_cluster(without, node_recovery="Automatic")) == []
    much = {"resources": P5 | {"memory_mib": 1700 * 1024}}
    assert found("HPX122", on_cluster(much, tiered_storage=storage)) == ["resources.memory_mib"]
    assert found("HPX122", on_cluster(much)) == []
    all_of_it = {"resources": P5, "workers_per_node": 8}
    assert found("HPX122", on_cluster(all_of_it, tiered_storage=storage)) == ["resources.memory_mib"]
    less = {"resources": P5 | {"memory_mib": 1600 * 1024}, "workers_per_node": 8}
    assert found("HPX122", on_cluster(less, tiered_storage=storage)) == []


@pytest.mark.parametrize(
    ("target", "orchestrator"), [("hyperpod-eks", "eks"), ("kubeflow", "eks"), ("hyperpod-slurm", "slurm")]
)
def test_a_job_is_not_sent_to_a_cluster_of_another_orchestrator(target: str, orchestrator: str) -> None:
    other = {"eks": "slurm", "slurm": "eks"}[orchestrator]
    for given, paths in ((orchestrator, []), (other, [""])):
        seen = on_cluster({}, orchestrator=given)
        assert found("HPX123", Context(seen.job, seen.cluster, target)) == paths
        assert found("HPX123", Context(seen.job, seen.cluster, "local")) == []
