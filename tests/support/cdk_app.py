"""Synthesises the CDK app's stacks in this process. Only for tests/cdk: the CDK is an extra of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyperpod_ext.config.cluster import ClusterConfig

CDK = Path(__file__).resolve().parents[2] / "cdk"
Templates = dict[str, dict[str, Any]]


def context() -> dict[str, Any]:
    """The flags of cdk.json, which the CDK's command line would give."""
    found: dict[str, Any] = json.loads((CDK / "cdk.json").read_text())["context"]
    return found


@contextmanager
def validation(on: bool) -> Iterator[None]:
    """The CDK's validator of templates, which takes most of the time."""
    before = os.environ.get("CDK_VALIDATION")
    os.environ["CDK_VALIDATION"] = "true" if on else "false"
    try:
        yield
    finally:
        os.environ.pop("CDK_VALIDATION")
        if before is not None:
            os.environ["CDK_VALIDATION"] = before


def synthesise(
    config: ClusterConfig, folder: Path, *, scale: bool = True, validate: bool = False, plugins: Sequence[Any] = ()
) -> Templates:
    """Templates of `config` by part, written to `folder`."""
    import aws_cdk as cdk
    from hyperpod_cdk import build

    app = cdk.App(context=context(), outdir=str(folder))
    stacks = build(app, config, scale=scale)
    for plugin in plugins:
        cdk.Validations.of(app).add_plugins(plugin(app))
    with validation(validate):
        app.synth()
    return {
        part: json.loads((folder / f"{stack.stack_name}.template.json").read_text()) for part, stack in stacks.items()
    }
