"""The table of what an update cannot change, beside the schemas it was read from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from sdk_venvs import python_of

from hyperpod_ext.catalog import create_only

FILE = Path(create_only.__file__).with_name("create_only.json")


def test_the_table_is_what_the_schemas_say(root: Path) -> None:
    kept = json.loads(FILE.read_text())
    script = root / "tests" / "support" / "create_only.py"
    command = [str(python_of("moto")), str(script), *kept["types"]]  # cfn-lint comes with moto
    read = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert read["types"] == kept["types"]


def test_a_cluster_keeps_its_name_its_network_and_its_orchestrator() -> None:
    found = create_only.create_only("AWS::SageMaker::Cluster")
    assert found is not None
    assert found.always == ("ClusterName", "Orchestrator.Eks", "VpcConfig")
    assert create_only.create_only("AWS::New::Thing") is None
