"""Imports fields of pods and jobs for which a spec has no field of its own. Pure.

The fields are put into `kubernetes.container` and `kubernetes.pod`, or into the overlay if these sections refuse the
value. Only fields that keep their meaning in the rendered job are imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.catalog import labels
from hyperpod_ext.catalog.pod_fields import pod_types
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay, Overlay
from hyperpod_ext.config.job.pods.fields import checked, fits
from hyperpod_ext.jobs.contract.targets import get_target
from hyperpod_ext.jobs.kubernetes.imports.shape import mapping, mappings
from hyperpod_ext.jobs.kubernetes.overlays.check import REFUSED_OF_CONTAINER, REFUSED_OF_POD
from hyperpod_ext.jobs.kubernetes.pod import REQUIRED
from hyperpod_ext.jobs.kubernetes.pod import affinity as affinity_of
from hyperpod_ext.jobs.kubernetes.sizes import node_share

Key = tuple[str, str]
Parts = dict[Key, Any]
"""Imported values, by section (`container` or `pod`) and field."""
_READ_OF_POD = {"containers", "volumes", "nodeSelector", "serviceAccountName", "terminationGracePeriodSeconds"}
_READ_OF_POD |= {"priorityClassName", "imagePullSecrets", "tolerations", "affinity", *REFUSED_OF_POD}
_READ_OF_CONTAINER = {"env", "resources", "ports", "volumeMounts", "imagePullPolicy", "securityContext"}
_READ_OF_CONTAINER |= REFUSED_OF_CONTAINER.keys()
"""Fields of pods and containers that other modules import or report."""
_TOKEN = "automountServiceAccountToken"
_MOUNTS = ("volumeMounts", "volumeDevices")
_KINDS = {"container": "TrainingContainer", "pod": "TrainingPod"}
_RULES = ("HPX145", "HPX150", "HPX154", "HPX155", "HPX156", "HPX157", "HPX158", "HPX159")
"""Rules that check the sections `kubernetes.container` and `kubernetes.pod`."""

_POLICIES = ("runPolicy", "elasticPolicy")
_COUNTED = {"minReplicas", "maxReplicas"}
"""Fields of policies that are not put into an overlay, because a spec has its own fields for their values."""
_NODE = "node"
"""Name of the replicated job, and of its container, in Kubeflow's TrainingRuntimes."""


def carried(job: JobConfig, target: str, found: Mapping[str, Any]) -> JobConfig:
    """Return `job` with the pod fields that all pods of an imported object have in common, if the target accepts them.

    Args:
        found: the imported object.
    """
    pods = list(_pods(found))
    if not pods:
        return job
    parts = [_parts(pod, job, target) for pod in pods]
    common = {
        (section, field): value for section in _KINDS for field, value in getattr(job.kubernetes, section).items()
    }
    common |= {key: value for key, value in parts[0].items() if all(one.get(key) == value for one in parts)}
    while True:
        try:
            changed = _with(job, common)
        except ValidationError:
            return job  # change nothing if a value cannot be written as JSON
        wrong = set(_wrong(changed, target))
        if not wrong:
            return changed
        if not wrong & common.keys():
            return job
        common = {key: value for key, value in common.items() if key not in wrong}


def is_carried(text: str, job: JobConfig) -> bool:
    """Return whether the spec contains the variable or resource that `text` reports as lost.

    Args:
        text: sentence about a lost setting, from an earlier part of the import.
    """
    only, overlaid = job.kubernetes.container, job.overlay.kubernetes.container.get("env")
    entries = [*only.get("env", ()), *(overlaid if isinstance(overlaid, list) else ())]
    variables = {str(one.get("name")) for one in entries if isinstance(one, dict)}
    return any(text.startswith(f"variable {name}: its value comes from") for name in variables) or any(
        text == f"resource {name}" or text.startswith(f"resource {name}:")
        for name in only.get("resources", {}).get("limits", ())
    )


def with_job_fields(job: JobConfig, target: str, found: Mapping[str, Any], rendered: Mapping[str, Any]) -> JobConfig:
    """Return `job` with an overlay that adds policy fields of the imported object which the rendered object lacks.

    Args:
        found: the imported object.
        rendered: the object rendered from `job`.
    """
    patch: dict[str, dict[str, Any]] = {}
    for section in _POLICIES:
        theirs, ours = (mapping(mapping(one.get("spec")).get(section)) for one in (found, rendered))
        if section == "elasticPolicy" and not ours:
            continue  # skip the elastic policy of a job that is not elastic
        wanted = {
            name: value for name, value in theirs.items() if name not in _COUNTED and _differs(ours.get(name), value)
        }
        if wanted:
            patch[section] = wanted
    if not patch:
        return job
    before = job.overlay.kubernetes.model_dump()
    try:
        overlay = KubernetesOverlay.model_validate({**before, "job": {"spec": patch}})
    except ValidationError:
        return job  # change nothing if a value cannot be written as JSON
    changed = job.model_copy(update={"overlay": job.overlay.model_copy(update={"kubernetes": overlay})})
    return job if any(True for _problem in get_target(target).problems(changed)) else changed


def _differs(ours: Any, theirs: Any) -> bool:
    """Return whether the rendered value `ours` is missing, or differs from the imported value `theirs`.

    A mapping counts as different only if the rendered value is missing.
    """
    return ours is None if isinstance(theirs, dict) else str(ours) != str(theirs)


def trainer_pod(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template of a TrainJob's nodes, as far as the TrainJob contains it.

    Fields that only the TrainJob's runtime contains are missing.

    Args:
        spec: field `spec` of the TrainJob.
    """
    trainer = mapping(spec.get("trainer"))
    template = next(_patches(spec), {})
    pod = dict(mapping(template.get("spec")))
    patched = next((one for one in mappings(pod.get("containers")) if one.get("name") == _NODE), {})
    container = {name: value for name, value in patched.items() if name in ("volumeMounts", "securityContext")}
    container |= {name: value for name, value in trainer.items() if name in ("image", "command", "args", "env")}
    container["resources"] = trainer.get("resourcesPerNode") or {}
    return {"metadata": mapping(template.get("metadata")), "spec": pod | {"containers": [container]}}


def _patches(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the pod templates of nodes in a TrainJob's runtimePatches.

    Args:
        spec: field `spec` of the TrainJob.
    """
    for patch in mappings(spec.get("runtimePatches")):
        jobs = mapping(mapping(mapping(patch.get("trainingRuntimeSpec")).get("template")).get("spec"))
        for job in mappings(jobs.get("replicatedJobs")):
            if job.get("name") == _NODE:
                yield mapping(mapping(mapping(job.get("template")).get("spec")).get("template"))


def _wrong(job: JobConfig, target: str) -> Iterator[Key]:
    """Yield section and field of each imported value that the target or a rule refuses."""
    from hyperpod_ext.jobs.rules import Context, all_rules

    for problem in get_target(target).problems(job):
        section, _, below = problem.path.removeprefix("overlay.").removeprefix("kubernetes.").partition(".")
        yield section, below.partition(".")[0]
    rules = all_rules()
    for name in _RULES:
        for finding in rules[name].find(Context(job, None, target)):
            if finding.path[0] == "kubernetes" and finding.path[1] in _KINDS:
                yield str(finding.path[1]), str(finding.path[2])


def _with(job: JobConfig, parts: Parts) -> JobConfig:
    """Return `job` with the values `parts` in its sections `kubernetes.container` and `kubernetes.pod`.

    Values that the sections refuse are put into the job's overlay.
    """
    only, patches = ({section: dict[str, Any]() for section in _KINDS} for _ in range(2))
    for (section, field), value in parts.items():
        into = only if fits(_KINDS[section], {field: value}) else patches
        into[section][field] = value
    sections = {section: checked(kind, only[section]) for section, kind in _KINDS.items()}
    overlay = Overlay(kubernetes=KubernetesOverlay.model_validate(patches))
    return job.model_copy(update={"overlay": overlay, "kubernetes": job.kubernetes.model_copy(update=sections)})


def _pods(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    spec = found.get("spec") or {}
    if spec.get("trainer"):
        yield trainer_pod(spec)["spec"]
    roles = spec.get("pytorchReplicaSpecs") or {}
    for one in [*(spec.get("replicaSpecs") or []), *(roles.values() if isinstance(roles, dict) else roles)]:
        pod = (one.get("template") or {}).get("spec") or {}
        if pod.get("containers"):
            yield pod


def _parts(pod: Mapping[str, Any], job: JobConfig, target: str) -> Parts:
    """Return the values of the pod's fields for which a spec has no field of its own."""
    first, *others = pod["containers"]
    named = {one["name"] for one in job.kubernetes.pod.get("volumes", ())}
    found: Parts = {}
    for name, value in pod.items():
        if name in pod_types()["PodSpec"] and name not in _READ_OF_POD and _stands_alone(name, value, named):
            found["pod", name] = value
    if found.get(("pod", _TOKEN)) is False and job.kubernetes.service_account is None:
        # hp-ext itself renders `automountServiceAccountToken: false` for jobs without a service account
        del found["pod", _TOKEN]
    affinity = pod.get("affinity") or {}
    found["pod", "affinity"] = _without(affinity, affinity_of(job)) if isinstance(affinity, dict) else {}
    if _stands_alone("containers", others, named):
        found["pod", "containers"] = others
    for name, value in first.items():
        if name in pod_types()["Container"] and name not in _READ_OF_CONTAINER:
            found["container", name] = value
    found["container", "env"] = [one for one in first.get("env") or [] if _is_reference(one)]
    found["container", "ports"] = [one for one in first.get("ports") or [] if not _is_our_port(one, target)]
    found["container", "securityContext"] = _security(first.get("securityContext") or {}, job)
    found["container", "resources"] = _resources(first.get("resources") or {}, job)
    return {key: value for key, value in found.items() if value not in ({}, [])}


def _without(affinity: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return an affinity without the rules that hp-ext itself renders.

    The function is the inverse of `both_affinities` in module `pod`.

    Args:
        ours: affinity that hp-ext renders.
    """
    found = copy.deepcopy(dict(affinity))
    if needed := ours.get("nodeAffinity"):
        (own,) = needed[REQUIRED]["nodeSelectorTerms"]
        terms = mappings(mapping(mapping(found.get("nodeAffinity")).get(REQUIRED)).get("nodeSelectorTerms"))
        for term in terms:
            kept = [one for one in mappings(term.get("matchExpressions")) if one not in own["matchExpressions"]]
            _put(term, "matchExpressions", kept)
        if terms:
            left = [term for term in terms if term]
            _put(found["nodeAffinity"], REQUIRED, {"nodeSelectorTerms": left} if left else {})
            _put(found, "nodeAffinity", found["nodeAffinity"])
    if apart := ours.get("podAntiAffinity"):
        others = mapping(found.get("podAntiAffinity"))
        if REQUIRED in others:
            _put(others, REQUIRED, [one for one in mappings(others[REQUIRED]) if one not in apart[REQUIRED]])
            _put(found, "podAntiAffinity", others)
    return found


def _put(holder: dict[str, Any], name: str, value: Any) -> None:
    if value:
        holder[name] = value
    else:
        holder.pop(name, None)


def _resources(asked: Mapping[str, Any], job: JobConfig) -> dict[str, Any]:
    """Return the limits and claims of a container's resources, without requests, which the spec's `resources`
    contains."""
    ours = node_share(job).limits()
    limits = {name: value for name, value in (asked.get("limits") or {}).items() if name not in ours}
    found = {"limits": limits, "claims": asked.get("claims")}
    return {name: value for name, value in found.items() if value}


def _security(asked: Mapping[str, Any], job: JobConfig) -> dict[str, Any]:
    found = {name: value for name, value in asked.items() if name != "privileged"}
    if found.get("allowPrivilegeEscalation") is False and not job.kubernetes.privileged:
        # hp-ext itself renders `allowPrivilegeEscalation: false` for unprivileged jobs
        del found["allowPrivilegeEscalation"]
    return found


def _is_our_port(port: Mapping[str, Any], target: str) -> bool:
    return target == "hyperpod-eks" and port.get("containerPort") == labels.AGENT_PORT


def _is_reference(variable: Mapping[str, Any]) -> bool:
    """Return whether the variable's value is a reference of a kind for which a spec has no field of its own.

    For references to keys of Secrets that are not optional, the spec has the field `kubernetes.secret_env`.
    """
    source = variable.get("valueFrom")
    if not isinstance(source, Mapping) or not source:
        return False
    return "secretKeyRef" not in source or "optional" in source["secretKeyRef"]


def _stands_alone(name: str, value: Any, named: set[str]) -> bool:
    """Return whether a field of the pod can be imported unchanged.

    Side containers can be imported only if the spec has all volumes that they mount, under the same names.

    Args:
        named: names of the volumes in the spec's `kubernetes.pod.volumes`.
    """
    if not name.lower().endswith("containers"):
        return True
    return isinstance(value, list) and all(
        isinstance(one, Mapping)
        and all(str(each.get("name")) in named for field in _MOUNTS for each in one.get(field) or [])
        for one in value
    )
