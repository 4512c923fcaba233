"""`overlay.kubernetes`: what the patches make of a job, and what is refused with file, line and path."""

from __future__ import annotations

from typing import Any

import pytest
from kubeflow_trainer_api.models import IoK8sApiCoreV1PodSpec

from hyperpod_ext.catalog.pod_fields import MERGE_KEYS, pod_types
from hyperpod_ext.config.files.load import read_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes.imports.import_job import import_job
from hyperpod_ext.jobs.kubernetes.overlays.merge import merged
from hyperpod_ext.jobs.kubernetes.schemas import check_yaml
from hyperpod_ext.jobs.plan import find_problems, make_plan

SPEC = "name: tiny\nscript: train.py\nimage: repo/train:1\nnodes: 2\nworking_dir: /app\n"
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node"}
EVERYTHING = """\
overlay:
  kubernetes:
    container:
      env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
      volumeMounts: [{name: more, mountPath: /more}]
      securityContext: {capabilities: {add: [IPC_LOCK]}}
    pod:
      volumes: [{name: more, emptyDir: {}}]
      tolerations: [{operator: Exists}]
      securityContext: {fsGroup: 1000}
"""


def job_of(overlay: str) -> JobConfig:
    return read_text(JobConfig, SPEC + overlay, "job.yaml").config


def told(text: str, target: str = "hyperpod-eks") -> list[str]:
    loaded = read_text(JobConfig, SPEC + text, "job.yaml")
    return [str(one) for one in loaded.locate(find_problems(loaded.config, None, target))]


def rendered(job: JobConfig, target: str) -> tuple[str, dict[str, Any]]:
    text = make_plan(job, target=target).files["job.yaml"]
    (found,) = check_yaml("job.yaml", text)
    return text, found


def test_a_job_for_eks_has_what_the_overlay_says_and_nothing_less() -> None:
    overlay = """\
overlay:
  kubernetes:
    container:
      lifecycle: {preStop: {exec: {command: [sh, -c, sync]}}}
      livenessProbe: {exec: {command: ["true"]}, periodSeconds: 60}
      envFrom: [{configMapRef: {name: settings}}]
    pod:
      shareProcessNamespace: true
      initContainers: [{name: fetch, image: repo/fetch:1}]
      containers: [{name: log, image: repo/log:1}]
      hostAliases: [{ip: 10.0.0.1, hostnames: [store]}]
    job:
      metadata: {labels: {team: vision}}
      spec: {runPolicy: {workloadMode: special}}
"""
    job = job_of(overlay)
    assert find_problems(job, None, "hyperpod-eks") == []
    text, found = rendered(job, "hyperpod-eks")
    pod = found["spec"]["replicaSpecs"][0]["template"]["spec"]
    plain = job.model_copy(update={"overlay": JobConfig.model_fields["overlay"].default})
    before = rendered(plain, "hyperpod-eks")[1]["spec"]["replicaSpecs"][0]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["worker", "log"]
    assert before["containers"][0].items() <= pod["containers"][0].items()
    assert pod["containers"][0]["envFrom"] == [{"configMapRef": {"name": "settings"}}]
    assert {k: v for k, v in pod.items() if k != "containers" and k in before} == {
        k: v for k, v in before.items() if k != "containers"
    }
    assert (pod["shareProcessNamespace"], found["spec"]["runPolicy"]["workloadMode"]) == (True, "special")
    assert found["metadata"]["labels"]["team"] == "vision"
    assert found["metadata"]["labels"]["hyperpod-ext/job"] == "tiny"
    assert IoK8sApiCoreV1PodSpec.from_dict(pod) is not None
    assert "# from overlay.kubernetes: container.lifecycle\n" in text
    assert "# from overlay.kubernetes: job.spec.runPolicy\n" in text


@pytest.mark.parametrize("api", sorted(CONTAINERS))
def test_a_job_for_kubeflow_has_it_too(api: str) -> None:
    job = job_of(f"kubernetes: {{kubeflow_api: {api}}}\n" + EVERYTHING)
    assert find_problems(job, None, "kubeflow") == []
    spec = rendered(job, "kubeflow")[1]["spec"]
    if api == "trainjob":
        node = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        pods = [node["template"]["spec"]["template"]["spec"]]
    else:
        pods = [role["template"]["spec"] for role in spec["pytorchReplicaSpecs"].values()]
        assert len(pods) == 2
    for pod in pods:
        (container,) = pod["containers"]
        assert container["name"] == CONTAINERS[api]
        assert "POD" in [one["name"] for one in container["env"]]
        assert [one["mountPath"] for one in container["volumeMounts"]][-1] == "/more"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["IPC_LOCK"]},
        }
        assert pod["tolerations"] == [{"operator": "Exists"}]


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
def test_import_gives_the_overlay_back(target: str) -> None:
    job = job_of(EVERYTHING)
    found = import_job(make_plan(job, target=target).files["job.yaml"], "job.yaml")
    assert (found.job, found.target, found.left_out) == (job, target, [])


@pytest.mark.parametrize(
    ("line", "path", "says"),
    [
        ("container: {command: [sh]}", "container.command", "starts the launcher"),
        ("container: {args: [x]}", "container.args", "starts the launcher"),
        ("container: {name: other}", "container.name", "by its name"),
        ("container: {image: a}", "container.image", "write `image`"),
        ("container: {env: [{name: RANK, value: '0'}]}", "container.env.0", "the launcher sets it"),
        ("container: {env: [{name: HPX_RUNTIME, $patch: delete}]}", "container.env.0", "the launcher sets it"),
        ("container: {env: [{name: MASTER_ADDR, value: a}]}", "container.env.0", "the launcher sets it"),
        ("container: {env: null}", "container.env", "cannot be removed"),
        ("container: {env: [{$patch: replace}]}", "container.env.0", "own variables"),
        ("container: {$patch: replace}", "container.$patch", "the job needs"),
        (
            "container: {volumeMounts: [{mountPath: /var/run/hyperpod-ext, name: a}]}",
            "container.volumeMounts.0",
            "secret",
        ),
        ("container: {lifecicle: {}}", "container.lifecicle", "did you mean `lifecycle`"),
        ("container: {tty: 'yes'}", "container.tty", "must be true or false"),
        (
            "container: {livenessProbe: {exec: {command: [1]}}}",
            "container.livenessProbe.exec.command.0",
            "must be text",
        ),
        ("container: {tty: true, $match: a}", "container.$match", "is not a known field"),
        ("container: {env: [{name: A, $patch: remove}]}", "container.env.0.$patch", "valid: replace, delete, merge"),
        ("container: {ports: [{containerPort: 8080, $patch: delete}]}", "container.ports.0", "a port of the job"),
        ("pod: {containers: [{name: worker, command: [sh]}]}", "pod.containers.0.command", "starts the launcher"),
        ("pod: {containers: [{$patch: replace}]}", "pod.containers.0", "container that trains"),
        ("pod: {containers: [{name: worker, $patch: delete}]}", "pod.containers.0.$patch", "the job needs"),
        ("pod: {containers: [{image: a}]}", "pod.containers.0", "has no name"),
        ("pod: {volumes: [{name: hyperpod-ext-secret, emptyDir: {}}]}", "pod.volumes.0", "secret"),
        ("pod: {volumes: null}", "pod.volumes", "cannot be removed"),
        ("pod: {restartPolicy: Always}", "pod.restartPolicy", "operator sets it"),
        ("pod: {nodeName: a}", "pod.nodeName", "on one node"),
        ("pod: {hostAliases: {}}", "pod.hostAliases", "must be a list"),
        ("job: {kind: Pod}", "job.kind", "--target"),
        ("job: {metadata: {name: a}}", "job.metadata.name", "write `name`"),
        ("job: {metadata: {annotations: null}}", "job.metadata.annotations", "cannot be removed"),
        (
            "job: {metadata: {labels: {hyperpod-ext/job: a}}}",
            "job.metadata.labels.hyperpod-ext/job",
            "finds the job by it",
        ),
        ("job: {spec: {nprocPerNode: '3'}}", "job.spec.nprocPerNode", "workers_per_node"),
        ("job: {spec: {replicaSpecs: [{name: nodes, replicas: 9}]}}", "job.spec.replicaSpecs.0.replicas", "`nodes`"),
        ("job: {spec: {replicaSpecs: [{name: b}]}}", "job.spec.replicaSpecs", "no replica spec"),
        ("job: {spec: {replicaSpecs: null}}", "job.spec.replicaSpecs", "cannot be removed"),
        ("job: {spec: {runPolicy: {nonsense: 1}}}", "job.spec.runPolicy.nonsense", "is not a known field"),
    ],
)
def test_what_would_break_a_job_is_refused_where_it_is_written(line: str, path: str, says: str) -> None:
    (found,) = told(f"overlay:\n  kubernetes:\n    {line}\n")
    assert found.startswith("job.yaml:8: ")
    assert f"overlay.kubernetes.{path}: " in found
    assert says in found


def test_a_trainjob_takes_only_what_its_runtime_may_be_changed_in() -> None:
    text = "kubernetes: {kubeflow_api: trainjob}\noverlay:\n  kubernetes:\n    container: {tty: true}\n"
    (found,) = told(text, "kubeflow")
    assert found.startswith("job.yaml:9: overlay.kubernetes.container.tty: is not a known field (valid: env,")


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": None, "d": 3}}, {"a": 1, "b": {"d": 3}}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}, {"name": "B"}]}, None),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        ({"args": ["a"]}, {"args": ["b"]}, {"args": ["b"]}),
        (
            {"volumes": [{"name": "a", "emptyDir": {}}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": []},
        ),
        (
            {"volumes": [{"name": "a", "emptyDir": {}}]},
            {"volumes": [{"name": "a", "hostPath": {"path": "/a"}, "$retainKeys": ["name", "hostPath"]}]},
            {"volumes": [{"name": "a", "hostPath": {"path": "/a"}}]},
        ),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 2}]}, None),
        ({"nodeSelector": {"a": "b"}}, {"nodeSelector": {"$patch": "replace", "c": "d"}}, {"nodeSelector": {"c": "d"}}),
    ],
)
def test_lists_are_merged_as_kubernetes_does(before: Any, patch: Any, after: Any) -> None:
    expected = {
        "env": {"env": [{"name": "A", "value": "2"}, {"name": "B"}]},
        "ports": {"ports": [{"containerPort": 1}, {"containerPort": 2}]},
    }
    assert merged(before, patch) == (after or expected[next(iter(before))])


def test_what_a_pod_may_say_is_what_kubernetes_publishes() -> None:
    import pod_schema  # which imports all models of Kubernetes: a second that only this test needs

    assert pod_schema.FILE.read_text(encoding="utf-8") == pod_schema.text(pod_schema.pod_schema())
    assert pod_schema.TEXTS.read_text(encoding="utf-8") == pod_schema.text(pod_schema.pod_texts())
    lists = {name for fields in (pod_types()["PodSpec"], pod_types()["Container"]) for name in fields}
    assert set(MERGE_KEYS) <= lists


@pytest.mark.parametrize(
    ("where", "context", "spec", "said"),
    [
        (
            "pod",
            "runAsUser: 1000",
            "",
            "runAsUser: user 1000 cannot read the job's secret, because the pod has no fsGroup",
        ),
        (
            "container",
            "runAsUser: 1000",
            "",
            "runAsUser: user 1000 cannot read the job's secret, because the pod has no fsGroup",
        ),
        (
            "pod",
            "runAsNonRoot: true",
            "",
            "runAsNonRoot: a user other than root cannot read the job's secret, because the pod has no fsGroup",
        ),
        (
            "pod",
            "fsGroup: 0, runAsUser: 1000",
            "",
            "runAsUser: user 1000 cannot read the job's secret, because the pod's fsGroup is 0",
        ),
        ("pod", "fsGroup: 1000, runAsUser: 1000", "", ""),
        ("container", "runAsUser: 1000", "kubernetes: {pod: {securityContext: {fsGroup: 1000}}}", ""),
        ("pod", "runAsNonRoot: true, runAsUser: 0", "", ""),
        ("pod", "runAsUser: 1000", "mode: plain", ""),
        (
            "pod",
            "runAsUser: 1000",
            "mode: plain\nvolumes: [{kind: secret, path: /keys, secret: a}]",
            "runAsUser: user 1000 cannot read the secret at /keys, because the pod has no fsGroup",
        ),
    ],
)
def test_a_user_who_could_not_read_a_secret_is_refused(where: str, context: str, spec: str, said: str) -> None:
    found = told(f"overlay: {{kubernetes: {{{where}: {{securityContext: {{{context}}}}}}}}}\n{spec}\n")
    assert len(found) == bool(said)
    assert all(one.startswith(f"job.yaml:6: overlay.kubernetes.{where}.securityContext.{said}") for one in found)


@pytest.mark.parametrize(("mode", "path", "refused"), [("ours", "/var/run", 1), ("plain", "/var/run", 0)])
def test_only_a_job_with_a_secret_refuses_mounts_over_it(mode: str, path: str, refused: int) -> None:
    mounts = f"[{{name: a, mountPath: {path}}}]"
    found = told(f"mode: {mode}\noverlay: {{kubernetes: {{container: {{volumeMounts: {mounts}}}}}}}\n")
    assert len([one for one in found if "would hide the job's secret" in one]) == refused, found
