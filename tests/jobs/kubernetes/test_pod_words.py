"""Pods in Kubernetes' own words: what is said of them is rendered whole, is what a cluster takes, and is read back."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from crds import SPECS, unknown
from hypothesis import HealthCheck, given, settings
from pod_words import OF_TRAINJOB, pods

from hyperpod_ext.config.files.load import read_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.pods import values
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.contract.spec_annotation import ANNOTATION
from hyperpod_ext.jobs.contract.yaml_text import read_all, to_yaml
from hyperpod_ext.jobs.kubernetes.imports.import_job import import_job
from hyperpod_ext.jobs.kubernetes.schemas import check_yaml
from hyperpod_ext.jobs.plan import find_problems, make_plan

SPEC = "name: tiny\nscript: train.py\nimage: repo/train:1\nnodes: 2\nworking_dir: /app\nkubernetes:\n"
TARGETS = {"hyperpod-eks": "hyperpod-eks", "pytorchjob": "kubeflow", "trainjob": "kubeflow"}


def told(text: str) -> list[str]:
    try:
        loaded = read_text(JobConfig, SPEC + text, "job.yaml")
    except ConfigError as error:
        return [str(one) for one in error.problems]
    return [str(one) for one in loaded.locate(find_problems(loaded.config, None, "hyperpod-eks"))]


@pytest.mark.parametrize(
    ("line", "path", "says"),
    [
        ("livenessProbe: {periodSeconds: 3}", "livenessProbe", "needs exactly one of exec, httpGet, tcpSocket, grpc"),
        ("livenessProbe: {exec: {command: [a]}, grpc: {port: 1}}", "livenessProbe", "exec and grpc exclude each other"),
        ("livenessProbe: {exec: {command: [a]}, periodSeconds: 0}", "livenessProbe.periodSeconds", "at least 1"),
        ("livenessProbe: {exec: {command: []}}", "livenessProbe.exec.command", "is empty: Command is the command line"),
        ("livenessProbe: {httpGet: {port: 70000}}", "livenessProbe.httpGet.port", "from 1 to 65535"),
        ("lifecycle: {preStop: {}}", "lifecycle.preStop", "needs exactly one of"),
        ("lifecicle: {}", "lifecicle", "did you mean `lifecycle`"),
        ("image: a", "image", "did you mean `image`"),
        ("imagePullPolicy: Always", "imagePullPolicy", "did you mean `kubernetes.pull_policy`"),
        ("env: [{name: A, valueFrom: {}}]", "env.0.valueFrom", "needs exactly one of configMapKeyRef"),
        (
            "env: [{name: A, valueFrom: {fieldRef: {fieldPath: metadata.name}}, value: b}]",
            "env.0.value",
            "not a known field",
        ),
        ("env: [{name: A-B, valueFrom: {fieldRef: {fieldPath: a}}}]", "env.0.name", "for example `A_B`"),
        (
            "env: [{name: A}]",
            "env.0.valueFrom",
            'add `valueFrom: {"configMapKeyRef": {"name": "settings", "key": "conf',
        ),
        ("envFrom: [{prefix: A_}]", "envFrom.0", "needs exactly one of configMapRef, secretRef"),
        ("securityContext: {privileged: true}", "securityContext.privileged", "did you mean `kubernetes.privileged`"),
        ("securityContext: {runAsUser: -1}", "securityContext.runAsUser", "at least 0"),
        ("resources: {limits: {cpu: many}}", "resources.limits.cpu", "not a quantity of Kubernetes"),
        ("resources: {limits: {'!': 1}}", "resources.limits.!", "the name `!` does not have the right form"),
        ("resources: {requests: {cpu: 1}}", "resources.requests", "is not a known field"),
        ("volumeMounts: [{name: a, mountPath: /a, subPath: ../b}]", "volumeMounts.0.subPath", "leaves the"),
        ("volumeMounts: [{mountPath: /a}]", "volumeMounts.0.name", "is missing: This must match the Name of a Volume"),
        ("volumeMounts: [{name: a, mountPath: b}]", "volumeMounts.0.mountPath", "value that begins with /, such as /b"),
        ("tty: 1", "tty", "must be true or false"),
        ("stdin: null\n    ports:", "ports", "must be a list, not an empty value"),
    ],
)
def test_a_wrong_field_of_the_container_is_reported_where_it_is_written(line: str, path: str, says: str) -> None:
    _assert_reported("container", line, path, says)


@pytest.mark.parametrize(
    ("line", "path", "says"),
    [
        ("volumes: [{name: a}]", "volumes.0", "needs exactly one of emptyDir"),
        ("volumes: [{name: a, emptyDir: {}, nfs: {server: s, path: /}}]", "volumes.0", "emptyDir and nfs"),
        ("volumes: [{name: a, iscsi: {iqn: a, lun: 0}}]", "volumes.0.iscsi.targetPortal", "is missing"),
        ("volumes: [{name: a, projected: {sources: [{}]}}]", "volumes.0.projected.sources.0", "needs exactly one of"),
        ("volumes: [{name: a, secret: {secretName: s, defaultMode: 512}}]", "volumes.0.secret.defaultMode", "511"),
        ("affinity: {podAffinity: {required: []}}", "affinity.podAffinity.required", "is not a known field"),
        (
            "affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: "
            "[{weight: 101, podAffinityTerm: {topologyKey: a}}]}}",
            "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution.0.weight",
            "at most 100",
        ),
        ("hostAliases: [{ip: 10.0.0, hostnames: [a]}]", "hostAliases.0.ip", "does not appear to be"),
        ("hostAliases: [{ip: 10.0.0.1}]", "hostAliases.0.hostnames", '(add `hostnames: ["store"]`)'),
        ("dnsConfig: {nameservers: [1.1.1.1, 1.1.1.2, 1.1.1.3, 1.1.1.4]}", "dnsConfig.nameservers", "at most 3"),
        ("dnsPolicy: Cluster", "dnsPolicy", "valid: ClusterFirst"),
        ("resourceClaims: [{name: a}]", "resourceClaims.0", "needs exactly one of"),
        ("containers: [{name: log}]", "containers.0.image", "is missing"),
        ("containers: [{name: a, image: b, restartPolicy: Always}]", "containers.0.restartPolicy", "not a known field"),
        ("initContainers: [{name: a, image: b, restartPolicy: Never}]", "initContainers.0.restartPolicy", "Always"),
        ("nodeSelector: {a: b}", "nodeSelector", "did you mean `scheduling.node_selector`"),
        ("securityContext: {sysctls: [{name: Net, value: '1'}]}", "securityContext.sysctls.0.name", "right form"),
    ],
)
def test_a_wrong_field_of_the_pod_is_reported_where_it_is_written(line: str, path: str, says: str) -> None:
    _assert_reported("pod", line, path, says)


NODES = "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{%s}]}}}"
NODE = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0"
SPREAD = "topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: ScheduleAnyway%s}]"


@pytest.mark.parametrize(
    ("section", "line", "path", "says"),
    [
        (
            "container",
            "startupProbe: {exec: {command: [a]}, successThreshold: 2}",
            "startupProbe.successThreshold",
            "must be 1",
        ),
        (
            "container",
            "livenessProbe: {httpGet: {port: web}}",
            "livenessProbe.httpGet.port",
            "no port of the container",
        ),
        ("container", "lifecycle: {preStop: {tcpSocket: {port: web}}}", "lifecycle.preStop.tcpSocket.port", "no port"),
        (
            "container",
            "readinessProbe: {exec: {command: [a]}, terminationGracePeriodSeconds: 1}",
            "readinessProbe.terminationGracePeriodSeconds",
            "no effect in a readinessProbe",
        ),
        ("container", "ports: [{containerPort: 1, name: a}, {containerPort: 2, name: a}]", "ports", "have the name a"),
        (
            "container",
            "env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.x}}}]",
            "env.0.valueFrom.fieldRef.fieldPath",
            "spec.nodeName",
        ),
        (
            "container",
            "env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.x}}}]",
            "env.0.valueFrom.resourceFieldRef.resource",
            "containers cannot read the resource",
        ),
        (
            "container",
            "env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['']\"}}}]",
            "env.0.valueFrom.fieldRef.fieldPath",
            "a variable cannot read the field",
        ),
        (
            "container",
            "securityContext: {runAsUser: 0, runAsNonRoot: true}",
            "securityContext.runAsNonRoot",
            "which runAsNonRoot forbids",
        ),
        (
            "container",
            "securityContext: {allowPrivilegeEscalation: false, capabilities: {add: [SYS_ADMIN]}}",
            "securityContext.allowPrivilegeEscalation",
            "excludes capability SYS_ADMIN",
        ),
        (
            "container",
            "securityContext: {seccompProfile: {type: Localhost}}",
            "securityContext.seccompProfile",
            "localhostProfile",
        ),
        (
            "container",
            "volumeMounts: [{name: a, mountPath: /a}, {name: b, mountPath: /a/}]",
            "volumeMounts",
            "have the path /a",
        ),
        (
            "container",
            "volumeMounts: [{name: a, mountPath: /a, subPath: b, subPathExpr: c}]",
            "volumeMounts.0.subPathExpr",
            "exclude each other",
        ),
        (
            "container",
            "volumeMounts: [{name: a, mountPath: /a, recursiveReadOnly: Enabled}]",
            "volumeMounts.0.recursiveReadOnly",
            "needs readOnly: true",
        ),
        (
            "pod",
            "volumes: [{name: a, emptyDir: {}}, {name: a, emptyDir: {}}]",
            "volumes",
            "two entries of volumes have the name a",
        ),
        (
            "pod",
            "volumes: [{name: a, downwardAPI: {items: [{path: b, fieldRef: {fieldPath: spec.nodeName}}]}}]",
            "volumes.0.downwardAPI.items.0.fieldRef.fieldPath",
            "a file cannot have the content of the field",
        ),
        (
            "pod",
            "volumes: [{name: a, downwardAPI: {items: [{path: b, resourceFieldRef: {resource: limits.cpu}}]}}]",
            "volumes.0.downwardAPI.items.0.resourceFieldRef",
            "needs a containerName",
        ),
        (
            "pod",
            "initContainers: [{name: a, image: b, lifecycle: {}}]",
            "initContainers.0.lifecycle",
            "only with restartPolicy: Always",
        ),
        (
            "pod",
            "initContainers: [{name: a, image: b}, {name: a, image: b}]",
            "containers",
            "two entries of containers have",
        ),
        (
            "pod",
            "containers: [{name: a, image: b, resources: {requests: {cpu: 2}, limits: {cpu: 1500m}}}]",
            "containers.0.resources.requests.cpu",
            "requests 2 of cpu, more than its limit 1500m",
        ),
        (
            "pod",
            "containers: [{name: a, image: b, env: [{name: A, value: b, valueFrom: {fieldRef: {fieldPath: a}}}]}]",
            "containers.0.env.0.value",
            "cannot have both value and valueFrom",
        ),
        (
            "pod",
            "containers: [{name: a, image: b, securityContext: {privileged: true, allowPrivilegeEscalation: false}}]",
            "containers.0.securityContext.allowPrivilegeEscalation",
            "excludes privileged",
        ),
        ("pod", "dnsPolicy: None", "dnsPolicy", "needs dnsConfig.nameservers"),
        (
            "pod",
            "{hostPID: true, shareProcessNamespace: true}",
            "shareProcessNamespace",
            "shareProcessNamespace and hostPID exclude each other",
        ),
        ("pod", "{hostIPC: true, hostUsers: false}", "hostUsers", "excludes hostPID and hostIPC"),
        ("pod", SPREAD % ", minDomains: 2", "topologySpreadConstraints.0.minDomains", "minDomains is valid only with"),
        (
            "pod",
            SPREAD % ", matchLabelKeys: [a]",
            "topologySpreadConstraints.0.matchLabelKeys",
            "needs a labelSelector",
        ),
        (
            "pod",
            SPREAD % "}, {maxSkew: 2, topologyKey: a, whenUnsatisfiable: ScheduleAnyway",
            "topologySpreadConstraints",
            "keep one",
        ),
        (
            "pod",
            NODES % "matchExpressions: [{key: a, operator: In}]",
            f"{NODE}.matchExpressions.0",
            "`In` needs values",
        ),
        (
            "pod",
            NODES % "matchExpressions: [{key: a, operator: Exists, values: [b]}]",
            f"{NODE}.matchExpressions.0.values",
            "`Exists` excludes values",
        ),
        (
            "pod",
            NODES % "matchExpressions: [{key: a, operator: Gt, values: [b]}]",
            f"{NODE}.matchExpressions.0",
            "`Gt` needs one whole number",
        ),
        (
            "pod",
            NODES % "matchFields: [{key: a, operator: In, values: [b]}]",
            f"{NODE}.matchFields.0",
            "`metadata.name`",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_reported_where_they_are_written(
    section: str, line: str, path: str, says: str
) -> None:
    _assert_reported(section, line, path, says)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("container", "env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]"),
        ("container", "env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['a']\"}}}]"),
        ("container", "env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.hugepages-2Mi}}}]"),
        ("container", "livenessProbe: {httpGet: {port: web}}\n    ports: [{containerPort: 1, name: web}]"),
        ("pod", "volumes: [{name: a, downwardAPI: {items: [{path: b, fieldRef: {fieldPath: metadata.labels}}]}}]"),
        ("pod", "containers: [{name: a, image: b, resources: {requests: {cpu: 1M}, limits: {cpu: 1Mi}}}]"),
        ("pod", NODES % "matchExpressions: [{key: a, operator: Exists}, {key: b, operator: Gt, values: ['1']}]"),
        ("pod", NODES % "matchFields: [{key: metadata.name, operator: In, values: [b]}]"),
        ("pod", "securityContext: {fsGroup: 1, runAsNonRoot: true, runAsUser: 1, seccompProfile: {type: Unconfined}}"),
    ],
)
def test_right_fields_are_taken(section: str, line: str) -> None:
    assert told(f"  {section}:\n    {line}\n") == []


def _assert_reported(section: str, line: str, path: str, says: str) -> None:
    found = told(f"  {section}:\n    {line}\n")
    assert any(f" kubernetes.{section}.{path}: " in one and says in one for one in found), found
    written = not path.endswith("containers") or path in line
    assert all(one.startswith(f"job.yaml:{8 + line.count(chr(10)) if written else 7}: ") for one in found), found


def test_each_form_is_of_a_field_that_kubernetes_has() -> None:
    types = values.all_types()
    named = {*values.FILLED, *values.MOST_ITEMS, *values.forms(), *values.key_forms()}
    named |= {f"{kind}.{field}" for kind in values.ONE_OF for field in values.ONE_OF[kind].split()}
    named |= {f"{kind}.{field}" for kind in types for field in values.required(kind)}
    assert [one for one in sorted(named) if one.partition(".")[2] not in types.get(one.partition(".")[0], {})] == []


def test_a_section_is_rendered_in_the_order_of_its_type_without_what_says_nothing() -> None:
    text = "  pod:\n    volumes: [{emptyDir: {sizeLimit: 2, medium: null}, name: a}]\n"
    text += "    hostAliases: []\n    affinity: {}\n    containers: [{image: b, name: c, env: []}]\n"
    assert json.dumps(read_text(JobConfig, SPEC + text, "job.yaml").config.kubernetes.pod) == json.dumps(
        {
            "containers": [{"name": "c", "image": "b"}],
            "volumes": [{"name": "a", "emptyDir": {"sizeLimit": "2"}}],
            "affinity": {},
        }
    )


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_any_pod_goes_round(kind: str) -> None:
    assert _go_round(kind, examples=8) >= 4


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_many_pods_of_each_kind_go_round(kind: str) -> None:
    accepted = _go_round(kind, examples=45)
    print(f"{kind}: {accepted} pods rendered, and read back")
    assert accepted >= 30


def _go_round(kind: str, examples: int) -> int:
    accepted = 0

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    @given(words=pods())
    def check(words: dict[str, Any]) -> None:
        nonlocal accepted
        if kind == "trainjob":
            words = {part: {k: v for k, v in words[part].items() if k in OF_TRAINJOB[part]} for part in words}
        for mode in ("ours", "plain"):
            job = _job(kind, mode, words)
            if find_problems(job, None, TARGETS[kind]):
                return
            text = make_plan(job, target=TARGETS[kind]).files["job.yaml"]
            (found,) = check_yaml("job.yaml", text)
            assert unknown(found["spec"], _schema(found["kind"])) == []
            for part, shown in zip(("pod", "container"), _rendered(found["spec"]), strict=True):
                for name, value in getattr(job.kubernetes, part).items():
                    assert name == "affinity" or _holds(shown.get(name), value), name
            again = import_job(text, "job.yaml")
            assert (again.job, again.left_out) == (job, [])
            assert make_plan(again.job, target=TARGETS[kind]).files["job.yaml"] == text
            if mode == "plain" and kind != "trainjob" and _is_no_template(words):
                _read_after_a_change(found, job)
        accepted += 1

    check()
    return accepted


def _rendered(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pod of the job, and its container that trains."""
    if "runtimePatches" in spec:
        (node,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod, trainer = node["template"]["spec"]["template"]["spec"], spec["trainer"]
        return pod, pod["containers"][0] | {"env": trainer["env"], "resources": trainer["resourcesPerNode"]}
    groups = spec.get("replicaSpecs") or list(spec["pytorchReplicaSpecs"].values())
    pod = groups[-1]["template"]["spec"]
    return pod, pod["containers"][0]


def _holds(shown: Any, said: Any) -> bool:
    """Whether all that is said is rendered, beside what is ours."""
    if isinstance(said, list):
        return isinstance(shown, list) and all(one in shown for one in said)
    if isinstance(said, dict):
        return isinstance(shown, dict) and all(_holds(shown.get(name), value) for name, value in said.items())
    return bool(shown == said)


def _is_no_template(words: dict[str, Any]) -> bool:
    """Whether nothing in it looks like a placeholder, which import asks a value for."""
    return not re.search(r"\$|\{\{|\{%|%|`", json.dumps(words))


def _read_after_a_change(found: dict[str, Any], job: JobConfig) -> None:
    """Of a file that somebody has changed, what is ours and what the user named are told apart."""
    found["metadata"]["labels"]["edited"] = "by-hand"
    text = to_yaml(found).replace("${rank}", "rank")
    assert ANNOTATION in text
    read = import_job(text, "job.yaml")
    assert any("edited" in one for one in read.left_out)
    again = read.job
    for part in ("pod", "container"):
        here, there = (_shown(getattr(one.kubernetes, part)) for one in (job, again))
        assert here == there
    assert again.overlay == job.overlay
    assert again.volumes == job.volumes


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    """What it says, but for what every job says: no empty parts, and no escalation."""
    found = copy.deepcopy(part)
    if found.get("securityContext", {}).get("allowPrivilegeEscalation") is False:
        del found["securityContext"]["allowPrivilegeEscalation"]
    found["affinity"] = {name: rule for name, rule in found.get("affinity", {}).items() if rule}
    return {name: value for name, value in found.items() if value != {}}


def _job(kind: str, mode: str, words: dict[str, Any]) -> JobConfig:
    document = {"name": "tiny", "script": "train.py", "image": "repo/train:1", "nodes": 2, "mode": mode}
    document["resources"] = {"accelerators": 1}
    document["volumes"] = [{"kind": "claim", "path": "/data", "claim": "fsx"}]
    only = {"kubeflow_api": kind} if TARGETS[kind] == "kubeflow" else {}
    return JobConfig.model_validate_json(json.dumps(document | {"working_dir": "/app", "kubernetes": words | only}))


@cache
def _schema(kind: str) -> dict[str, Any]:
    return SPECS[kind]()


def test_conditions_of_scheduling_are_in_each_term_of_an_affinity() -> None:
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in ("a", "b")]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    job = _job("hyperpod-eks", "plain", {"pod": {"affinity": affinity}})
    (found,) = read_all(make_plan(job, target="hyperpod-eks").files["job.yaml"])
    rules = found["spec"]["replicaSpecs"][0]["template"]["spec"]["affinity"]
    shown = rules["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    keys = [[one["key"].rpartition("/")[2] for one in term["matchExpressions"]] for term in shown]
    assert keys == [[own, "node-health-status", "deep-health-check-status"] for own in ("a", "b")]


def test_constraints_of_the_spec_come_after_the_one_that_keeps_pods_apart() -> None:
    zones = {"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    job = _job("hyperpod-eks", "plain", {"pod": {"topologySpreadConstraints": [zones]}})
    (found,) = read_all(make_plan(job, target="hyperpod-eks").files["job.yaml"])
    ours, theirs = found["spec"]["replicaSpecs"][0]["template"]["spec"]["topologySpreadConstraints"]
    assert (ours["topologyKey"], theirs) == ("kubernetes.io/hostname", zones)


def test_memory_of_another_name_at_dev_shm_takes_the_place_of_ours() -> None:
    words = {
        "pod": {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}]},
        "container": {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]},
    }
    job = _job("hyperpod-eks", "plain", words)
    assert find_problems(job, None, "hyperpod-eks") == []
    text = make_plan(job, target="hyperpod-eks").files["job.yaml"]
    assert len(re.findall("mountPath: /dev/shm", text)) == 1


def test_other_targets_name_each_field_that_they_do_not_use() -> None:
    job = _job("hyperpod-eks", "ours", {"pod": {"hostIPC": True}, "container": {"tty": True}})
    warnings = make_plan(job.model_copy(update={"volumes": ()}), target="local").warnings
    assert "kubernetes is ignored on local, including container.tty, pod.hostIPC" in warnings


def test_what_the_page_shows_of_pods_is_taken_for_a_p5(root: Path) -> None:
    page = (root / "docs" / "kubernetes.md").read_text()
    block = page.partition("## Pods in Kubernetes' own words")[2].partition("```yaml\n")[2].partition("```")[0]
    spec = "name: a\nscript: train.py\nimage: x:1\nworkers_per_node: 8\nresources: {instance_type: ml.p5.48xlarge}\n"
    job = read_text(JobConfig, spec + block, "job.yaml").config
    assert [str(problem) for problem in find_problems(job, None, "hyperpod-eks")] == []
