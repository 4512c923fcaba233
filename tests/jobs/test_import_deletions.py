"""No part of a file is dropped in silence: without it, the spec is another, or the report."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from deletions import deletions
from public_jobs import PUBLIC

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.sagemaker.request import training_job_request

pytest.importorskip("tree_sitter_bash")
EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = PUBLIC.parent / "cases" / "specs"
SAMPLE = 24
"""Deletions of a file in the fast tests."""

SBATCH = """\
#!/bin/bash -l
#SBATCH --job-name=tiny -N 2 --exclusive
#SBATCH --ntasks-per-node=8 --cpus-per-task=12
#SBATCH --gpus-per-task=1
#SBATCH --time=1:00:00 --export=ALL --chdir=.
set -euo pipefail
source ~/conda/etc/profile.d/conda.sh
module load cuda
conda activate llm
UNREAD=1
SIZE=7b
SIZE=8b
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK NCCL_DEBUG=INFO
HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
mkdir -p logs
ARGS=(--model llama --lr 1e-4)
RESUME=""
if [ -d /opt/sagemaker_cluster ]; then
    echo "on HyperPod"
    RESUME=--auto-resume=1
fi
if [ "$HEAD" = node-1 ]; then NODE=1; else echo other; fi
for i in 1 2; do
    python check.py $i > check.$i
done
run() { export RUN=$1; }
run "$SIZE"
cat > settings.json <<END
{"steps": 4}
END
srun -l --mpi=pmix $RESUME --gpu-bind=single:1 python -u train.py "${ARGS[@]}" --size $SIZE | tee log
echo "done: $?"
"""
TORCHRUN = """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --container-image=/img/a.sqsh
#SBATCH --container-mounts=/d:/d,/e:/e:ro
T=(--nproc_per_node=8 --nnodes=$SLURM_JOB_NUM_NODES --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d --max_restarts=0)
srun --kill-on-bad-exit=1 --nodes=1 bash -c "cd /w && export A=1; echo start; torchrun ${T[*]} t.py --lr 1"
"""
PODS = """\
apiVersion: v1
kind: Service
metadata: {name: store, labels: {app: store}}
spec: {ports: [{port: 2379, protocol: TCP}], selector: {app: store}}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: tiny, namespace: team, labels: {app: tiny, kueue.x-k8s.io/queue-name: q}}
spec:
  nprocPerNode: "8"
  runPolicy: {backoffLimit: 3, cleanPodPolicy: None, schedulingPolicy: {minAvailable: 2}}
  pytorchReplicaSpecs:
    Master: &one
      replicas: 1
      restartPolicy: OnFailure
      template:
        metadata: {annotations: {note: x}}
        spec:
          serviceAccountName: trainer
          hostIPC: true
          nodeSelector: {pool: p5}
          tolerations: [{key: a, operator: Equal, value: b}, {key: c, operator: Exists, effect: NoSchedule}]
          initContainers: [{name: fetch, image: busybox, args: [a, b]}]
          containers:
            - name: pytorch
              image: repo/a:1
              imagePullPolicy: Always
              env: [{name: A, value: "1"}, {name: B, value: $(A)/b}, {name: EMPTY, value: ""}]
              ports: [{containerPort: 23456, name: pytorchjob-port}]
              securityContext: {capabilities: {add: [IPC_LOCK]}}
              resources: {requests: {cpu: 8, nvidia.com/gpu: 8}, limits: {nvidia.com/gpu: 8, memory: 64Gi}}
              volumeMounts: [{name: d, mountPath: /data, readOnly: true}, {name: shm, mountPath: /dev/shm}]
              command: [bash, -c]
              args:
                - |
                  set -e
                  echo start
                  export C=1
                  UNREAD=2
                  cd /w
                  ls -l | head
                  torchrun --nproc_per_node=8 --nnodes=2 --rdzv_backend=c10d \\
                    --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py --lr 1
          volumes: [{name: d, persistentVolumeClaim: {claimName: fsx}}, {name: shm, emptyDir: {medium: Memory}}]
    Worker:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - {name: pytorch, image: repo/a:1, command: [torchrun, --nproc_per_node=8, train.py, --lr, "1"]}
"""
TRAIN_JOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tiny, namespace: team}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    image: repo/a:1
    numNodes: 2
    numProcPerNode: 8
    command: [torchrun, /t.py]
    env: [{name: A, value: "1"}]
    resourcesPerNode: {limits: {nvidia.com/gpu: 8}}
  runtimePatches:
    - manager: example.com/team
      trainingRuntimeSpec:
        template:
          metadata: {labels: {a: b}}
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
                        tolerations: [{key: x, operator: Exists}]
                        volumes: [{name: d, persistentVolumeClaim: {claimName: fsx}}]
                        containers: [{name: node, volumeMounts: [{name: d, mountPath: /data}]}]
"""
HYP = """\
template: hyp-pytorch-job
version: "1.1"
job_name: elastic
namespace:
image: repo/train:1
command: '[hyperpodrun, --nproc_per_node=8, /t.py]'
environment: {A: "1", EMPTY: ""}
label_selector: {team: a}
instance_type: ml.p5.48xlarge
tasks_per_node: 8
replica_count: 4
max_replica_count: 8
elastic_replica_increment_step: 2
elastic_scale_up_snooze_time_in_seconds: 600
accelerators: 8
accelerators_limit: 8
vcpu_limit: 180
efa: 32
deep_health_check_passed_nodes_only: false
scheduler_type: volcano
required_topology: topology.k8s.aws/network-node-layer-3
max_retry: 3
volume:
  - {name: d, type: pvc, mount_path: /data, claim_name: fsx, read_only: true}
  - {name: h, type: hostPath, mount_path: /host, path: /mnt}
unknown: 1
"""
SOURCE = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket-a/train", "S3DataDistributionType": "FullyReplicated"}
REQUEST = json.dumps(
    {
        "TrainingJobName": "tiny-20261121-130000",
        "RoleArn": "arn:aws:iam::123456789012:role/r",
        "AlgorithmSpecification": {
            "TrainingImage": "repo/image:1",
            "TrainingInputMode": "File",
            "MetricDefinitions": [{"Name": "loss", "Regex": "x"}],
        },
        "HyperParameters": {
            "sagemaker_program": '"train.py"',
            "sagemaker_submit_directory": '"s3://bucket-a/code.tar.gz"',
            "sagemaker_torch_distributed_enabled": "true",
            "sagemaker_instance_type": '"ml.p4d.24xlarge"',
            "sagemaker_container_log_level": "20",
            "lr": "0.001",
        },
        "InputDataConfig": [
            {"ChannelName": "a", "DataSource": {"S3DataSource": SOURCE}},
            {"ChannelName": "b", "DataSource": {"S3DataSource": SOURCE}, "ShuffleConfig": {"Seed": 7}},
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://bucket-a/out", "CompressionType": "GZIP"},
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "EnableManagedSpotTraining": False,
        "CheckpointConfig": {"S3Uri": "s3://bucket-a/ck", "LocalPath": "/opt/ml/checkpoints"},
        "ProfilerConfig": {"S3OutputPath": "s3://bucket-a/prof", "ProfilingIntervalInMilliseconds": 500},
        "DebugHookConfig": {"S3OutputPath": "s3://bucket-a/debug"},
        "Tags": [{"Key": "a", "Value": "b"}],
    }
)
FILES = {"sbatch": SBATCH, "torchrun": TORCHRUN, "pods": PODS, "train job": TRAIN_JOB, "hyp": HYP, "request": REQUEST}


def outcome(text: str, name: str) -> object:
    """The spec as it is written, and the report; or the refusal."""
    try:
        found = import_file(text, name)
    except ConfigError as error:
        return str(error)
    return found.to_yaml(), found.target, found.left_out, found.notes


def in_silence(text: str, name: str, most: int | None = None) -> list[str]:
    """Parts of the file, at most so many, that can go without anything in spec or report being another."""
    whole = outcome(text, name)
    if isinstance(whole, str):
        return []  # refused, so that nothing of it is used
    parts = list(deletions(text))
    if most is not None and len(parts) > most:
        parts = random.Random(name).sample(parts, most)
    return [f"{name}: {part}" for part, copy in parts if outcome(copy, name) == whole]


def rendered() -> dict[str, str]:
    """Files that we have rendered ourselves."""
    found = {
        str(file.relative_to(EXAMPLES)): file.read_text() for file in sorted(EXAMPLES.rglob("rendered/*/**/job.*"))
    }
    for file in sorted(EXAMPLES.rglob("rendered/sagemaker/*.json")):
        found[str(file.relative_to(EXAMPLES))] = file.read_text()
    return found


def public() -> list[Path]:
    return [file for file in [*sorted(PUBLIC.rglob("*__*")), *sorted(CASES.glob("[hs][!p]*/*"))] if file.is_file()]


def filled(text: str) -> str:
    """A template of the shell with a value for each of its placeholders; files without any stay as they are."""
    if text.startswith("#!") or "#SBATCH" in text or "{{" in text or text.startswith("{"):
        return text
    own = set(re.findall(r"name: (\w+)\s", text))
    return re.sub(
        r"(?<!\$)\$(?:\{(\w+)(?::?-[^{}]*)?\}|([A-Za-z_]\w*))",
        lambda match: match[0] if (match[1] or match[2]) in own else "4",
        text,
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_carried_before_parts_of_it_are_taken(name: str) -> None:
    assert import_file(FILES[name], name).job.words


@pytest.mark.parametrize("name", FILES)
def test_no_part_of_a_file_goes_in_silence(name: str) -> None:
    assert in_silence(FILES[name], name, SAMPLE) == []


def test_no_part_of_a_file_of_ours_goes_in_silence() -> None:
    assert len(rendered()) >= 8
    assert [one for name, text in rendered().items() for one in in_silence(text, name, 5)] == []


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"published files are not in the repository: {PUBLIC} is not here")
def test_few_parts_of_published_files_go_nowhere_in_silence() -> None:
    assert [one for file in public() for one in in_silence(filled(file.read_text()), file.name, 2)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*FILES, *rendered()])
def test_no_part_at_all_goes_in_silence(name: str) -> None:
    assert in_silence((FILES | rendered())[name], name) == []


@pytest.mark.thorough
@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"published files are not in the repository: {PUBLIC} is not here")
@pytest.mark.parametrize("file", public(), ids=lambda file: file.name)
def test_no_part_at_all_of_a_published_file_goes_in_silence(file: Path) -> None:
    assert in_silence(filled(file.read_text()), file.name) == []


def test_a_request_of_ours_that_lost_a_member_says_so() -> None:
    job = JobConfig.model_validate_json(
        json.dumps(
            {
                "name": "tiny",
                "script": "train.py",
                "mode": "plain",
                "image": "repo/image:1",
                "resources": {"instance_type": "ml.p5.48xlarge"},
                "sagemaker": {"role": "arn:aws:iam::123456789012:role/r", "output": "s3://bucket-a/out"},
            }
        )
    )
    assert in_silence(json.dumps(training_job_request(job)), "request.json") == []
