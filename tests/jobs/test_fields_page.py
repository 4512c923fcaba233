"""docs/fields.md: every field of the targets' own schemas, and where a spec says it, from what is rendered."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import botocore
import pytest
import sbatch_options
from botocore.loaders import Loader
from botocore.model import ServiceModel
from spec_keys import MORE, OF_CONTAINER, OF_POD, at, job, keys, value_of

from hyperpod_ext.catalog.pod_fields import pod_types
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.kubernetes import hyperpod_eks
from hyperpod_ext.jobs.kubernetes.hyperpod_eks_render import replica_specs, start_of
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD
from hyperpod_ext.jobs.kubernetes.overlays import check
from hyperpod_ext.jobs.sagemaker import overlay as sagemaker_overlay
from hyperpod_ext.jobs.sagemaker.request import plain_request
from hyperpod_ext.jobs.slurm import script as slurm

PAGE = "docs/fields.md"
Rendered = Mapping[str, Any]
PLAIN = {"string": "a", "integer": 1, "boolean": True, "[]string": ["a"], "{}string": {"a": "b"}}
TEXTS = (
    *("a", "1K", "s3://bucket/a", "arn:aws:iam::123456789012:role/training"),
    *("arn:aws:lambda:us-west-2:123456789012:function:a", "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/a"),
    *(f"arn:aws:sagemaker:us-west-2:123456789012:{kind}/a" for kind in ("training-plan", "model-package")),
    "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/a",
    "arn:aws:sagemaker:us-west-2:aws:hub-content/a/Model/a",
)
"""Texts of which one matches each pattern of a request."""

OF_THE_VALUE = re.compile(
    "already set by a field of the spec|must be |must have exactly|is no |is not a |is missing|lacks the required|"
    r"does not match|has \d+ (?:items|entries|characters)"
)
"""What is said against a value, or beside a field that the spec has: no reason why a field is refused."""


class Row(NamedTuple):
    """One field of a schema."""

    typed: list[str]
    """Keys of the spec that change it."""
    refusal: Problem | None
    """Why an overlay cannot say it; None: it can."""


class Schema(NamedTuple):
    """Fields that a target takes."""

    fields: tuple[str, ...]
    rendered: Callable[[JobConfig], Rendered]
    """What a job becomes, by the fields of the schema."""
    refusals: Callable[[str], list[Problem]]
    """What is said against an overlay that has one field."""


@pytest.fixture(autouse=True)
def same_model(request: pytest.FixtureRequest, root: Path) -> None:
    """Skip what compares with botocore's model where that has other members than the page: a release of AWS breaks no
    test, and `make golden` brings its members in."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name not in ("counts", "CreateTrainingJob") or request.config.getoption("--update-golden"):
        return
    part = (root / PAGE).read_text().partition("<!-- CreateTrainingJob -->\n")[2].partition("<!-- end -->")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", part, re.MULTILINE)
    assert listed
    if others := sorted(set(_members()) ^ set(listed)):
        pytest.skip(f"botocore {botocore.__version__} and {PAGE} differ in {', '.join(others)}: make golden")


@pytest.mark.parametrize("name", ["counts", "PodSpec", "Container", "TrainJob", "sbatch", "CreateTrainingJob"])
def test_the_page_says_what_is_rendered_and_what_is_refused(
    name: str, golden_part: Callable[[str, str, str], None]
) -> None:
    texts = {"counts": counts, "TrainJob": patched}
    golden_part(PAGE, name, texts[name]() if name in texts else table(name))


@pytest.mark.parametrize("name", ["PodSpec", "Container", "sbatch", "CreateTrainingJob"])
def test_no_field_is_out_of_reach_without_a_reason(name: str) -> None:
    refused = {field: row.refusal for field, row in rows(name).items() if row.refusal and not row.typed}
    wrong = {field: str(one) for field, one in refused.items() if not one.hint or OF_THE_VALUE.search(one.message)}
    assert wrong == {}


def test_every_key_of_a_spec_is_tried_with_another_value() -> None:
    same = []
    for key, field in keys():
        more = MORE.get(key, {})
        before, after = job(more).model_dump(), job(more, at(key, value_of(key, field))).model_dump()
        if below(before, key) == below(after, key):
            same.append(key)
    assert same == []


def test_all_that_an_overlay_takes_goes_together_through_the_whole_check() -> None:
    taken = {
        section: {field: values(kind)[field] for field, row in rows(kind).items() if not row.refusal}
        for section, kind in (("pod", "PodSpec"), ("container", "Container"))
    }
    assert list(hyperpod_eks.problems(job({"overlay": {"kubernetes": taken}}))) == []


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="needs sbatch")
def test_the_names_of_options_are_those_of_the_manual(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=a\nSlurmctldHost=localhost\n")
    ask = {"env": {"SLURM_CONF": str(tmp_path / "slurm.conf")}, "capture_output": True, "text": True, "check": True}
    if "22.05" not in subprocess.run(["sbatch", "--version"], **ask).stdout:
        pytest.skip("the names are those of 22.05")
    told = subprocess.run(["sbatch", "--help"], **ask).stdout
    assert set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", told)) - set(sbatch_options.NAMES) == set()


def counts() -> str:
    """How many fields of each schema are typed, else taken by the overlay, else refused."""
    lines = ["| schema | fields | typed | overlay | refused |", "|---|---|---|---|---|"]
    for name in SCHEMAS:
        found = rows(name).values()
        typed = sum(bool(row.typed) for row in found)
        overlay = sum(not row.typed and not row.refusal for row in found)
        lines.append(f"| {name} | {len(found)} | {typed} | {overlay} | {len(found) - typed - overlay} |")
    return "\n".join(lines) + "\n"


def table(name: str) -> str:
    """A line for each field of a schema."""
    lines = ["| field | key of the spec | overlay |", "|---|---|---|"]
    for field, row in rows(name).items():
        typed = ", ".join(f"`{key}`" for key in row.typed)
        lines.append(f"| `{field}` | {typed} | {_sentence(field, row.refusal) if row.refusal else 'yes'} |")
    return "\n".join(lines) + "\n"


@cache
def rows(name: str) -> dict[str, Row]:
    """Every field of a schema, by name."""
    schema = SCHEMAS[name]
    typed: dict[str, list[str]] = {field: [] for field in schema.fields}
    plain = {key: schema.rendered(job(more)) for key, more in {"": {}, **MORE}.items()}
    for key, field in keys():
        if key != "slurm.sbatch":  # which takes any option
            before = plain.get(key, plain[""])
            after = schema.rendered(job(MORE.get(key, {}), at(key, value_of(key, field))))
            for one in typed:
                if before.get(one) != after.get(one):
                    typed[one].append(key)
    return {field: Row(typed[field], next(iter(schema.refusals(field)), None)) for field in schema.fields}


def values(kind: str) -> dict[str, Any]:
    """A least value of each field of a pod or container."""
    known = OF_POD if kind == "PodSpec" else OF_CONTAINER
    return {name: known[name] if name in known else PLAIN[of] for name, of in pod_types()[kind].items()}


def patched() -> str:
    """Fields that an overlay of a TrainJob may have; containers are its runtime's, so that none brings an image."""
    lines = []
    for section, kind in (("pod", "PodSpec"), ("container", "Container")):
        known = values(kind) | ({"initContainers": [{"name": "fetch", "env": []}]} if section == "pod" else {})
        taken = [name for name in sorted(known) if not _of_pod(section, {name: known[name]}, "PodSpecPatch")]
        lines.append(f"- `overlay.kubernetes.{section}`: {', '.join(f'`{name}`' for name in taken)}")
    return "\n".join(lines) + "\n"


def _sentence(field: str, refusal: Problem) -> str:
    said = refusal.message.removeprefix("cannot be changed: ").removeprefix(f"--{field} ")
    return f"no: {said}; {refusal.hint}"


def _pod(one: JobConfig) -> Rendered:
    found = dict(replica_specs(one, start_of(one, None))[-1]["template"]["spec"])
    return found | {"containers": len(found["containers"])}


def _container(one: JobConfig) -> Rendered:
    found = replica_specs(one, start_of(one, None))[-1]["template"]["spec"]["containers"][0]
    return dict(found) | {"env": [entry for entry in found["env"] if not _is_own(entry["name"])]}


def _sbatch(one: JobConfig) -> Rendered:
    lines = re.findall(r"^#SBATCH --([^=\n]*)=?(.*)$", slurm.job_script(one), re.MULTILINE)
    return dict(lines)


def _request(one: JobConfig) -> Rendered:
    found = plain_request(one)
    found["Environment"] = {name: value for name, value in found["Environment"].items() if not _is_own(name)}
    return {path: below(found, path) for path in _members()}


def _is_own(variable: str) -> bool:
    """Whether it brings the runtime its part of the spec, which is no field of the target."""
    return variable.startswith("HPX_")


def _of_pod(section: str, patch: Mapping[str, Any], pod_type: str = "PodSpec") -> list[Problem]:
    return list(check.problems(job({"overlay": {"kubernetes": {section: patch}}}), HYPERPOD.container, pod_type))


def _of_sbatch(option: str) -> list[Problem]:
    return list(slurm.problems(job({"overlay": {"slurm": {"sbatch": [f"{option}=1"]}}})))


def _of_request(path: str) -> list[Problem]:
    request, shape = plain_request(job()), _shape()
    for name in path.split("."):
        shape = shape.members[name]
    return list(sagemaker_overlay.problems(request, _whole(_shape(), at(path, _least(shape)), request)))


def _whole(shape: Any, added: dict[str, Any], request: Any) -> dict[str, Any]:
    """`added` with what its mappings must have, too."""
    for name, value in added.items():
        if isinstance(value, dict) and shape.members[name].type_name == "structure":
            present = request.get(name, {}) if isinstance(request, dict) else {}
            for needed in shape.members[name].required_members:
                if needed not in present and needed not in value:
                    value[needed] = _least(shape.members[name].members[needed])
            _whole(shape.members[name], value, present)
    return added


def _least(shape: Any) -> Any:
    match shape.type_name:
        case "structure":
            return {name: _least(shape.members[name]) for name in shape.required_members}
        case "list":
            return [_least(shape.member)]
        case "map":
            return {_least(shape.key): _least(shape.value)}
        case "boolean":
            return True
        case "integer" | "long":
            return max(1, shape.metadata.get("min", 1))
    if shape.enum:
        return shape.enum[0]
    pattern = shape.metadata.get("pattern", ".*").replace(r"\p{Alnum}", "a-zA-Z0-9").replace(r"\p{L}", "a-z")
    pattern = pattern.replace(r"\p{Z}", "").replace(r"\p{N}", "")
    least = shape.metadata.get("min", 0)
    return next(text for text in TEXTS if len(text) >= least and re.fullmatch(pattern, text))


def below(found: Any, path: str) -> Any:
    """What is at `path`; an empty mapping where nothing is."""
    for name in path.split("."):
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found


@cache
def _shape() -> Any:
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    return model.operation_model("CreateTrainingJob").input_shape


@cache
def _members() -> tuple[str, ...]:
    def members(shape: Any, above: str) -> Iterator[str]:
        for name, member in shape.members.items():
            if member.type_name == "structure":
                yield from members(member, f"{above}{name}.")
            else:
                yield above + name

    return tuple(members(_shape(), ""))


SCHEMAS = {
    "PodSpec": Schema(
        tuple(sorted(pod_types()["PodSpec"])), _pod, lambda field: _of_pod("pod", {field: values("PodSpec")[field]})
    ),
    "Container": Schema(
        tuple(sorted(pod_types()["Container"])),
        _container,
        lambda field: _of_pod("container", {field: values("Container")[field]}),
    ),
    "sbatch": Schema(sbatch_options.NAMES, _sbatch, _of_sbatch),
    "CreateTrainingJob": Schema(_members(), _request, _of_request),
}
"""What a pod, its container, a job of Slurm and a training job can say."""
