"""Synthesises the CDK app's stacks in this process. Only for tests/cdk: the CDK is an extra of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.config.cluster import ClusterConfig

CDK = Path(__file__).resolve().parents[2] / "cdk"
Templates = dict[str, dict[str, Any]]


def context() -> dict[str, Any]:
    """The flags of cdk.json, which the CDK's command line would give."""
    found: dict[str, Any] = json.loads((CDK / "cdk.json").read_text())["context"]
    return found


def new_app(folder: Path, *, validate: bool = False) -> Any:
    """An app that writes to `folder`; the validator of templates takes most of the time."""
    import aws_cdk as cdk

    return cdk.App(context=context(), outdir=str(folder), builtin_cloud_formation_validation=validate)


def synthesise(
    config: ClusterConfig, folder: Path, *, scale: bool = True, validate: bool = False, plugins: Sequence[Any] = ()
) -> Templates:
    """Templates of `config` by part, written to `folder`."""
    import aws_cdk as cdk
    from hyperpod_cdk import build

    app = new_app(folder, validate=validate)
    stacks = build(app, config, scale=scale)
    for plugin in plugins:
        cdk.Validations.of(app).add_plugins(plugin(app))
    app.synth()
    return {
        part: json.loads((folder / f"{stack.stack_name}.template.json").read_text()) for part, stack in stacks.items()
    }
