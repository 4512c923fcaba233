"""The pod of a job somebody else wrote, as far as a JobConfig can say it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from hyperpod_ext.catalog import labels

_BYTES = {"": 1 / 2**20, "Ki": 1 / 1024, "Mi": 1, "Gi": 1024, "Ti": 2**20, "M": 1e6 / 2**20, "G": 1e9 / 2**20}
_OLD_INSTANCE_TYPE = "beta.kubernetes.io/instance-type"


def read_pod(
    pods: list[dict[str, Any]],
    document: dict[str, Any],
    scheduling: dict[str, Any],
    kubernetes: dict[str, Any],
    left_out: list[str],
) -> None:
    """Put what the first of `pods` says into the three parts; what it says besides goes to `left_out`."""
    if not pods:
        return
    spec = dict(pods[0].get("spec") or {})
    containers = spec.pop("containers", None) or [{}]
    left_out += [f"container {one.get('name')}: a job has one" for one in containers[1:]]
    container = dict(containers[0])
    container.pop("name", None)
    read_command(container, document, left_out)
    read_environment(container.pop("env", None) or [], document, kubernetes, left_out)
    _resources(dict(container.pop("resources", None) or {}), document, left_out)
    _volumes(spec.pop("volumes", None) or [], container.pop("volumeMounts", None) or [], document, left_out)
    for theirs, ours in (("image", "image"), ("workingDir", "working_dir")):
        if theirs in container:
            document[ours] = container.pop(theirs)
    place_script(document, left_out)
    if policy := container.pop("imagePullPolicy", None):
        kubernetes["pull_policy"] = policy
    if (container.pop("securityContext", None) or {}).get("privileged"):
        kubernetes["privileged"] = True
    container.pop("ports", None)
    selector = dict(spec.pop("nodeSelector", None) or {})
    instance_type = selector.pop(labels.INSTANCE_TYPE, None) or selector.pop(_OLD_INSTANCE_TYPE, None)
    if instance_type:
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
        kubernetes["pull_secrets"] = [one["name"] for one in secrets]
    if tolerations := spec.pop("tolerations", None):
        scheduling["tolerations"] = [_toleration(one) for one in tolerations]
    for derived in ("dnsPolicy", "automountServiceAccountToken", "restartPolicy"):
        spec.pop(derived, None)
    left_out += [f"pod.{name}" for name, value in spec.items() if value]
    left_out += [f"container.{name}" for name, value in container.items() if value]


def _toleration(one: Mapping[str, Any]) -> dict[str, Any]:
    found = {**one, "seconds": one.get("tolerationSeconds")}
    found.pop("tolerationSeconds", None)
    found.setdefault("operator", "Equal" if one.get("value") else "Exists")
    return {name: value for name, value in found.items() if value is not None}


def read_command(container: dict[str, Any], document: dict[str, Any], left_out: list[str]) -> None:
    """Script and arguments, if a launcher starts a Python file."""
    words = [str(word) for word in [*(container.pop("command", None) or []), *(container.pop("args", None) or [])]]
    shell = len(words) > 2 and words[0].rpartition("/")[2] in ("sh", "bash") and words[1].startswith("-")
    script = words[-1] if shell else None
    inner = _words_of(script) if script is not None else words
    found = _split_command(inner) if inner else None
    if found is None:
        document["script"] = "train.py"
        left_out.append(f"the command, which starts no Python file that could be told: {shlex.join(words)[:80]}")
        return
    document["script"], document["args"] = found[0], found[1]
    if script is not None and len([line for line in script.splitlines() if line.strip()]) > 1:
        left_out.append("what the shell does before it starts the script")
    if "--inprocess-restart" in found[2]:
        document["mode"] = "aws-checkpointless"


def place_script(document: dict[str, Any], left_out: list[str]) -> None:
    """A script with a whole path is in the image, or on a volume; a spec says so by naming its folder."""
    script = PurePosixPath(document["script"])
    if script.is_absolute() and "working_dir" not in document:
        document["working_dir"] = str(script.parent)
        left_out.append(f"the folder that the job started in: it is {script.parent} now, that of the script")


def read_environment(
    entries: list[dict[str, Any]], document: dict[str, Any], kubernetes: dict[str, Any], left_out: list[str]
) -> None:
    for entry in entries:
        name, source = str(entry.get("name")), entry.get("valueFrom") or {}
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            found = {"name": name, "secret": reference["name"], "key": reference["key"]}
            kubernetes.setdefault("secret_env", []).append(found)
        elif source:
            left_out.append(f"variable {name}: its value comes from {', '.join(source)}")
        elif name.startswith("HPX_"):
            left_out.append(f"variable {name}: the launcher sets it")
        else:
            value = str(entry.get("value", ""))
            if re.search(r"(?<!\$)\$\(\w+\)", value):
                left_out.append(f"variable {name}: it refers to others, which are not replaced any more")
            document.setdefault("env", {})[name] = re.sub(r"\$\$", "$", value)


def _resources(resources: dict[str, Any], document: dict[str, Any], left_out: list[str]) -> None:
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    found: dict[str, Any] = {}
    for name, value in asked.items():
        text = str(value)
        if name == "cpu":
            found["cpus"] = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
        elif name == "memory":
            found["memory_mib"] = mebibytes(text)
        elif name == labels.HUGEPAGES:
            found["hugepages_mib"] = mebibytes(text)
        elif name == "ephemeral-storage":
            found["ephemeral_storage_mib"] = mebibytes(text)
        elif name == labels.EFA:
            found["efa"] = int(text)
        elif "/" in name:
            found["accelerators"], found["accelerator_resource"] = int(text), name
        else:
            left_out.append(f"resource {name}")
    if found.get("accelerator_resource") == "nvidia.com/gpu":
        del found["accelerator_resource"]
    if found:
        document["resources"] = found | document.get("resources", {})


def mebibytes(text: str) -> int:
    """An amount of Kubernetes, `32Gi`, in MiB, at least 1."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    return max(int(float(match[1]) * _BYTES.get(match[2], 1)), 1) if match else 1


def _volumes(
    volumes: list[dict[str, Any]], mounts: list[dict[str, Any]], document: dict[str, Any], left_out: list[str]
) -> None:
    sources = {str(volume.get("name")): volume for volume in volumes}
    found: list[dict[str, Any]] = []
    for mount in mounts:
        source, path = sources.get(str(mount.get("name")), {}), str(mount.get("mountPath"))
        one = _volume(source, path, mount)
        if one is None:
            left_out.append(f"volume {mount.get('name')}")
        elif path == "/dev/shm" and one["kind"] == "scratch":
            if one.get("size_mib"):
                document["shared_memory_mib"] = one["size_mib"]
        elif path != "/var/run/hyperpod-ext":
            found.append(one)
    if found:
        document["volumes"] = found


def _volume(source: Mapping[str, Any], path: str, mount: Mapping[str, Any]) -> dict[str, Any] | None:
    read_only = {"read_only": True} if mount.get("readOnly") else {}
    if claim := source.get("persistentVolumeClaim"):
        part = {"sub_path": mount["subPath"]} if mount.get("subPath") else {}
        return {"kind": "claim", "path": path, "claim": claim["claimName"]} | part | read_only
    if host := source.get("hostPath"):
        return {"kind": "host", "path": path, "host_path": host["path"]} | read_only
    if "emptyDir" in source:
        empty = source["emptyDir"] or {}
        size = {"size_mib": mebibytes(str(empty["sizeLimit"]))} if empty.get("sizeLimit") else {}
        memory = {"in_memory": True} if empty.get("medium") == "Memory" else {}
        return {"kind": "scratch", "path": path} | size | memory
    if config := source.get("configMap"):
        return {"kind": "config", "path": path, "config_map": config["name"]}
    if secret := source.get("secret"):
        return {"kind": "secret", "path": path, "secret": secret["secretName"]}
    return None


def _split_command(words: list[str]) -> tuple[str, list[str], list[str]] | None:
    """Script, its arguments and the launcher's words of `hyperpodrun --flag train.py --steps 4`, or None."""
    for at, word in enumerate(words):
        if re.fullmatch(r"\S*\.py", word):
            return word, words[at + 1 :], words[:at]
    return None


def _words_of(script: str) -> list[str] | None:
    """The launcher's command line in a shell script, or None where the shell does more than start it."""
    match = re.search(r"(?:^|\n|&&)\s*(?:exec\s+)?((?:hyperpodrun|torchrun)\b(?:[^\n\\]|\\\n|\\.)*)", script)
    try:
        return shlex.split(match[1].replace("\\\n", " ")) if match else None
    except ValueError:
        return None
