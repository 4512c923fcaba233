"""Reads from cfn-lint's copy of the resource schemas which properties an update cannot change.

`python create_only.py TYPE...` prints the table of `hyperpod_ext/catalog/create_only.json`; it runs in any environment
that has cfn-lint, and imports nothing else.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path


def table(kinds: list[str], regions: tuple[str, ...] = ("us-west-2", "us-east-1")) -> dict[str, object]:
    """The table for these types, as the first region has it that has the type."""
    found = find_spec("cfnlint")
    assert found is not None
    assert found.origin is not None
    schemas = Path(found.origin).parent / "data" / "schemas"
    files: dict[str, str] = {}
    for region in reversed(regions):
        files |= json.loads((schemas / "providers" / f"{region}.json").read_text())
    dated = json.loads((schemas / "version.json").read_text())["schema_date"][:10]
    types = {}
    for kind in sorted(kinds):
        schema = json.loads((schemas / "resources" / f"{files[kind]}.json").read_text())
        types[kind] = {
            name: sorted(path.removeprefix("/properties/").replace("/", ".") for path in schema.get(member, []))
            for name, member in (
                ("always", "createOnlyProperties"),
                ("sometimes", "conditionalCreateOnlyProperties"),
            )
            if schema.get(member)
        }
    source = "createOnlyProperties and conditionalCreateOnlyProperties of the CloudFormation schemas in cfn-lint"
    return {"source": source, "dated": dated, "types": types}


if __name__ == "__main__":
    print(json.dumps(table(sys.argv[1:]), indent=1))
