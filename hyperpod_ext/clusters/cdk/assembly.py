"""Reads the output folder of a CDK app (a cloud assembly), which contains the app's CloudFormation stacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import ConfigError, HyperpodExtError, NotFoundError, Problem

Template = Mapping[str, Any]
_STACK = "aws:cloudformation:stack"
_NOT_MADE = frozenset({"AWS::CDK::Metadata"})


@dataclass(frozen=True, slots=True)
class Stack:
    """One CloudFormation stack."""

    name: str
    template: Template

    @property
    def resources(self) -> Mapping[str, Mapping[str, Any]]:
        """Resources of the stack by logical id."""
        return resources_of(self.template)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Content of a CDK app's output folder, `cdk.out`."""

    folder: Path
    stacks: tuple[Stack, ...]
    """Stacks in the order of deployment: each stack comes after the stacks that it depends on."""
    needs_bootstrap: bool = False
    """Whether the deployment needs an account that `cdk bootstrap` has prepared."""

    def templates(self) -> dict[str, Template]:
        """Return the template of each stack, by the name of the stack."""
        return {stack.name: stack.template for stack in self.stacks}

    def of_kind(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the stack's name and the properties of each resource of the CloudFormation type `kind`."""
        for stack in self.stacks:
            for resource in stack.resources.values():
                if resource["Type"] == kind:
                    yield stack.name, resource.get("Properties", {})


def resources_of(template: Template) -> Mapping[str, Mapping[str, Any]]:
    """Return the resources of a template by logical id, without CDK's metadata resources."""
    found = template.get("Resources", {})
    return {name: resource for name, resource in found.items() if resource["Type"] not in _NOT_MADE}


def read_assembly(folder: Path) -> Assembly:
    """Read the output folder of a CDK app.

    Raises:
        NotFoundError: the folder is not the output folder of a CDK app.
        HyperpodExtError: the app needs a look-up in AWS, which is not supported.
        ConfigError: a file in the folder is not valid JSON.
    """
    file = folder / "manifest.json"
    if not file.is_file():
        hint = "name an output folder of `hp-ext cluster synth --out` or `cdk synth`"
        raise NotFoundError(f"{folder} has no manifest.json of CDK", hint=hint)
    manifest = _json(file)
    if missing := manifest.get("missing"):
        asked = ", ".join(sorted(str(one.get("key")) for one in missing))
        hint = "set zones, subnets and images in the cluster's file"
        raise HyperpodExtError(f"the CDK app looks up {asked} in the AWS account, which is not supported", hint=hint)
    artifacts = {name: one for name, one in manifest.get("artifacts", {}).items() if one.get("type") == _STACK}
    stacks = {}
    for name, artifact in artifacts.items():
        properties = artifact.get("properties", {})
        template = _json(folder / properties["templateFile"])
        stacks[name] = Stack(str(properties.get("stackName", name)), template)
    needs = {name: [one for one in artifact.get("dependencies", []) if one in stacks]
             for name, artifact in artifacts.items()}  # fmt: skip
    prepared = any("requiresBootstrapStackVersion" in one.get("properties", {}) for one in artifacts.values())
    return Assembly(folder, tuple(stacks[name] for name in in_order(needs)), prepared)


def in_order(needs: Mapping[str, list[str]]) -> list[str]:
    """Return the names of stacks sorted so that each name comes after its dependencies. Stacks that do not depend on
    each other keep their order.

    Args:
        needs: names of the dependencies, by the name of the stack.
    """
    done: list[str] = []

    def take(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise HyperpodExtError(
                f"stacks depend on each other: {' -> '.join((*above, name))}",
                hint="remove one of these dependencies from the CDK app",
            )
        if name in done:
            return
        for one in needs[name]:
            take(one, (*above, name))
        done.append(name)

    for name in needs:
        take(name, ())
    return done


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {file}", hint="run `hp-ext cluster synth` again") from None
    except ValueError as error:
        raise ConfigError([Problem(f"is not JSON: {error}", source=str(file))]) from None
    if not isinstance(found, dict):
        raise ConfigError([Problem("is not a JSON object", source=str(file))])
    return found
