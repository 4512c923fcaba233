"""Runs the CDK app for one cluster in a separate process. The app needs neither a network nor an AWS account."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyperpod_ext.clusters.cdk.assembly import Assembly, read_assembly
from hyperpod_ext.clusters.cdk.tools import find_app, node_environment
from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem

_TIMEOUT_S = 600


def synthesise(spec: object, out: Path, *, app: str | None, scale: bool, region: str) -> Assembly:
    """Run the CDK app, which writes CloudFormation templates to the folder `out`, and read the templates.

    Args:
        spec: content of the cluster's file, with the changes by `--set` options.
        scale: whether the templates contain the machines of the file. False: every group has 0 machines.
        app: folder of the CDK app. None: the app in this checkout.

    Raises:
        HyperpodExtError: CDK's library or Node.js is not installed, or the app fails.
    """
    folder = find_app(app)
    environment = node_environment()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    report = out / "validation-report.json"
    for stale in (report, out / "manifest.json"):
        stale.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hpx-cdk-") as scratch:
        config = Path(scratch) / "cluster.json"  # the app reads the JSON file as YAML
        config.write_text(json.dumps(spec), encoding="utf-8")
        context = _context(folder) | {"cluster": str(config)} | ({"scale": "true"} if scale else {})
        environment |= {
            "CDK_OUTDIR": str(out),
            "CDK_CONTEXT_JSON": json.dumps(context),
            "CDK_DEFAULT_REGION": region,
            "HPX_CLUSTER": str(config),
        }
        try:
            done = subprocess.run(
                [sys.executable, "app.py"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HyperpodExtError(f"the CDK app in {folder} did not end within {_TIMEOUT_S} s") from None
    if "No module named 'aws_cdk'" in done.stderr:
        hint = "pip install 'hyperpod-ext[cdk]'; in a checkout, `make cdk`"
        raise HyperpodExtError("the CDK library for Python (aws-cdk-lib) is not installed", hint=hint)
    if done.returncode != 0 and report.is_file():
        raise ConfigError(list(_violations(report)))
    if done.returncode != 0:
        raise HyperpodExtError(f"the CDK app in {folder} failed:\n{_end_of(done.stderr or done.stdout)}")
    return read_assembly(out)


def _context(folder: Path) -> dict[str, Any]:
    """Return the context from the file `cdk.json`, which the CDK command line would pass to the app."""
    file = folder / "cdk.json"
    if not file.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")).get("context", {})
    except ValueError as error:
        raise ConfigError([Problem(f"is not JSON: {error}", source=str(file))]) from None
    return found


def _violations(report: Path) -> Iterator[Problem]:
    """Yield the violations in the report of CDK's template validation as problems."""
    for plugin in json.loads(report.read_text(encoding="utf-8"))["pluginReports"]:
        for found in plugin["violations"]:
            for one in found["violatingConstructs"]:
                resource = one.get("cloudFormationResource", {})
                path = ".".join([resource.get("logicalId", ""), *resource.get("propertyPaths", [])[:1]])
                yield Problem(
                    found["description"],
                    path=path.replace(".Properties.", "."),
                    source=resource.get("templatePath", ""),
                    rule=found["ruleName"],
                )


def _end_of(text: str, lines: int = 30) -> str:
    kept = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(kept[-lines:])
