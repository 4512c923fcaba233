"""`make catalog`: facts of AWS that public packages carry, written with their source and the day they were read.

botocore's API models name types of machines and of training plans; moto carries EC2's own answers of which zone offers
which type, cfn-lint AWS's price lists by region. What no package carries (EFA interfaces, prices, accounts of images)
stays as it is, and is named.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from datetime import UTC, date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def main() -> int:
    today = datetime.now(UTC).date()
    for name, read in FILES.items():
        (CATALOG / name).write_text(text_of(read(today)), encoding="utf-8")
        print(f"{name}: of {today}")
    if unknown := unknown_types():
        print(f"not in instance_types.json, add them by hand: {', '.join(unknown)}")
    print("not in any package, look them up by hand: images.json, prices.json, EFA interfaces, versions of Kubernetes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
