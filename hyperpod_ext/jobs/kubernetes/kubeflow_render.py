"""Renders a JobConfig for Kubeflow, as a PyTorchJob (v1) or a TrainJob (v2), and a NetworkPolicy. Pure."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.jobs.contract.launcher_text import RANKED_LINES, without_launcher, words_for_torchrun
from hyperpod_ext.jobs.contract.render import render as fill
from hyperpod_ext.jobs.kubernetes.hyperpod_eks_render import title
from hyperpod_ext.jobs.kubernetes.kinds import PYTORCH, TRAIN
from hyperpod_ext.jobs.kubernetes.pod import (
    Start,
    agent_environment,
    filled,
    job_metadata,
    pod_template,
    topology_annotations,
)
from hyperpod_ext.jobs.kubernetes.policy import network_policy

_PORT = 29400
"""Default rendezvous port on node 0. The services of PyTorchJobs and TrainJobs expose every port."""
_CLEAN = {"all": "All", "completed": "Running", "none": "None"}
_IN_POD = ("containers", "volumes", "nodeSelector", "tolerations", "affinity", "imagePullSecrets", "serviceAccountName")
_PATCHED = (*_IN_POD, "terminationGracePeriodSeconds", "securityContext", "schedulingGates")
"""Fields of a pod's spec that a TrainJob may change in the pods of its TrainingRuntime."""
_MANAGER = "hyperpod-ext.io/launch"


def render_files(job: JobConfig) -> dict[str, str]:
    """Return the text of `network-policy.yaml`, unless the spec disables it, and of `job.yaml`."""
    files = {}
    if job.kubernetes.network_policy:
        policy = network_policy(job, from_operator=False)
        files["network-policy.yaml"] = fill("kubeflow/network-policy.yaml.j2", policy=policy)
    text = _train_job(job) if job.kubernetes.kubeflow_api == "trainjob" else _pytorch_job(job)
    if job.overlay.kubernetes != KubernetesOverlay():
        from hyperpod_ext.jobs.kubernetes.overlays.apply import with_overlay

        text = with_overlay(text, job)
    return files | {"job.yaml": text}


def start_of(job: JobConfig) -> Start:
    """Return the container's script and environment. The script starts this project's agent or torchrun."""
    no_python, words = words_for_torchrun(job)
    alone = without_launcher(job)
    script = fill(
        "kubeflow/start.sh.j2",
        agent=job.has_agent,
        elastic=job.elastic is not None,
        working_dir=job.working_dir if job.kubernetes.kubeflow_api == "trainjob" else None,
        nodes=job.nodes,
        workers_per_node=job.workers_per_node,
        port=job.rendezvous.port or _PORT,
        alone=alone,
        no_python=no_python,
        command=job.words if job.has_agent or alone else words,
    )
    environment = agent_environment(job) if job.has_agent else RANKED_LINES
    return Start(script, job.image or "", environment)


def _pytorch_job(job: JobConfig) -> str:
    again = job.relaunch.max_times
    resume = {} if again is None else {labels.AUTO_RESUME: "true", labels.MAX_RETRIES: str(again)}
    roles = [("Worker", job.nodes)] if job.elastic else [("Master", 1), ("Worker", job.nodes - 1)]
    return fill(
        "kubeflow/pytorchjob.yaml.j2",
        title=title(job),
        metadata=job_metadata(job, resume),
        # a command that starts its own processes gets `auto`, the operator's default, in PET_NPROC_PER_NODE
        workers_per_node="auto" if without_launcher(job) and job.mode == "plain" else job.workers_per_node,
        run_policy=_run_policy(job),
        elastic_policy=_elastic_policy(job),
        roles=[(role, replicas) for role, replicas in roles if replicas],
        restart_policy="Never" if again == 0 else "OnFailure",
        pod_template=pod_template(job, start_of(job), PYTORCH),
    )


def _run_policy(job: JobConfig) -> dict[str, Any]:
    return filled(
        {
            "cleanPodPolicy": _CLEAN[job.kubernetes.clean_pods],
            "backoffLimit": job.relaunch.max_times,
            "activeDeadlineSeconds": job.timeouts.run_s,
            "ttlSecondsAfterFinished": job.timeouts.keep_s,
            "suspend": job.kubernetes.suspend or None,
        }
    )


def _elastic_policy(job: JobConfig) -> dict[str, Any]:
    if job.elastic is None:
        return {}
    return filled(
        {
            "minReplicas": job.elastic.min_nodes,
            "maxReplicas": job.elastic.max_nodes,
            "maxRestarts": job.relaunch.max_process_restarts,
            "rdzvBackend": "c10d",
        }
    )


def _train_job(job: JobConfig) -> str:
    template = pod_template(job, start_of(job), TRAIN)
    pod = template["spec"]
    # pods of a TrainJob have only one container, because rule HPX154 refuses side containers
    container = pod["containers"][0]
    trainer = {
        "image": container["image"],
        "numNodes": job.nodes,
        "numProcPerNode": job.workers_per_node,
        "command": container["command"],
        "args": container["args"],
        "env": container.get("env"),
        "resourcesPerNode": container.get("resources"),
    }
    patched = {name: pod.get(name) for name in _PATCHED}
    patched["containers"] = [{name: container[name] for name in ("name", "volumeMounts", "securityContext")}]
    node = {
        "name": "node",
        "template": {"spec": {"template": {"metadata": template["metadata"], "spec": filled(patched)}}},
    }
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    spec = {
        "runtimeRef": {"name": job.kubernetes.training_runtime},
        "trainer": filled(trainer),
        "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": patch}],
        "suspend": job.kubernetes.suspend or None,
        "activeDeadlineSeconds": job.timeouts.run_s,
    }
    metadata = job_metadata(job, topology_annotations(job))
    return fill("kubeflow/trainjob.yaml.j2", title=title(job), metadata=metadata, spec=filled(spec))
