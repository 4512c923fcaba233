"""What others' jobs for Kubernetes say is in what their spec renders to, or named: by this test's own reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from public_jobs import PUBLIC

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import make_plan

KINDS = ("HyperPodPyTorchJob", "PyTorchJob", "TrainJob")
Leaf = tuple[tuple[str | int, ...], Any]


def test_public_files_lose_nothing_without_a_word() -> None:
    if not PUBLIC.is_dir():
        pytest.skip(f"published files are not in the repository: {PUBLIC} is not here")
    lost, read = [], 0
    for file in sorted((PUBLIC / "kubernetes").iterdir()):
        text = file.read_text()
        values = values_for(text)
        try:
            found = import_file(text, file.name, values)
        except ConfigError:
            continue
        read += 1
        lost += [f"{file.name}: {one}" for one in unnamed(filled(text, values), found)]
    assert read >= 14
    assert lost == []


def values_for(text: str) -> dict[str, str]:
    """A value for every placeholder of the shell, of a kind that fits its name."""
    names = set(re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", text))
    declared = set(re.findall(r"- name: (\w+)\s", text))  # of the container, whose shell has them
    filled_in = set(re.findall(r"value: \"?\$\{?(\w+)", text))
    return {name: value_for(name) for name in names - (declared - filled_in)}


def value_for(name: str) -> str:
    for pattern, value in (
        (r"GPU_RESOURCE$", "nvidia.com/gpu"),
        (r"NODE_HEALTH_LABEL", "example.com/health"),
        (r"MEM|SHM", "64Gi"),
        (r"TYPE", "ml.p5.48xlarge"),
        (r"DIR|PATH|SCRIPT", "/fsx/some"),
        (r"NUM|PER_NODE|CORES|COUNT|GPUS|REPLICAS|CPU|SIZE|ITER|STEP", "4"),
    ):
        if re.search(pattern, name):
            return value
    return "some"


def filled(text: str, values: dict[str, str]) -> str:
    return re.sub(
        r"(?<!\$)\$(?:\{(\w+)(?::?-[^{}]*)?\}|([A-Za-z_]\w*))",
        lambda match: values.get(match[1] or match[2], match[0]),
        text,
    )


def unnamed(original: str, found: Any) -> list[str]:
    """What `original` says, and neither the rendered file nor the list of losses has."""
    theirs = next(one for one in yaml.safe_load_all(original) if (one or {}).get("kind") in KINDS)
    job = found.job if found.job.image else found.job.model_copy(update={"image": ""})
    job = job.model_copy(update={"image": job.image or "x"})
    files = make_plan(job, target=found.target, ignore=["HPX136"]).files  # one was published with the tag `{TAG}`
    ours = next(one for one in yaml.safe_load_all(files["job.yaml"]) if one["kind"] in KINDS)
    return list(differing(theirs, ours, [*found.left_out, *found.notes]))


def differing(theirs: dict[str, Any], ours: dict[str, Any], named: list[str]) -> Iterator[str]:
    told = "\n".join(named)
    if nodes(theirs) != nodes(ours):
        yield f"nodes: {nodes(theirs)} there, {nodes(ours)} here"
    here = pods(ours)
    for role, pod in pods(theirs).items():
        mine = next(iter(here.values()))
        yield from (f"{role}: {one}" for one in of_pod(pod, mine, told))
        labels = (pod.get("metadata") or {}).get("labels") or {}
        kept = (mine.get("metadata") or {}).get("labels") or {}
        yield from (
            f"{role}: label {name}" for name, value in labels.items() if kept.get(name) != value and name not in told
        )
    for section in ("labels", "annotations"):
        kept = (ours.get("metadata") or {}).get(section) or {}
        for name, value in ((theirs.get("metadata") or {}).get(section) or {}).items():
            if str(kept.get(name)) != str(value) and name not in told:
                yield f"{section}: {name}"
    for section in ("runPolicy", "elasticPolicy"):
        kept = dict(leaves(ours["spec"].get(section) or {}))
        for path, value in leaves(theirs["spec"].get(section) or {}):
            if kept.get(path) != value and not any(str(part) in told for part in path if isinstance(part, str)):
                yield f"{section}: {path}: {value}"


def of_pod(theirs: dict[str, Any], ours: dict[str, Any], told: str) -> Iterator[str]:
    """Of one pod: its containers, volumes and where it runs."""
    theirs, ours = theirs["spec"], ours["spec"]
    first, mine = theirs["containers"][0], ours["containers"][0]
    if first.get("image") and first["image"] != mine["image"] and "image" not in told:
        yield f"image {first['image']}"
    yield from of_command(words(first), words(mine), told)
    variables = {one["name"]: one for one in mine.get("env") or []}
    for one in first.get("env") or []:
        kept = variables.get(one["name"], {})
        same = "value" not in one or plain(one["value"]) == plain(kept.get("value", "")).replace("$$", "$")
        if not (kept and same and one.get("valueFrom") == kept.get("valueFrom")) and one["name"] not in told:
            yield f"variable {one['name']}"
    mounted, kept = mounts(theirs), mounts(ours)
    for path, source in mounted.items():
        if not same_volume(source, kept.get(path)) and path not in told:
            yield f"volume {path}: {source} there, {kept.get(path)} here"
    asked = {
        **((first.get("resources") or {}).get("limits") or {}),
        **((first.get("resources") or {}).get("requests") or {}),
    }
    have = (
        {**(mine["resources"].get("limits") or {}), **(mine["resources"].get("requests") or {})}
        if mine.get("resources")
        else {}
    )
    for name, amount in asked.items():
        if amount is not None and quantity(amount) != quantity(have.get(name)) and name not in told:
            yield f"resource {name}: {amount} there, {have.get(name)} here"
    asked_for = [complete(one) for one in theirs.get("tolerations") or []]
    yield from (f"toleration {one}" for one in asked_for if one not in map(complete, ours.get("tolerations") or []))
    rest = {name: value for name, value in theirs.items() if name not in ("containers", "volumes", "tolerations")}
    of_first = {name: value for name, value in first.items() if name not in READ}
    for there, here in ((rest, ours), (of_first, mine)):
        kept_leaves = {
            (*path[:-1], plain(value)) if path and isinstance(path[-1], int) else path: plain(value)
            for path, value in leaves(here)
        }
        for path, value in leaves(there):
            where = (*path[:-1], plain(value)) if isinstance(path[-1], int) else path
            if kept_leaves.get(where) != plain(value) and str(path[0]) not in told:
                yield f"{'.'.join(map(str, path))}: {value}"


def complete(toleration: dict[str, Any]) -> dict[str, Any]:
    return {"operator": "Equal"} | toleration


READ = {"name", "image", "command", "args", "env", "volumeMounts", "resources", "ports"}
"""Of a container, what is compared by itself; ports say nothing that Kubernetes acts on."""


def of_command(theirs: list[str], ours: list[str], told: str) -> Iterator[str]:
    there, here = " ".join(theirs).replace("\\\n", " "), " ".join(ours).replace("\\\n", " ").replace("$$", "$")
    count = re.findall(r"--nproc[_-]per[_-]node[= ](\d+)", there)
    if count and not re.search(rf"--nproc-per-node {count[-1]}\b", here):
        yield f"{count[-1]} processes a node"
    there = re.sub(r"\$\([^()]*\)", "", there)
    for flag in re.findall(r"(?<![\w-])(--?[a-zA-Z][\w.-]*|\+{1,2}[\w.]+)", there):
        if flag.lstrip("-").replace("_", "-") in LAUNCHER or flag in (
            "-c",
            "-o",
            "-e",
            "-ex",
            "-ec",
            "-lc",
            "-m",
            "-u",
        ):
            continue
        if flag not in here and flag not in told:
            yield f"flag {flag}"


LAUNCHER = {
    "nnodes",
    "nproc-per-node",
    "rdzv-id",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-conf",
    "node-rank",
    "master-addr",
}
LAUNCHER |= {"master-port", "nproc", "n", "log-dir", "tee", "redirect", "redirects", "world-size", "standalone"}


def words(container: dict[str, Any]) -> list[str]:
    return [plain(one) for one in [*(container.get("command") or []), *(container.get("args") or [])]]


def nodes(job: dict[str, Any]) -> int:
    spec = job["spec"]
    if "trainer" in spec:
        return int(spec["trainer"].get("numNodes", 1))
    groups = [*(spec.get("replicaSpecs") or []), *(spec.get("pytorchReplicaSpecs") or {}).values()]
    return sum(int(one.get("replicas", 1)) for one in groups)


def pods(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By the name of their replicas, those that there is at least one of."""
    spec = job["spec"]
    if trainer := spec.get("trainer"):
        container = {name: trainer[name] for name in ("image", "command", "args", "env") if name in trainer}
        return {"trainer": {"spec": {"containers": [container | {"resources": trainer.get("resourcesPerNode") or {}}]}}}
    found = {one["name"]: one for one in spec.get("replicaSpecs") or []} | (spec.get("pytorchReplicaSpecs") or {})
    return {name: one["template"] for name, one in found.items() if int(one.get("replicas", 1))}


def mounts(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sources = {
        one["name"]: {key: value for key, value in one.items() if key != "name"} for one in pod.get("volumes") or []
    }
    return {
        one["mountPath"]: sources.get(one["name"], {}) | ({"subPath": one["subPath"]} if "subPath" in one else {})
        for one in pod["containers"][0].get("volumeMounts") or []
    }


def same_volume(theirs: dict[str, Any], ours: dict[str, Any] | None) -> bool:
    if ours is None:
        return False
    there, here = dict(leaves(theirs)), dict(leaves(ours))
    return all(quantity(here.get(path)) == quantity(value) for path, value in there.items() if value not in (None, {}))


def quantity(value: Any) -> Any:
    """A number of Kubernetes in its unit, or the text."""
    match = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|Ti|m|k|M|G|)", str(value))
    units = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}
    return float(match[1]) * units[match[2]] if match else plain(value)


def plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from leaves(below, (*path, name))
    elif isinstance(value, list) and value:
        for index, below in enumerate(value):
            yield from leaves(below, (*path, index))
    elif path:
        yield path, value
