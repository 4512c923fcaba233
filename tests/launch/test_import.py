"""Jobs that others wrote, as specs: what a spec can say of them is taken over, the rest is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command import call_hp_ext as hp_ext

from hyperpod_ext.config.job import JobConfig
from hyperpod_ext.config.load import load_text
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.launch.kubernetes.import_job import import_job

FOREIGN = """\
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  name: &name llama
  namespace: hyperpod-ns-team
  labels: {kueue.x-k8s.io/queue-name: hyperpod-ns-team-localqueue, kueue.x-k8s.io/priority-class: high, team: nlp}
  annotations: {kueue.x-k8s.io/podset-required-topology: topology.k8s.aws/network-node-layer-3}
spec:
  nprocPerNode: "8"
  replicaSpecs:
    - name: pods
      replicas: 16
      spares: 1
      template:
        spec:
          hostNetwork: true
          schedulerName: special
          nodeSelector: {beta.kubernetes.io/instance-type: ml.p5.48xlarge, rack: a}
          tolerations: [{key: gpu, value: "yes", effect: NoSchedule}]
          containers:
            - name: train
              image: repo/train:1
              imagePullPolicy: Always
              securityContext: {privileged: true}
              livenessProbe: {exec: {command: [true]}}
              ports: [{containerPort: 8080}]
              resources:
                limits: {nvidia.com/gpu: 8, hugepages-2Mi: 5120Mi, vpc.amazonaws.com/efa: 32}
                requests: {nvidia.com/gpu: 8, hugepages-2Mi: 5120Mi, memory: 32000Mi, cpu: 500m}
              env:
                - {name: JOB, value: *name}
                - {name: DIR, value: "/data/$(JOB)"}
                - {name: COST, value: "5$$"}
                - {name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
                - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
              command: ["/bin/sh"]
              args:
                - "-c"
                - |
                  mkdir -p /logs
                  exec hyperpodrun --nproc_per_node=8 --log_dir /logs \\
                    train.py --config 'a b' --steps=4
              volumeMounts:
                - {name: data, mountPath: /data, readOnly: true}
                - {name: dshm, mountPath: /dev/shm}
                - {name: odd, mountPath: /odd}
          volumes:
            - {name: data, persistentVolumeClaim: {claimName: fsx-claim}}
            - {name: dshm, emptyDir: {medium: Memory, sizeLimit: 64Gi}}
            - {name: odd, nfs: {server: x}}
  runPolicy:
    cleanPodPolicy: None
    jobMaxRetryCount: 50
    restartPolicy: {numRestartBeforeFullJobRestart: 3, evalPeriodSeconds: 21600, maxFullJobRestarts: 1}
    ttlSecondsAfterFinished: 60
    someNewField: 1
    logMonitoringConfiguration:
      - {name: Loss, logPattern: ".*loss: (.*)", metricThreshold: 2.5, operator: gt, faultOnMatch: true}
"""


def test_what_a_spec_can_say_is_taken_over() -> None:
    job = import_job(FOREIGN, "job.yaml").job
    assert (job.name, job.nodes, job.workers_per_node, job.spares, job.mode) == ("llama", 16, 8, 1, "plain")
    assert (job.script, job.args) == ("train.py", ("--config", "a b", "--steps=4"))
    assert job.scheduling.queue == "hyperpod-ns-team-localqueue"
    assert job.scheduling.priority == "high"
    assert job.scheduling.topology is not None
    assert job.scheduling.topology.required
    assert job.scheduling.node_selector == {"rack": "a"}
    assert job.scheduling.tolerations[0].operator == "Equal"
    asked = job.resources
    assert (asked.instance_type, asked.accelerators, asked.efa) == ("ml.p5.48xlarge", 8, 32)
    assert (asked.cpus, asked.memory_mib, asked.hugepages_mib) == (0.5, 32000, 5120)
    assert job.env == {"JOB": "llama", "DIR": "/data/$(JOB)", "COST": "5$"}
    assert job.kubernetes.secret_env[0].secret == "hub"
    assert (job.kubernetes.privileged, job.kubernetes.host_network, job.kubernetes.clean_pods) == (True, True, "none")
    assert job.kubernetes.namespace == "hyperpod-ns-team"
    assert (job.shared_memory_mib, job.volumes[0].path) == (65536, "/data")
    assert (job.relaunch.max_process_restarts, job.relaunch.after_restarts, job.relaunch.max_times) == (50, 3, 1)
    assert (job.timeouts.keep_s, job.log_rules[0].threshold, job.log_rules[0].fault_on_match) == (60, 2.5, True)
    assert job.labels == {"team": "nlp"}


def test_what_a_spec_cannot_say_is_told() -> None:
    assert import_job(FOREIGN, "job.yaml").left_out == [
        "spec.runPolicy.someNewField",
        "what the shell does before it starts the script",
        "variable DIR: it refers to others, which are not replaced any more",
        "variable POD: its value comes from fieldRef",
        "volume odd",
        "pod.schedulerName",
        "container.livenessProbe",
    ]


def test_the_command_prints_a_spec_that_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "foreign.yaml"
    file.write_text(FOREIGN)
    done = hp_ext("import", file)
    assert done.code == 0
    assert "not carried over: volume odd" in done.stderr
    assert load_text(JobConfig, done.stdout) == import_job(FOREIGN, "job.yaml").job


def test_ours_comes_back_letter_for_letter_until_it_is_changed(root: Path) -> None:
    file = root / "examples" / "04-hyperpod-eks" / "rendered" / "elastic" / "job.yaml"
    found = import_job(file.read_text(), "job.yaml")
    assert found.left_out == []
    assert found.job.node_groups[1].pod_priority_class == "low-priority"
    changed = file.read_text().replace("minReplicas: 2", "minReplicas: 1")
    again = import_job(changed, "job.yaml")
    assert again.job.elastic is not None
    assert again.job.elastic.min_nodes == 1
    assert again.left_out[-1].startswith("the spec in the annotations: the file was changed")


def test_a_kubeflow_job_of_others() -> None:
    replica = {
        "template": {"spec": {"containers": [{"name": "pytorch", "image": "i:1", "command": ["python", "a.py", "x"]}]}}
    }
    roles = {"Master": {"replicas": 1} | replica, "Worker": {"replicas": 3} | replica}
    document = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}}
    found = import_job(yaml.safe_dump(document | {"spec": {"pytorchReplicaSpecs": roles}}), "job.yaml")
    assert (found.job.nodes, found.job.script, found.job.args, found.target) == (4, "a.py", ("x",), "kubeflow")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        ("kind: Pod", "holds no training job, but Pod"),
        ("", "but nothing"),
        (FOREIGN.replace("replicas: 16", "replicas: 0"), "nodes"),
        (FOREIGN.replace("name: &name llama", "name: &name Llama_"), "name"),
    ],
)
def test_what_is_no_job_is_an_error_that_says_so(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        import_job(text, "job.yaml")
