"""Imports the parts of a pod that a spec can express."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.checks import SETTINGS
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.contract.rank_variables import is_of_ranks
from hyperpod_ext.jobs.imports.how import HOW
from hyperpod_ext.jobs.kubernetes.imports.command import expanded, read_words
from hyperpod_ext.jobs.kubernetes.imports.raw_command import STARTS_NO_PYTHON, raw_command, starts_no_python
from hyperpod_ext.jobs.kubernetes.imports.volumes_by_name import take_named
from hyperpod_ext.jobs.kubernetes.sizes import size_of

_OLD_INSTANCE_TYPE = "beta.kubernetes.io/instance-type"


def read_pod(
    pods: list[dict[str, Any]],
    document: dict[str, Any],
    scheduling: dict[str, Any],
    kubernetes: dict[str, Any],
    left_out: list[str],
    notes: list[str],
    raw: bool = False,
) -> None:
    """Put the fields of the first pod in `pods` into a spec.

    Args:
        pods: pod templates of the job.
        document: spec to which fields are added.
        scheduling: section `scheduling` of the spec.
        kubernetes: section `kubernetes` of the spec.
        left_out: list to which sentences about lost settings are added.
        notes: list to which sentences about harmless differences are added.
        raw: whether the caller allows a command that starts no Python file to become the spec's `command`.
    """
    if not pods:
        return
    spec = dict(pods[0].get("spec") or {})
    containers = spec.pop("containers", None) or [{}]
    container = dict(containers[0])
    container.pop("name", None)
    asked = dict(container)
    variables = container.pop("env", None) or []
    read_environment(variables, document, kubernetes, left_out, notes)
    if container.get("workingDir"):
        document["working_dir"] = container.pop("workingDir")
    elsewhere = {str(one.get("name")) for one in variables if one.get("valueFrom")}
    try:
        read_command(container, document, left_out, notes, elsewhere)
    except ConfigError as error:
        command = raw_command(asked) if raw and starts_no_python(error) else None
        if command is None:
            raise
        document |= command
    _resources(dict(container.pop("resources", None) or {}), document, left_out)
    named, seen = take_named(pods[0].get("spec") or {}, ours=_is_our_file(pods[0]))
    rest = [one for one in spec.pop("volumes", None) or [] if one not in named]
    _volumes(rest, [one for one in container.pop("volumeMounts", None) or [] if one not in seen], document, left_out)
    if named:
        kubernetes["pod"] = {"volumes": named}
    if seen:
        kubernetes["container"] = {"volumeMounts": seen}
    if container.get("image"):
        document["image"] = container.pop("image")
    place_script(document, left_out, in_image=True)
    if policy := container.pop("imagePullPolicy", None):
        kubernetes["pull_policy"] = policy
    if (container.pop("securityContext", None) or {}).get("privileged"):
        kubernetes["privileged"] = True
    container.pop("ports", None)
    selector = dict(spec.pop("nodeSelector", None) or {})
    instance_type = selector.get(labels.INSTANCE_TYPE) or selector.get(_OLD_INSTANCE_TYPE)
    if is_machine(instance_type):  # instance types of EC2, such as `g5.8xlarge`, stay in the node selector
        selector.pop(labels.INSTANCE_TYPE, None)
        document.setdefault("resources", {})["instance_type"] = instance_type
    if selector:
        scheduling["node_selector"] = selector
    for theirs, ours, into in (
        ("serviceAccountName", "service_account", kubernetes),
        ("hostNetwork", "host_network", kubernetes),
        ("terminationGracePeriodSeconds", "termination_grace_s", kubernetes),
        ("priorityClassName", "pod_priority_class", scheduling),
    ):
        if (value := spec.pop(theirs, None)) is not None:
            into[ours] = value
    if secrets := spec.pop("imagePullSecrets", None):
        kubernetes["pull_secrets"] = [one.get("name") for one in secrets]
    if tolerations := spec.pop("tolerations", None):
        scheduling["tolerations"] = [_toleration(one, notes) for one in tolerations]
    affinity = spec.pop("affinity", None) or {}
    if labels.NODE_HEALTH not in str(affinity.get("nodeAffinity")):
        scheduling["healthy_only"] = False
    constraints = spec.get("topologySpreadConstraints") or []
    if others := [one for one in constraints if not is_own(one)]:
        spec["topologySpreadConstraints"] = others
    elif constraints:
        spec.pop("topologySpreadConstraints")
    if others == constraints and not is_own(affinity.get("podAntiAffinity")):
        scheduling["spread"] = False


def is_machine(name: object) -> bool:
    """Return whether `name` has the form of a SageMaker instance type, such as `ml.p5.48xlarge`."""
    return re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", str(name)) is not None


def _is_our_file(pod: Mapping[str, Any]) -> bool:
    return labels.JOB in str((pod.get("metadata") or {}).get("labels"))


def is_own(rule: Any) -> bool:
    """Return whether hp-ext rendered an affinity or a spread constraint, from `scheduling.healthy_only` or
    `scheduling.spread`."""
    return labels.NODE_HEALTH in str(rule) or labels.JOB in str(rule)


def _toleration(one: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    found = {**one, "seconds": one.get("tolerationSeconds")}
    found.pop("tolerationSeconds", None)
    if "operator" not in found:
        found["operator"] = "Equal"
        notes.append(f"toleration {one.get('key')}: has no operator, so the default Equal is used")
    return {name: value for name, value in found.items() if value is not None}


def read_command(
    container: dict[str, Any],
    document: dict[str, Any],
    left_out: list[str],
    notes: list[str],
    elsewhere: Collection[str] = (),
) -> None:
    """Import a container's command that starts a Python file: script, arguments, and the launcher's numbers.

    Args:
        container: the container; the command is removed from it.
        document: spec to which fields are added.
        left_out: list to which sentences about lost settings are added.
        notes: list to which sentences about harmless differences are added.
        elsewhere: names of the container's variables whose values are not in the file.

    Raises:
        ConfigError: the command starts no Python file, or its number of workers is not known.
    """
    command = container.pop("command", None) or []
    words = [str(word) for word in [*command, *(container.pop("args", None) or [])]]
    if not words:
        raise _not_read("has no command, so the image starts its own program, but a spec needs a script", "")
    nodes = str(document.get("nodes", 1))
    known = {"NNODES": nodes, "PET_NNODES": nodes, "WORLD_SIZE": nodes, **document.get("env", {})}
    if "working_dir" in document:
        known["PWD"] = document["working_dir"]
    started = read_words(words, known, elsewhere)
    found = started.launch
    if found is None and not command:
        message = "is missing: the image's own program gets the arguments, but a spec needs a script"
        raise _not_read(message, shlex.join(words))
    if found is None:
        raise _not_read(STARTS_NO_PYTHON, shlex.join(words))
    if started.missing:
        raise ConfigError(
            [
                Problem(f"the command needs a value for {name}", "command", hint=HOW.format(name=name))
                for name in started.missing
            ]
        )
    left_out += started.left_out
    notes += started.notes
    notes += [f"the launcher: {one}" for one in found.replaced()]
    for name, value in started.exports.items():
        if is_of_ranks(name) and name not in SETTINGS:
            left_out.append(f"export {name}: the launcher sets it")
        else:
            document.setdefault("env", {})[name] = value
    if started.folder is not None:
        document["working_dir"] = started.folder
    document |= found.starts()
    if found.before:
        left_out.append(f"the words before the launcher: {shlex.join(found.before)}")
    if found.python_options:
        left_out.append(
            f"the launcher's interpreter has options {shlex.join(found.python_options)}: a spec has no such field"
        )
    if "/" in found.program and not found.is_module:
        left_out.append(f"the launcher: is {found.program}; the rendered job uses the launcher in PATH")
    if found.launcher not in ("torchrun", "hyperpodrun"):
        left_out.append(
            f"the launcher: is {found.launcher}; the rendered job uses torchrun, or the operator's hyperpodrun"
        )
    for name, value in found.other_options().items():
        left_out.append(f"--{name}{'=' if value else ''}{value} of {found.launcher}: a spec has no such field")
    if found.options.get("rdzv-backend") not in (None, "c10d"):
        left_out.append(f"--rdzv-backend={found.options['rdzv-backend']}: the rendered file has its own rendezvous")
    if found.nodes is not None:
        least, _colon, most = found.nodes.rpartition(":")
        document["launched_nodes"] = most
        if least not in ("", most):
            document["launched_least"] = least
    if (workers := found.workers) is not None:
        notes.append(f"the launcher: its own option sets {workers} workers")
        if workers.isdecimal() and int(workers) > 0:
            document["launched_workers"] = found.on_each_node(int(workers), document.get("nodes", 1))
        elif workers not in ("auto", "gpu"):
            raise _not_read(f"the number of workers is {workers}, which is not a number", shlex.join(words))
    elif found.launcher == "python" and found.program:
        document["launched_workers"] = 1  # without a launcher, each container has one process
    if "inprocess-restart" in found.options:
        document["mode"] = "aws-checkpointless"


def _not_read(message: str, command: str) -> ConfigError:
    hint = "write a spec with the script that the image starts"
    hint += f", and with the arguments `{command[:120]}`" if command else ""
    return ConfigError([Problem(message, path="command", hint=hint)])


def place_script(document: dict[str, Any], left_out: list[str], *, in_image: bool = False) -> None:
    """Set the spec's working_dir to the folder of the script, if the script has an absolute path.

    Args:
        left_out: list to which a sentence about the changed folder is added.
        in_image: whether the script is in the image if the spec has an image, so that working_dir is not set.
    """
    if not document.get("script") or (in_image and document.get("image")):
        return
    script = PurePosixPath(document["script"])
    if script.is_absolute() and "working_dir" not in document:
        document["working_dir"] = str(script.parent)
        left_out.append(f"the folder that the job started in: is now {script.parent}, the script's folder")


def read_environment(
    entries: list[dict[str, Any]],
    document: dict[str, Any],
    kubernetes: dict[str, Any],
    left_out: list[str],
    notes: list[str],
) -> None:
    """Import environment variables that have a value, or that come from a Secret. Report all other variables.

    Args:
        entries: field `env` of the container.
        document: spec to which variables are added.
        kubernetes: section `kubernetes` of the spec.
        left_out: list to which sentences about lost settings are added.
        notes: list to which sentences about harmless differences are added.
    """
    known: dict[str, str] = {}
    for entry in entries:
        name, source = str(entry.get("name")), entry.get("valueFrom") or {}
        if "secretKeyRef" in source and "optional" not in source["secretKeyRef"]:
            reference = source["secretKeyRef"]
            found = {"name": name, "secret": reference.get("name"), "key": reference.get("key")}
            kubernetes.setdefault("secret_env", []).append(found)
        elif source:
            left_out.append(f"variable {name}: its value comes from {', '.join(source)}")
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            left_out.append(
                f"variable {name}: a spec allows only letters, digits and underscores in names of variables"
            )
        elif is_of_ranks(name) and name not in SETTINGS:
            left_out.append(f"variable {name}: the launcher sets it")
        else:
            if "value" not in entry:
                notes.append(f"variable {name}: has no value, so it is empty")
            text = str(entry.get("value", ""))
            value = expanded(text, known)
            if re.search(r"(?<!\$)\$\(\w+\)", value):
                left_out.append(f"variable {name}: refers to {value}, which has no value in the file")
            elif value != text.replace("$$", "$"):
                left_out.append(f"variable {name}: {text} was replaced by its value {value}")
            document.setdefault("env", {})[name] = known[name] = value


def _resources(resources: dict[str, Any], document: dict[str, Any], left_out: list[str]) -> None:
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    found: dict[str, Any] = {}
    for name, value in asked.items():
        text = str(value)
        if name == "cpu":
            found["cpus"] = amount(text, name)
        elif name == "memory":
            found["memory_mib"] = mebibytes(text)
        elif name == labels.HUGEPAGES:
            found["hugepages_mib"] = mebibytes(text)
        elif name == "ephemeral-storage":
            found["ephemeral_storage_mib"] = mebibytes(text)
        elif name == labels.EFA:
            found["efa"] = int(amount(text, name))
        elif "/" in name and "accelerators" not in found:
            found["accelerators"], found["accelerator_resource"] = int(amount(text, name)), name
        elif "/" in name:
            left_out.append(f"resource {name}: a spec has one kind of accelerator")
        else:
            left_out.append(f"resource {name}: a spec has no such field")
    if found.get("accelerator_resource") == "nvidia.com/gpu":
        del found["accelerator_resource"]
    if found:
        document["resources"] = found | document.get("resources", {})


_OF_COUNTS = ("", "m", "k")
"""Valid units in a number of CPUs or devices. Other units, as in `4Gi`, are mistakes."""


def amount(text: str, name: str) -> float:
    """Return the number in a quantity of CPUs or devices, such as `500m` or `4`.

    Args:
        name: name of the resource for messages.
    """
    try:
        return size_of(text, _OF_COUNTS)
    except ValueError as error:
        raise ConfigError([Problem(str(error), path=f"resources.{name}")]) from None


def mebibytes(text: str) -> int:
    """Return a quantity of memory, such as `32Gi`, in MiB. The result is at least 1."""
    try:
        return max(int(size_of(text) / 2**20), 1)
    except (ValueError, OverflowError) as error:
        wrong = f"{text[:40]!r} is not an amount of memory"
        raise ConfigError([Problem(wrong, path="resources", hint="write, for example, 32Gi")]) from error


_OURS = (labels.ADDRESSES_VOLUME, labels.SECRET_VOLUME, labels.DISK_VOLUME)


def _volumes(
    volumes: list[dict[str, Any]], mounts: list[dict[str, Any]], document: dict[str, Any], left_out: list[str]
) -> None:
    sources = {str(volume.get("name")): volume for volume in volumes}
    found: list[dict[str, Any]] = []
    for mount in mounts:
        source, path = sources.get(str(mount.get("name")), {}), str(mount.get("mountPath"))
        one = _volume(source, path, mount)
        if one is None:
            left_out.append(
                f"volume {mount.get('name')} at {path}: the pod has no volume of this name that a spec can express"
            )
        elif path == "/dev/shm" and one["kind"] == "scratch" and one.get("in_memory"):
            if one.get("size_mib"):
                document["shared_memory_mib"] = one["size_mib"]
        elif not str(mount.get("name")).startswith(_OURS) and path != labels.SECRET_DIR:
            found.append(one)
    if found:
        document["volumes"] = found


def _volume(source: Mapping[str, Any], path: str, mount: Mapping[str, Any]) -> dict[str, Any] | None:
    read_only = {"read_only": True} if mount.get("readOnly") else {}
    if claim := source.get("persistentVolumeClaim"):
        part = {"sub_path": mount["subPath"]} if mount.get("subPath") else {}
        return {"kind": "claim", "path": path, "claim": claim.get("claimName")} | part | read_only
    if host := source.get("hostPath"):
        return {"kind": "host", "path": path, "host_path": host.get("path")} | read_only
    if "emptyDir" in source:
        empty = source["emptyDir"] or {}
        size = {"size_mib": mebibytes(str(empty["sizeLimit"]))} if empty.get("sizeLimit") else {}
        memory = {"in_memory": True} if empty.get("medium") == "Memory" else {}
        return {"kind": "scratch", "path": path} | size | memory
    if config := source.get("configMap"):
        return {"kind": "config", "path": path, "config_map": config.get("name")}
    if secret := source.get("secret"):
        return {"kind": "secret", "path": path, "secret": secret.get("secretName")}
    return None
