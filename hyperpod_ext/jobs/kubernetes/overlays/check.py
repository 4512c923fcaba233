"""Checks that `overlay.kubernetes` has no unknown fields, and changes no fields on which the job relies. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.catalog import labels
from hyperpod_ext.catalog.pod_fields import DIRECTIVE, RETAIN, pod_types
from hyperpod_ext.config.files.error_messages import in_words, named
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.pods.models import model_of
from hyperpod_ext.config.job.secret_files import hides_secret, unread_secret
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.rank_variables import is_of_ranks, refusal
from hyperpod_ext.jobs.contract.spec_annotation import ANNOTATION

_HERE = "overlay.kubernetes"
_NOT_HERE = "remove this entry of the overlay"
_SPEC_FIELD = "the spec has a field for it"
_RESTARTED = ("the operator restarts containers within the limits in `relaunch`", "set the limits in `relaunch`")
_STARTED = ("it starts the launcher", "write `script` and `args` outside the overlay")
REFUSED_OF_CONTAINER = {
    "name": ("the operator and the other commands find the container by its name", "remove it"),
    "command": _STARTED,
    "args": _STARTED,
    "image": (_SPEC_FIELD, "write `image` outside the overlay"),
    "workingDir": (_SPEC_FIELD, "write `working_dir` outside the overlay"),
    "restartPolicy": _RESTARTED,
    "restartPolicyRules": _RESTARTED,
}
"""Fields of the training container that an overlay cannot set, each with the reason and a hint."""
REFUSED_OF_POD = {
    "ephemeralContainers": ("Kubernetes adds these to running pods only, not to new pods", "use `kubectl debug`"),
    "restartPolicy": ("the operator sets it from the limits in `relaunch`", "set the limits in `relaunch`"),
    "hostname": ("ranks find each other by the names that the operator sets", "remove it"),
    "hostnameOverride": ("ranks find each other by the names that the operator sets", "remove it"),
    "subdomain": ("ranks find each other by the names that the operator sets", "remove it"),
    "nodeName": ("all pods of the job would be on one node", "choose nodes by `scheduling.node_selector`"),
    "hostNetwork": (_SPEC_FIELD, "write `kubernetes.host_network`"),
}
"""Fields of the pod that an overlay cannot set, each with the reason and a hint."""
REFUSED_OF_JOB = {
    "apiVersion": ("it would change the kind of the object", "remove it"),
    "kind": ("it would change the kind of the object", "choose another --target"),
    "metadata.name": ("hp-ext finds the job by its name", "write `name`"),
    "metadata.namespace": (_SPEC_FIELD, "write `kubernetes.namespace`"),
    f"metadata.annotations.{ANNOTATION}": ("import and diff read the spec in it", "remove it"),
    f"metadata.labels.{labels.JOB}": ("hp-ext finds the job by it", "remove it"),
    f"metadata.labels.{labels.MANAGED_BY}": ("hp-ext finds the job by it", "remove it"),
    "spec.nprocPerNode": ("it sets the number of ranks", "write `workers_per_node`"),
    "spec.trainer": (
        "it sets the command and the number of ranks",
        "write `nodes`, `workers_per_node`, `resources`, `env`",
    ),
    "spec.runtimePatches": ("it contains the job's own pods", "write overlay.kubernetes.pod"),
    "spec.elasticPolicy.minReplicas": ("it sets the number of ranks", "write `elastic.min_nodes`"),
    "spec.elasticPolicy.maxReplicas": ("it sets the number of ranks", "write `elastic.max_nodes`"),
}
"""Fields of the job's object that an overlay cannot set, each with the reason and a hint."""
_REFUSED_OF_REPLICAS = {
    "replicas": ("it sets the number of ranks", "write `nodes`"),
    "maxReplicas": ("it sets the number of ranks", "write `elastic.max_nodes`"),
    "spares": ("it sets the number of ranks", "write `spares`"),
    "template": ("it is a pod", "write overlay.kubernetes.pod, and overlay.kubernetes.container"),
}


def problems(job: JobConfig, container: str, pod_type: str = "PodSpec") -> Iterator[Problem]:
    """Yield all problems of the overlay of `job`.

    Args:
        container: name of the training container.
        pod_type: `PodSpec` if the overlay may change all fields of a pod; `PodSpecPatch` for a TrainJob, which may
            change only some.
    """
    overlay = job.overlay.kubernetes
    ours = pod_types()[pod_type]["containers"].removeprefix("[]")
    yield from _typed(ours, overlay.container, f"{_HERE}.container")
    yield from _typed(pod_type, overlay.pod, f"{_HERE}.pod")
    yield from _promises_of_container(job.has_agent, overlay.container, f"{_HERE}.container", own=True)
    yield from _promises_of_pod(job, overlay.pod, container)
    yield from _promises_of_job(overlay.job)


def _typed(kind: str, patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Yield a problem for each unknown field, and for each value of the wrong type, in a patch.

    Args:
        kind: name of the Kubernetes type that is patched.
        path: path of the patch in the spec.
    """
    if not patch:  # do not build the models of a pod, which takes 0.25 s
        return
    model = model_of(kind, patch=True)
    try:
        model.model_validate_json(json.dumps(patch))
    except ValidationError as error:
        for one in error.errors(include_url=False):
            place, message, hint = in_words(one, model)
            yield Problem(message, path=".".join([path, *map(str, place)]), hint=hint)


def _refused(table: Mapping[str, tuple[str, str]], patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in patch:
        if name in table:
            why, hint = table[name]
            yield Problem(f"cannot be changed: {why}", path=f"{path}.{name}", hint=hint)


def _complete(patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in (DIRECTIVE, RETAIN):
        if name in patch:
            message = "would remove parts that the job needs"
            yield Problem(message, path=f"{path}.{name}", hint=f"remove `{name}`, and list only the fields to change")


def _promises_of_container(has_secret: bool, patch: Mapping[str, Any], path: str, own: bool) -> Iterator[Problem]:
    yield from _complete(patch, path)
    yield from _refused({k: v for k, v in REFUSED_OF_CONTAINER.items() if own or k != "name"}, patch, path)
    for field in ("env", "volumeMounts", "ports", "resources"):
        if field in patch and patch[field] is None:
            hint = f"remove `{field}: null`"
            yield Problem("cannot be removed, because the job needs it", path=f"{path}.{field}", hint=hint)
    for index, one in _items(patch, "env"):
        name = str(one.get("name", ""))
        if one == {DIRECTIVE: "replace"}:
            yield Problem("would remove the job's own variables", path=f"{path}.env.{index}", hint=_NOT_HERE)
        elif is_of_ranks(name):
            message = refusal(name, "removed" if one.get(DIRECTIVE) == "delete" else "set")
            yield Problem(message, path=f"{path}.env.{index}", hint=_NOT_HERE)
    for index, one in _items(patch, "volumeMounts"):
        where = str(one.get("mountPath", ""))
        if one == {DIRECTIVE: "replace"} or (has_secret and where and hides_secret(where)):
            hint = "choose another mountPath" if where and DIRECTIVE not in one else _NOT_HERE
            yield Problem("would hide the job's secret", path=f"{path}.volumeMounts.{index}", hint=hint)
    for index, one in _items(patch, "ports"):
        if DIRECTIVE in one:
            yield Problem("would remove a port of the job", path=f"{path}.ports.{index}", hint=_NOT_HERE)


def _promises_of_pod(job: JobConfig, patch: Mapping[str, Any], container: str) -> Iterator[Problem]:
    path = f"{_HERE}.pod"
    yield from _complete(patch, path)
    yield from _refused(REFUSED_OF_POD, patch, path)
    yield from _secret_unread(job, patch)
    for field in ("containers", "volumes"):
        if field in patch and patch[field] is None:
            hint = f"remove `{field}: null`"
            yield Problem("cannot be removed, because the job needs it", path=f"{path}.{field}", hint=hint)
    for index, one in _items(patch, "containers"):
        if one.get("name") == container:
            yield from _promises_of_container(job.has_agent, one, f"{path}.containers.{index}", own=False)
        elif one == {DIRECTIVE: "replace"}:
            message = "would remove the container that trains"
            yield Problem(message, path=f"{path}.containers.{index}", hint=_NOT_HERE)
        elif DIRECTIVE not in one and "image" not in one:
            yield Problem(
                "a container next to the training container needs an image", path=f"{path}.containers.{index}"
            )
    for index, one in _items(patch, "volumes"):
        if one == {DIRECTIVE: "replace"} or (one.get("name") == labels.SECRET_VOLUME and job.has_agent):
            hint = _NOT_HERE if DIRECTIVE in one else "choose another name"
            yield Problem("would change or remove the job's secret", path=f"{path}.volumes.{index}", hint=hint)


def _secret_unread(job: JobConfig, patch: Mapping[str, Any]) -> Iterator[Problem]:
    """Report a `runAsUser` in the overlay with which the container's processes cannot read a secret."""
    of_pod, of_container = patch.get("securityContext"), job.overlay.kubernetes.container.get("securityContext")
    own, above = (one if isinstance(one, Mapping) else {} for one in (of_container, of_pod))
    group = above.get("fsGroup", job.kubernetes.pod.get("securityContext", {}).get("fsGroup"))
    if found := unread_secret(job, own, above, group):
        part, field, message, add = found
        hint = f"write overlay.kubernetes.pod.securityContext.fsGroup: {add}, for example"
        yield Problem(message, path=f"{_HERE}.{part}.securityContext.{field}", hint=hint)


def _promises_of_job(patch: Mapping[str, Any]) -> Iterator[Problem]:
    path = f"{_HERE}.job"
    for name in ("metadata", "spec"):
        if name in patch and not isinstance(patch[name], Mapping):
            yield Problem(f"must be a mapping, not {named(patch[name])}", path=f"{path}.{name}")
    yield from _complete(patch, path)
    for field, (why, hint) in REFUSED_OF_JOB.items():
        parts = field.split(".", 2)
        if len(parts) == 3 and parts[1] in ("annotations", "labels"):
            if not isinstance(_below(patch, parts[:2]), Mapping) and _has(patch, parts[:2]):
                above = f"{parts[0]}.{parts[1]}"
                yield Problem(f"cannot be removed: {why}", path=f"{path}.{above}", hint=f"remove `{parts[1]}: null`")
        elif len(parts) == 3 and not isinstance(_below(patch, parts[:2]), Mapping) and _has(patch, parts[:2]):
            continue  # the loop over `section` reports the removal of the whole section
        if _has(patch, parts):
            yield Problem(f"cannot be changed: {why}", path=f"{path}.{field}", hint=hint)
    for section in ("replicaSpecs", "pytorchReplicaSpecs", "elasticPolicy"):
        value = _below(patch, ["spec", section])
        if _has(patch, ["spec", section]) and value is None:
            at, hint = f"{path}.spec.{section}", f"remove `{section}: null`"
            yield Problem("cannot be removed: it sets the number of ranks", path=at, hint=hint)
        if section == "elasticPolicy" or value is None:
            continue
        pairs = (
            enumerate(value) if isinstance(value, list) else dict(value).items() if isinstance(value, Mapping) else ()
        )
        groups: list[tuple[Any, Any]] = list(pairs)
        for place, group in groups:
            at = f"{path}.spec.{section}.{place}"
            if isinstance(group, Mapping) and DIRECTIVE not in group:
                yield from _refused(_REFUSED_OF_REPLICAS, group, at)
            else:
                yield Problem("cannot be removed: it sets the number of ranks", path=at, hint=_NOT_HERE)


def _items(patch: Mapping[str, Any], field: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    value = patch.get(field)
    if isinstance(value, list):
        yield from ((index, one) for index, one in enumerate(value) if isinstance(one, Mapping))


def _below(patch: Any, parts: list[str]) -> Any:
    for part in parts:
        if not isinstance(patch, Mapping) or part not in patch:
            return None
        patch = patch[part]
    return patch


def _has(patch: Any, parts: list[str]) -> bool:
    above = _below(patch, parts[:-1]) if len(parts) > 1 else patch
    return isinstance(above, Mapping) and parts[-1] in above
