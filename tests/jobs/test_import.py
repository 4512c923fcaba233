"""sbatch files and CreateTrainingJob requests become specs again: ours letter for letter, others as far as it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call_hp_ext
from training_jobs import CASES, V2_ALONE, job

from hyperpod_ext.config.files.load import load_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.sagemaker.request import submitted_as, training_job_request
from hyperpod_ext.jobs.slurm.script import job_script

FOREIGN = """\
#!/bin/bash
#SBATCH --job-name=My_Train
#SBATCH -N 4
#SBATCH -p dev --exclusive
#SBATCH --time=1-02:00:00
#SBATCH --mail-type=END
#SBATCH --output=logs/%x.out
source setup.sh
srun --auto-resume=1 -l --container-image /fsx/a.sqsh torchrun --nnodes=4 --nproc_per_node=8 \\
    --rdzv_id=1 train.py --steps 40
"""


@pytest.mark.parametrize("name", CASES | V2_ALONE)
def test_a_request_becomes_the_job_that_it_was_made_from(name: str) -> None:
    job = JobConfig.model_validate_json(json.dumps((CASES | V2_ALONE)[name]))
    request = submitted_as(training_job_request(job), "tiny-gpt-20261121-130000")
    found = import_file(json.dumps(request), "request.json")
    assert found.left_out == []
    again = submitted_as(training_job_request(found.job), "tiny-gpt-20261121-130000")
    assert again == request
    if not job.labels and not job.node_groups and job.mode == "ours":
        assert found.job == job


def test_the_archive_of_an_isolated_job_comes_back() -> None:
    isolated = job(sagemaker={"network_isolation": True, "code": "s3://bucket/code.tar.gz"})
    assert import_file(json.dumps(training_job_request(isolated)), "request.json").job == isolated


def test_a_request_of_others_says_what_is_lost() -> None:
    request = training_job_request(JobConfig.model_validate_json(json.dumps(CASES["torchrun alone"])))
    request |= {"MlflowConfig": {"MlflowResourceArn": "x"}}
    found = import_file(json.dumps(request), "request.json")
    changed = "request.json:1: Environment.HPX_SPEC: the request was edited after hp-ext wrote it"
    lost = "request.json:1: MlflowConfig.MlflowResourceArn: is not carried: a spec has no such field"
    assert found.left_out == [changed, lost]
    assert found.job.args == ("--steps", "40", "--lr", "0.1")


def test_our_sbatch_becomes_the_job_that_it_was_made_from(root: Path) -> None:
    job = load_text(JobConfig, (root / "examples" / "05-slurm" / "job.yaml").read_text())
    found = import_file(job_script(job), "job.sbatch")
    assert (found.job, found.left_out, found.target) == (job, [], "hyperpod-slurm")


def test_our_sbatch_that_was_changed_is_read_as_it_is_now(root: Path) -> None:
    job = load_text(JobConfig, (root / "examples" / "05-slurm" / "job.yaml").read_text())
    found = import_file(job_script(job).replace("--nodes=2", "--nodes=3"), "job.sbatch")
    assert found.job.nodes == 3
    assert "edited after hp-ext wrote it" in found.left_out[0]


def test_an_sbatch_of_others_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(FOREIGN)
    done = call_hp_ext("import", "train.sbatch", cwd=tmp_path)
    assert done.code == 0, done.stderr
    job = load_text(JobConfig, done.stdout)
    assert (job.name, job.nodes, job.workers_per_node, job.image) == ("my-train", 4, 8, "/fsx/a.sqsh")
    assert (job.script, job.args, job.mode) == ("train.py", ("--steps", "40"), "plain")
    assert (job.scheduling.queue, job.timeouts.run_s) == ("dev", 93600)
    assert job.slurm.sbatch == {"mail-type": "END"}
    assert "not carried over: train.sbatch:7: --output=logs/%x.out" in done.stderr


@pytest.mark.parametrize(
    ("time", "seconds"), [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-1", 176400), ("2-01:30", None)]
)
def test_times_are_read_as_sbatch_reads_them(time: str, seconds: int | None) -> None:
    found = import_file(f"#!/bin/sh\n#SBATCH --time={time}\nsrun torchrun train.py\n", "a.sbatch")
    if seconds is not None:
        assert found.job.timeouts.run_s == seconds


def test_what_is_no_job_is_told() -> None:
    with pytest.raises(ConfigError):
        import_file('{"a": 1}', "a.json")
    with pytest.raises(ConfigError, match="Tags"):
        import_file('{"TrainingJobName": "a", "Tags": [{"Name": "x"}], "HyperParameters": {"a": null}}', "a.json")
    with pytest.raises(ConfigError, match="script"):
        import_file('{"TrainingJobName": "a"}', "a.json")


HYP = """\
# Template type
template: hyp-pytorch-job
version: 1.1

job_name: my-train
image: 1.dkr.ecr.us-west-2.amazonaws.com/train:1
namespace: team-a
command: [hyperpodrun, --nproc_per_node=8, /opt/train.py]
args: ["--steps", "40"]
environment: {NCCL_DEBUG: INFO, TEXT: 'say "hi"'}
pull_policy: IfNotPresent
instance_type: ml.p5.48xlarge
node_count: 4
tasks_per_node: auto
label_selector: {team: a}
deep_health_check_passed_nodes_only: true
scheduler_type: volcano
queue_name: team-queue
priority: high
accelerators: 8
vcpu: 90.5
memory: 100
memory_limit: 120
max_retry: 3
volume:
  - {name: data, type: hostPath, mount_path: /data, path: /mnt/data}
  - {name: out, type: pvc, mount_path: /out, claim_name: out-claim, read_only: 'true'}
service_account_name: trainer
preferred_topology: topology.k8s.aws/network-node-layer-3
required_topology:
"""


def test_a_config_of_hyp_becomes_a_spec_and_nothing_of_it_is_lost_in_silence(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(HYP)
    done = call_hp_ext("import", "config.yaml", cwd=tmp_path)
    assert done.code == 0, done.stderr
    job = load_text(JobConfig, done.stdout)
    assert (job.name, job.nodes, job.workers_per_node, job.mode) == ("my-train", 4, 8, "plain")
    assert (job.script, job.args) == ("/opt/train.py", ("--steps", "40"))
    assert job.env == {"NCCL_DEBUG": "INFO", "TEXT": 'say "hi"'}
    assert (job.kubernetes.namespace, job.kubernetes.service_account) == ("team-a", "trainer")
    assert (job.resources.accelerators, job.resources.cpus, job.resources.memory_mib) == (8, 90.5, 102400)
    assert (job.scheduling.queue, job.scheduling.priority) == ("team-queue", "high")
    assert job.scheduling.topology is not None
    assert (job.scheduling.topology.level, job.scheduling.topology.required) == (
        "topology.k8s.aws/network-node-layer-3",
        False,
    )
    assert job.relaunch.max_process_restarts == 3
    assert [(one.kind, one.path, one.read_only) for one in job.volumes if one.kind in ("host", "claim")] == [
        ("host", "/data", False),
        ("claim", "/out", True),
    ]
    assert job.kubernetes.container["resources"] == {"limits": {"memory": "120Gi"}}
    assert job.kubernetes.pod["schedulerName"] == "volcano"
    assert job.scheduling.node_selector == {"team": "a", "sagemaker.amazonaws.com/deep-health-check-status": "Passed"}
    assert "not carried over" not in done.stderr
    assert "note: config.yaml: fields without a value: required_topology" in done.stderr
    assert job.working_dir is None  # the image's own: the script's path says where it is


HYP_1_1 = """\
template: hyp-pytorch-job
version: 1.1
job_name: elastic
image: repo/train:1
command: ["hyperpodrun", "--nproc_per_node=8", "/workspace/train.py"]
instance_type: ml.p5.48xlarge
replica_count: 4
max_replica_count: 8
elastic_replica_increment_step: 2
elastic_graceful_shutdown_timeout_in_seconds: 180
elastic_scaling_timeout_in_seconds: 60
elastic_scale_up_snooze_time_in_seconds: 600
accelerators: 8
accelerators_limit: 8
vcpu_limit: 180
efa: 32
efa_limit: 32
deep_health_check_passed_nodes_only: false
no_such_field: 1
"""


def test_a_value_of_hyp_that_another_one_overrules_is_named() -> None:
    text = """\
job_name: a
image: repo/train:1
command: [torchrun, --nproc_per_node=8, train.py]
instance_type: ml.p5.48xlarge
node_count: 5
replica_count: 3
max_node_count: 8
label_selector: {node.kubernetes.io/instance-type: ml.p4d.24xlarge}
"""
    found = import_file(text, "config.yaml")
    assert (found.job.nodes, found.job.resources.instance_type) == (3, "ml.p4d.24xlarge")
    assert found.left_out == [
        "config.yaml:5: node_count: 5 is not used, because replica_count sets 3",
        "config.yaml:4: instance_type: ml.p5.48xlarge is not used, because "
        "label_selector.node.kubernetes.io/instance-type sets ml.p4d.24xlarge",
    ]


def test_fields_of_hyp_1_1_are_carried() -> None:
    found = import_file(HYP_1_1, "config.yaml")
    job = found.job
    assert (job.nodes, job.resources.efa, job.scheduling.healthy_only) == (4, 32, False)
    assert job.elastic is not None
    assert (job.elastic.min_nodes, job.elastic.max_nodes, job.elastic.step) == (4, 8, 2)
    assert (job.elastic.graceful_shutdown_s, job.elastic.scaling_timeout_s) == (180, 60)
    assert job.relaunch.scale_up_pause_s == 600
    assert job.kubernetes.container["resources"]["limits"] == {"cpu": "180"}
    assert found.left_out == ["config.yaml:19: no_such_field: is not a field of hyp that import knows"]


def test_partitions_of_accelerators_are_carried() -> None:
    parts = "accelerator_partition_type: mig-1g.5gb\naccelerator_partition_count: 2\naccelerator_partition_limit: 2\n"
    text = HYP_1_1.replace("accelerators: 8\naccelerators_limit: 8\n", parts).replace("=8", "=2")
    job = import_file(text, "config.yaml").job
    assert (job.resources.accelerators, job.resources.accelerator_resource) == (2, "nvidia.com/mig-1g.5gb")
    assert job.scheduling.node_selector == {"nvidia.com/mig.config.state": "success"}


def test_a_config_of_hyp_for_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="is `cluster-stack`, but import reads only the template"):
        import_file("template: cluster-stack\nversion: 1.0\n", "config.yaml")
    wrong = HYP.replace("vcpu: 90.5", "vcpu: many").replace("volume:\n", "volume: 3\nothers:\n")
    with pytest.raises(ConfigError) as refused:
        import_file(wrong, "config.yaml")
    assert "vcpu: must be a number, not 'many'" in str(refused.value)
    assert "volume: must be a list, not '3'" in str(refused.value)
    text = HYP.replace(
        "[hyperpodrun, --nproc_per_node=8, /opt/train.py]", "hyperpodrun --nproc_per_node=8 /opt/train.py"
    )
    assert import_file(text, "config.yaml").job == import_file(HYP, "config.yaml").job
    with pytest.raises(ConfigError, match=r"config\.yaml.*name"):
        import_file("job_name: Not_A_Name\nimage: a:1\ncommand: [torchrun, t.py]\n", "config.yaml")
