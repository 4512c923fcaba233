"""Renders a JobConfig for HyperPod with EKS, as a HyperPodPyTorchJob and a NetworkPolicy. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.catalog.images import checkpointless_image, with_registry
from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.config.job.scheduling import NodeGroup
from hyperpod_ext.jobs.contract.launcher_text import RANKED_LINES, words_for_torchrun
from hyperpod_ext.jobs.contract.render import render as fill
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD
from hyperpod_ext.jobs.kubernetes.pod import (
    Start,
    agent_environment,
    filled,
    job_metadata,
    pod_template,
    runtime_environment,
    topology_annotations,
)
from hyperpod_ext.jobs.kubernetes.policy import network_policy
from hyperpod_ext.jobs.kubernetes.sizes import NEW_POD_S

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig

LOG_DIR = "/tmp/hyperpod"
"""Folder in which hyperpodrun writes the workers' logs. The operator's log rules read the workers' logs."""
_CLEAN = {"all": "All", "completed": "OnlyComplete", "none": "None"}
LOG_RULE = {
    "name": "name",
    "logPattern": "pattern",
    "stopPattern": "stop_pattern",
    "expectedStartCutOffInSeconds": "first_within_s",
    "expectedRecurringFrequencyInSeconds": "every_s",
    "metricThreshold": "threshold",
    "operator": "operator",
    "metricEvaluationDataPoints": "data_points",
    "faultOnMatch": "fault_on_match",
}
"""Field of a spec's log rule for each field of the operator's log rules."""
ELASTIC = {
    "minReplicas": "min_nodes",
    "maxReplicas": "max_nodes",
    "replicaIncrementStep": "step",
    "replicaDiscreteValues": "sizes",
    "scalingTimeoutInSeconds": "scaling_timeout_s",
    "gracefulShutdownTimeoutInSeconds": "graceful_shutdown_s",
    "faultyScaleDownTimeoutInSeconds": "faulty_scale_down_s",
}
"""Field of the spec's section `elastic` for each field of the object's elasticPolicy."""
RESTARTS = {
    "evalPeriodSeconds": "window_s",
    "numRestartBeforeFullJobRestart": "after_restarts",
    "maxFullJobRestarts": "max_times",
    "maxNumRepeatOffendersToAvoid": "avoid_nodes",
    "scaleUpSnoozeTimeInSeconds": "scale_up_pause_s",
}
"""Field of the spec's section `relaunch` for each field of the object's restartPolicy."""
LIMITS = {"activeDeadlineSeconds": "run_s", "startupDeadlineSeconds": "start_s", "faultDeadlineSeconds": "fault_s"}
"""Field of the spec's section `timeouts` for each field of the object's runPolicy."""
_CHECKPOINTLESS_PORTS = (9000, 9001, 9002, 9003, 9004, 9005)
_CHECKPOINTLESS_ENV = {
    "HPCT_USE_CONN_DATA": "1",
    "HPCT_USE_ROOTLESS": "1",
    "INPROCESS_RESTART": "1",
    "TORCH_SKIP_TCPSTORE": "1",
}
"""Environment variables of AWS's checkpointless container. AWS's launch article names HPCT_USE_CONN_DATA and
TORCH_SKIP_TCPSTORE, but AWS's documentation names HPCT_USE_ROOTLESS instead. All three variables are set, because each
version of the image reads only some of them."""
_CHECKPOINTLESS_WAIT_S = 1800
"""AWS's default time limit in seconds for an in-process restart, which is used if timeouts.fault_s is not set."""
_FOR_EVER = -1
_AGENTS_MEET = 29400
"""Default port on the first node to which all agents of this project connect."""
_FORKED = ("-m", "hyperpod_ext.runtime.prefork")
"""Last flags of hyperpodrun, which let the pod's fork server start the script's processes."""
MONITOR_S = "0.02"
"""Seconds between hyperpodrun's checks of its processes. The value is lower than torchrun's default of 0.1, because a
recovery waits for three to five checks."""


def render_files(job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
    """Return the text of `network-policy.yaml`, unless the spec disables it, and of `job.yaml`."""
    files = {}
    if job.kubernetes.network_policy:
        policy = network_policy(job, from_operator=True)
        files["network-policy.yaml"] = fill("hyperpod_eks/network-policy.yaml.j2", policy=policy)
    start = start_of(job, cluster)
    text = fill(
        "hyperpod_eks/job.yaml.j2",
        title=title(job),
        metadata=job_metadata(job, topology_annotations(job)),
        workers_per_node=job.workers_per_node,
        run_policy=run_policy(job),
        elastic_policy=elastic_policy(job),
        replica_specs=replica_specs(job, start),
    )
    if job.overlay.kubernetes != KubernetesOverlay():
        from hyperpod_ext.jobs.kubernetes.overlays.apply import with_overlay

        text = with_overlay(text, job)
    return files | {"job.yaml": text}


def title(job: JobConfig) -> str:
    """Return the first line of the rendered file, a comment that describes the job."""
    ranks = f"{job.nodes} x {job.workers_per_node} = {job.world_size} rank{'s'[: job.world_size > 1]}"
    return f"{job.name}: {ranks}; written by hp-ext, which can write it again from the spec in the annotations."


def image_of(job: JobConfig, cluster: ClusterConfig | None) -> str:
    """Return the name of the job's image.

    A short name of an AWS image gets AWS's registry in the cluster's region. In mode aws-checkpointless, the default is
    AWS's image.
    """
    found = job.image
    if cluster is not None and found is not None:
        found = with_registry(found, cluster.region)
    elif cluster is not None and job.mode == "aws-checkpointless":
        found = checkpointless_image(cluster.region)
    if found is None:
        raise ValueError("no image: the rules refuse such a job")
    return found


def start_of(job: JobConfig, cluster: ClusterConfig | None) -> Start:
    """Return the container's script and environment. The script starts hyperpodrun or this project's agent."""
    if ours(job):
        return _start_of_ours(job, cluster)
    checkpointless = job.mode == "aws-checkpointless"
    flags = ["--nproc-per-node", str(job.workers_per_node), "--log-dir", LOG_DIR, "--redirects", "3", "--tee", "3"]
    # SIGUSR1 announces a resize to an elastic job. hyperpodrun sends SIGUSR1 only without in-process restart.
    in_process = checkpointless or (job.mode == "ours" and job.elastic is None)
    wait_s = (job.timeouts.fault_s or _CHECKPOINTLESS_WAIT_S) if checkpointless else 2 * job.restart.leave_timeout_s
    if in_process:  # `wait_s` is the time limit for ranks that hang during the restart
        flags += ["--inprocess-restart", "--inprocess-timeout", str(math.ceil(wait_s))]
    environment: dict[str, str] = dict(RANKED_LINES)
    if checkpointless:
        environment |= _CHECKPOINTLESS_ENV | {"INPROCESS_RESTART_TIMEOUT": str(math.ceil(wait_s))}
    if job.mode == "ours":
        flags += ["--monitor-interval", MONITOR_S]
        environment |= runtime_environment(job.model_copy(update={"log_rules": ()}))
    if job.elastic is not None and job.elastic.graceful_shutdown_s:
        environment["HYPERPOD_SIGNAL_COORDINATION"] = "distributed"
    if job.mode == "ours" and job.kubernetes.fork_server:
        flags += _FORKED
    no_python, words = words_for_torchrun(job)
    script = fill(
        "hyperpod_eks/start.sh.j2",
        checkpointless=checkpointless,
        privileged=job.kubernetes.privileged,
        flags=[*flags, *no_python],
        command=words,
    )
    ports = (labels.AGENT_PORT, *(_CHECKPOINTLESS_PORTS if checkpointless else ()))
    return Start(script, image_of(job, cluster), environment, ports, keeps_addresses=True)


def ours(job: JobConfig) -> bool:
    """Return whether pods run this project's agent instead of hyperpodrun."""
    return job.kubernetes.launcher == "ours"


def _start_of_ours(job: JobConfig, cluster: ClusterConfig | None) -> Start:
    flags = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.workers_per_node)]
    flags += ["--rdzv-port", str(job.rendezvous.port or _AGENTS_MEET), "--server-port", str(labels.AGENT_PORT)]
    for network in job.kubernetes.operator_addresses:
        flags += ["--allow", network]
    script = fill("hyperpod_eks/start-ours.sh.j2", flags=flags, command=job.words)
    restart = job.restart
    # the default of `node_wait_s` is shorter than the time that a new pod takes to start
    if "node_wait_s" not in restart.model_fields_set:
        restart = restart.model_copy(update={"node_wait_s": NEW_POD_S})
    # the agent gets neither spares nor log rules, because the operator manages spares and log rules
    alone = job.model_copy(update={"spares": 0, "restart": restart, "log_rules": ()})
    return Start(script, image_of(job, cluster), agent_environment(alone), (labels.AGENT_PORT,))


def replica_specs(job: JobConfig, start: Start) -> list[dict[str, Any]]:
    """Return the object's replicaSpecs: one entry for each group of nodes, or one entry `nodes` without groups."""
    if not job.node_groups:
        most = job.elastic.max_nodes if job.elastic else None
        return [_replica_spec("nodes", job.nodes, most, job.spares, pod_template(job, start, HYPERPOD))]
    return [
        _replica_spec(
            group.name, group.nodes, _most(job, group), group.spares, pod_template(job, start, HYPERPOD, group)
        )
        for group in job.node_groups
    ]


def _most(job: JobConfig, group: NodeGroup) -> int | None:
    return (group.max_nodes or group.nodes) if job.elastic else None


def _replica_spec(name: str, replicas: int, most: int | None, spares: int, template: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "replicas": replicas, "maxReplicas": most, "spares": spares, "template": template}


def run_policy(job: JobConfig) -> dict[str, Any]:
    """Return the object's runPolicy, with numbers of restarts, time limits and log rules."""
    again, limits = job.relaunch, job.timeouts
    return filled(
        {
            "cleanPodPolicy": _CLEAN[job.kubernetes.clean_pods],
            "jobMaxRetryCount": again.max_process_restarts,
            "restartPolicy": filled(_renamed(again, RESTARTS)),
            **_renamed(limits, LIMITS),
            "ttlSecondsAfterFinished": _FOR_EVER if limits.keep_s is None else limits.keep_s,
            "suspend": job.kubernetes.suspend or None,
            "workloadMode": job.kubernetes.workload_mode,
            "logMonitoringConfiguration": [log_rule(job, index) for index in range(len(job.log_rules))],
        }
    )


def log_rule(job: JobConfig, index: int) -> dict[str, Any]:
    """Return the spec's `log_rules[index]` in the operator's format. Log rules read the output of rank 0."""
    rule = job.log_rules[index]
    points = rule.data_points if rule.threshold is not None else None
    more = {"metricEvaluationDataPoints": points, "faultOnMatch": rule.fault_on_match or None}
    return filled(_renamed(rule, LOG_RULE) | more)


def elastic_policy(job: JobConfig) -> dict[str, Any]:
    """Return the object's elasticPolicy, the bounds within which the operator scales the job; {} if not elastic."""
    elastic = job.elastic
    if elastic is None:
        return {}
    step = None if elastic.sizes else elastic.step or 1
    return filled(_renamed(elastic, ELASTIC) | {"replicaIncrementStep": step})


def _renamed(section: Config, names: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a section of the spec, renamed to the operator's names.

    Args:
        names: names of the section's fields, by the operator's name of the same field.
    """
    values = {theirs: getattr(section, ours) for theirs, ours in names.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
