"""`make catalog`: facts of AWS that public packages carry, written with their source and the day they were read.

botocore's API models name types of machines and of training plans; moto carries EC2's own answers of which zone offers
which type, cfn-lint AWS's price lists by region, the SageMaker SDK AWS's images for PyTorch and their registries. What
no package carries (EFA interfaces, prices, the checkpointless image, versions of add-ons) stays as it is, and is named.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from datetime import UTC, date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sdk_venvs

CATALOG = Path(__file__).resolve().parents[2] / "hyperpod_ext" / "catalog"


def training_plans(today: date) -> dict[str, Any]:
    """Types that training plans are sold for, by SageMaker's API model."""
    import botocore

    source = f"ReservedCapacityInstanceType of SageMaker's API model, botocore {botocore.__version__}"
    return {"source": source, "dated": str(today), "types": _enum("ReservedCapacityInstanceType")}


def zones(today: date) -> dict[str, Any]:
    """Zones, by id, that offer each type of machine with accelerators, as EC2 answered moto's authors."""
    import moto

    folder = Path(moto.__file__).parent / "ec2" / "resources" / "instance_type_offerings" / "availability-zone-id"
    known = json.loads((CATALOG / "instance_types.json").read_text(encoding="utf-8"))["types"]
    wanted = {name for name, fields in known.items() if fields["accelerators"]}
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.glob("*.json.gz")):
        region = file.name.removesuffix(".json.gz")
        for offer in json.loads(gzip.decompress(file.read_bytes())):
            name = f"ml.{offer['InstanceType']}"
            if name in wanted:
                found.setdefault(name, {}).setdefault(region, []).append(offer["Location"])
    listed = {name: {region: sorted(ids) for region, ids in by.items()} for name, by in sorted(found.items())}
    source = f"EC2 DescribeInstanceTypeOfferings by availability-zone-id, as moto {moto.__version__} carries it"
    return {"source": source, "dated": str(today), "zones": listed}


def cluster_regions(today: date) -> dict[str, Any]:
    """Types of machines that clusters can have in each region, by cfn-lint; the rest of the file stays as it is."""
    import cfnlint

    folder = Path(cfnlint.__file__).parent / "data" / "schemas" / "extensions" / "aws_sagemaker_cluster"
    read = json.loads((folder / "instancetype_enum.json").read_text(encoding="utf-8"))
    known = json.loads((CATALOG / "cluster_regions.json").read_text(encoding="utf-8"))
    text = f"cfn-lint {version('cfn-lint')}: instance types by region, which it has from AWS's price lists"
    sources = known["sources"] | {"instance_types": {"dated": str(today), "text": text}}
    listed = {region: sorted(one["enum"]) for region, one in sorted(read.items()) if "enum" in one}
    return known | {"sources": sources, "instance_types": listed}


def training_images(today: date) -> dict[str, Any]:
    """AWS's images for training with PyTorch, and the account of their registry in each region, by the SageMaker SDK.

    Of the SDK, which has many dependencies, only its own archive is fetched.
    """
    pin = sdk_venvs.pins()["v2"]
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", folder, pin]
        subprocess.run(fetch, check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            read = json.loads(archive.read("sagemaker/image_uri_config/pytorch.json"))
    return images_of(read, f"image_uri_config/pytorch.json of the SageMaker SDK, {pin}", today)


def images_of(read: Mapping[str, Any], source: str, today: date) -> dict[str, Any]:
    """The newest versions: the SDK's tags name no more than version, processor and Python."""
    versions = read["training"]["versions"]
    newest = sorted((name for name in versions if "py_versions" in versions[name]), key=_number)[-_VERSIONS:]
    tags = {name: f"{name}-gpu-{versions[name]['py_versions'][-1]}" for name in newest}
    last = versions[newest[-1]]
    facts = {"source": source, "dated": str(today), "repository": last["repository"], "tags": tags}
    return facts | {"accounts": dict(sorted(last["registries"].items()))}


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))


_VERSIONS = 4
"""Of PyTorch, that the file has."""


def kubernetes() -> str:
    """What is to be looked up about versions of Kubernetes."""
    os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "1")
    import aws_cdk.aws_eks as eks

    known = json.loads((CATALOG / "cluster_regions.json").read_text(encoding="utf-8"))["kubernetes"]
    numbers = [int(name.rpartition("_")[2]) for name in dir(eks.KubernetesVersion) if name.startswith("V1_")]
    package = f"aws-cdk-lib {version('aws-cdk-lib')}"
    ours = f"HyperPod's by its documentation, {known['oldest']} to {known['newest']}"
    return f"{ours}; EKS has 1.{max(numbers)} by {package}"


def unknown_types() -> list[str]:
    """Types that a cluster can have by the API model, and of which `instance_types.json` knows nothing."""
    known = json.loads((CATALOG / "instance_types.json").read_text(encoding="utf-8"))["types"]
    return [name for name in _enum("ClusterInstanceType") if name not in known]


def _enum(shape: str) -> list[str]:
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    return sorted(model.shape_for(shape).enum)


def text_of(facts: Mapping[str, Any]) -> str:
    """One type a line, so that what changes can be read."""
    *heads, (name, values) = facts.items()
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in heads]
    if isinstance(values, dict):
        rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    else:
        lines.append(f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(one)}" for one in values) + "\n ]")
    return "{\n" + "\n".join(lines) + "\n}\n"


FILES = {"cluster_regions.json": cluster_regions, "training_plans.json": training_plans, "zones.json": zones}
FETCHED = {"training_images.json": training_images}
"""What is in a package that is fetched for it."""


def main() -> int:
    today = datetime.now(UTC).date()
    for name, read in (FILES | FETCHED).items():
        (CATALOG / name).write_text(text_of(read(today)), encoding="utf-8")
        print(f"{name}: of {today}")
    if unknown := unknown_types():
        print(f"not in instance_types.json, add them by hand: {', '.join(unknown)}")
    print("not in any package, look them up by hand:")
    print("  images.json (the checkpointless image), prices.json, EFA interfaces")
    print(f"  versions of Kubernetes: {kubernetes()}")
    print("  versions of EKS add-ons: none is kept; the CDK app names none, so EKS takes its default for the cluster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
