"""Objects as people and API servers write them: each kind is read for what it is, or refused for it."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import make_plan

JOB = """\
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata: {name: tiny}
spec:
  nprocPerNode: "8"
  replicaSpecs:
    - name: pods
      replicas: 2
      template:
        spec:
          containers:
            - name: p
              image: repo/a
              command: [hyperpodrun, --nproc_per_node=8, /a/t.py]
"""
TRAIN = """\
kind: TrainJob
metadata: {name: a}
spec:
  runtimeRef: {name: torch-of-ours}
  activeDeadlineSeconds: 600
  suspend: true
  trainer:
    image: repo/a
    numNodes: 2
    numProcPerNode: 4
    command: [torchrun]
    args: [/a/t.py, --x]
    env: [{name: A, value: "1"}, {name: B, valueFrom: {fieldRef: {fieldPath: metadata.name}}}, {name: HPX_C, value: x},
          {name: MASTER_ADDR, value: a}, {name: HPX_PORT_BASE, value: "30000"}]
    resourcesPerNode: {limits: {nvidia.com/gpu: 4}}
"""


def test_a_trainjob_stays_one() -> None:
    found = import_file(TRAIN, "a.yaml")
    job = found.job
    assert (job.kubernetes.kubeflow_api, job.kubernetes.training_runtime) == ("trainjob", "torch-of-ours")
    assert (job.nodes, job.workers_per_node, job.env, job.timeouts.run_s) == (
        2,
        4,
        {"A": "1", "HPX_PORT_BASE": "30000"},
        600,
    )
    assert job.kubernetes.suspend
    named = "\n".join(found.left_out)
    assert [one["name"] for one in job.kubernetes.container["env"]] == ["B"]
    assert "variable B" not in named
    assert "variable HPX_C: the launcher sets it" in named
    assert "variable MASTER_ADDR: the launcher sets it" in named
    assert "runtimeRef" not in named
    assert "trainer.image" not in named


PATCHED = """\
kind: TrainJob
metadata: {name: tiny}
spec:
  runtimeRef: {name: torch-distributed}
  trainer: {image: repo/a, numNodes: 2, numProcPerNode: 8, command: [torchrun, /t.py]}
  runtimePatches:
    - manager: example.com/team
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    backoffLimit: 3
                    template:
                      metadata: {annotations: {c: d}}
                      spec:
                        serviceAccountName: trainer
                        nodeSelector: {pool: p5}
                        tolerations: [{key: x, effect: NoSchedule}]
                        securityContext: {fsGroup: 1000}
                        volumes: [{name: d, persistentVolumeClaim: {claimName: fsx}}]
                        containers: [{name: node, volumeMounts: [{name: d, mountPath: /data}]}]
"""


def test_patches_of_the_runtime_are_carried_or_named() -> None:
    found = import_file(PATCHED, "a.yaml")
    job = found.job
    assert (job.kubernetes.service_account, job.scheduling.node_selector) == ("trainer", {"pool": "p5"})
    assert [(one.key, one.operator) for one in job.scheduling.tolerations] == [("x", "Equal")]
    assert [one.path for one in job.volumes] == ["/data"]
    assert job.annotations == {"c": "d"}
    assert "securityContext" in job.kubernetes.pod
    lost = [one.split(": ")[1].rpartition(".")[2] for one in found.left_out]
    assert sorted(lost) == ["backoffLimit", "manager"]


@pytest.mark.parametrize("broken", ["containers: [null]", "containers: 3", "volumes: [x]", "tolerations: [[]]"])
def test_a_patch_that_is_no_patch_is_refused(broken: str) -> None:
    head = PATCHED[: PATCHED.index("serviceAccountName")]
    with pytest.raises(ConfigError, match="must be a list of mappings"):
        import_file(f"{head}{broken}\n", "a.yaml")


def test_what_an_api_server_adds_is_nobodys_loss() -> None:
    live = JOB.replace(
        "{name: tiny}", '{name: tiny, uid: x, resourceVersion: "3", generation: 1, managedFields: [{a: b}]}'
    )
    found = import_file(live + "status: {conditions: [{type: Running}]}\n", "a.yaml")
    assert (found.job.name, found.left_out) == ("tiny", [])


def test_numbers_are_those_of_kubernetes() -> None:
    resources = "              resources: {requests: {memory: 1e9, cpu: 250m}}\n"
    volumes = "          volumes: [{name: c, configMap: {name: m, defaultMode: 0755}}]\n"
    mounts = "              volumeMounts: [{name: c, mountPath: /c}]\n"
    found = import_file(JOB + resources + mounts + volumes, "a.yaml")
    assert (found.job.resources.memory_mib, found.job.resources.cpus) == (953, 0.25)
    named = "\n".join(found.left_out)
    assert "memory: is changed" in named
    assert "493" in named or found.job.volumes == ()  # octal, as every YAML reader of Kubernetes has it


def test_a_job_of_no_replicas_is_said_to_have_one() -> None:
    assert "nodes is 1" in "\n".join(import_file(JOB.replace("replicas: 2", "replicas: 0"), "a.yaml").left_out)


def test_a_name_that_the_server_completes_is_a_name() -> None:
    found = import_file(JOB.replace("name: tiny", "generateName: tiny-"), "a.yaml")
    assert found.job.name == "tiny"
    assert "metadata.generateName" in "\n".join(found.left_out)


def test_commands_of_probes_are_no_templates() -> None:
    probe = "              livenessProbe: {exec: {command: [sh, -c, 'test -f $READY']}}\n"
    assert import_file(JOB + probe, "a.yaml").left_out == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("JobSet", "a set of batch jobs"),
        ("RayJob", "a job whose workers Ray starts"),
        ("TrainingRuntime", "a runtime that TrainJobs refer"),
    ],
)
def test_other_kinds_are_refused_for_what_they_are(kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        import_file(JOB.replace("HyperPodPyTorchJob", kind), "a.yaml")


@pytest.mark.parametrize("retries", ["", ', sagemaker.amazonaws.com/job-max-retry-count: "2"'])
def test_auto_resume_is_kept(retries: str) -> None:
    notes = f'annotations: {{sagemaker.amazonaws.com/enable-job-auto-resume: "true"{retries}}}'
    container = "{name: a, image: repo/a, command: [torchrun, --nproc_per_node=8, /t.py]}"
    replicas = f"pytorchReplicaSpecs: {{Worker: {{replicas: 2, template: {{spec: {{containers: [{container}]}}}}}}}}"
    text = f"kind: PyTorchJob\nmetadata: {{name: a, {notes}}}\nspec: {{{replicas}}}\n"
    found = import_file(text, "a.yaml")
    rendered = make_plan(found.job, target="kubeflow").files["job.yaml"]
    assert 'enable-job-auto-resume: "true"' in rendered
    assert ("job-max-retry-count" in rendered) == bool(retries)
    assert "resume" not in "\n".join(found.left_out)
