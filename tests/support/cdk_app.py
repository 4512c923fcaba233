"""Synthesises the CDK app's stacks in this process. Only for tests/cdk: the CDK is an extra of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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


def kept(make: Callable[[], Any], *content: object) -> Any:
    """What `make` gives, as JSON, kept in the environment.

    It is made once for each content of the app, of the file that `make` stands in, and of all else that decides it.
    """
    source = Path(make.__code__.co_filename).read_text()
    told = "\n".join([_content_of_the_app(), source, make.__qualname__, *map(str, content)])
    file = CACHE / f"{sha256(told.encode()).hexdigest()}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(make()))
    return json.loads(file.read_text())


def synthesise(
    config: ClusterConfig, folder: Path, *, scale: bool = True, validate: bool = False, nag: bool = False
) -> Templates:
    """Templates of `config` by part; all files that the CDK wrote are in `folder`. Kept, unless it refused."""

    def files() -> list[dict[str, str]]:
        import aws_cdk as cdk
        from hyperpod_cdk import build

        app = new_app(folder, validate=validate)
        stacks = build(app, config, scale=scale)
        if nag:
            from cdk_nag import AwsSolutionsChecks

            cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
        app.synth()
        parts = {part: f"{stack.stack_name}.template.json" for part, stack in stacks.items()}
        return [parts, {file.name: file.read_text() for file in folder.glob("*.json")}]

    parts, written = kept(files, config.model_dump_json(), scale, validate, nag)
    folder.mkdir(parents=True, exist_ok=True)  # the CDK has made it, unless the files were kept
    for name, text in written.items():
        (folder / name).write_text(text)
    return {part: json.loads(written[name]) for part, name in parts.items()}


@cache
def _content_of_the_app() -> str:
    packages = ("aws-cdk-lib", "constructs", "jsii", "cdk-nag", "cfn-lint", "pydantic")
    digest = sha256(" ".join(map(version, packages)).encode())
    for part in ("cdk", "hyperpod_ext/catalog", "hyperpod_ext/config", "hyperpod_ext/clusters"):
        for file in sorted((CDK.parent / part).rglob("*")):
            if file.suffix in (".py", ".json", ".sh", ".yaml", ".j2") and "cdk.out" not in file.parts:
                digest.update(f"{file.relative_to(CDK.parent)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
