"""Synthesises the CDK app's stacks in this process. Only for tests/cdk: the CDK is an extra of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.files import write_atomically

CDK = Path(__file__).resolve().parents[2] / "cdk"
CACHE = Path(sys.prefix) / "cdk-cache"
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
    """Templates of `config` by part, written to `folder`.

    Without validators they are made once for each content of the app and of `config`, and kept in the environment.
    """
    kept = None if validate or plugins else CACHE / f"{_content_of(config, scale)}.json"
    if kept is not None and kept.exists():
        found: Templates = json.loads(kept.read_text())
        return found
    templates = _synthesise(config, folder, scale, validate, plugins)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(templates))
    return templates


def _synthesise(config: ClusterConfig, folder: Path, scale: bool, validate: bool, plugins: Sequence[Any]) -> Templates:
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


def _content_of(config: ClusterConfig, scale: bool) -> str:
    """Digest of all that decides what is synthesised."""
    return sha256(f"{_content_of_the_app()} {scale} {config.model_dump_json()}".encode()).hexdigest()


@cache
def _content_of_the_app() -> str:
    digest = sha256(f"{version('aws-cdk-lib')} {version('constructs')} {version('pydantic')}".encode())
    for part in ("cdk", "hyperpod_ext/catalog", "hyperpod_ext/config", "hyperpod_ext/clusters"):
        for file in sorted((CDK.parent / part).rglob("*")):
            if file.suffix in (".py", ".json", ".sh", ".yaml", ".j2") and "cdk.out" not in file.parts:
                digest.update(f"{file.relative_to(CDK.parent)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
