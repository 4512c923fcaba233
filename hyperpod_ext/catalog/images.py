"""Container images that AWS publishes, by region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog import facts

_IMAGES, _TRAINING = "images.json", "training_images.json"


def training_image(region: str) -> str | None:
    """Return AWS's newest container image for training with PyTorch in `region`; None if the catalog has no image for
    the region."""
    known = facts(_TRAINING)
    account = known["accounts"].get(region)
    if account is None:
        return None
    return f"{_registry(account, region)}/{known['repository']}:{list(known['tags'].values())[-1]}"


def wrong_registry(image: str) -> str | None:
    """Check whether `image` is one of AWS's training images, but with the AWS account of another region.

    Returns:
        The correct registry for the region of `image`; None if the registry of `image` is correct or not AWS's.
    """
    host, _, name = image.partition("/")
    region, accounts = region_of(image), facts(_TRAINING)["accounts"]
    if region is None or region not in accounts or not name.startswith(f"{facts(_TRAINING)['repository']}:"):
        return None
    account = host.partition(".")[0]
    if account == accounts[region] or account not in accounts.values():
        return None
    return _registry(accounts[region], region)


def _registry(account: str, region: str) -> str:
    return f"{account}.dkr.ecr.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def checkpointless_image(region: str) -> str | None:
    """Return the name of AWS's checkpointless container in `region`; None if AWS publishes no container there."""
    return with_registry(_short_name(facts(_IMAGES)["checkpointless"]), region)


def checkpointless_regions() -> list[str]:
    """Return the regions for which AWS publishes its checkpointless container."""
    return sorted(facts(_IMAGES)["checkpointless"]["accounts"])


def is_short_name(image: str) -> bool:
    """Return whether `image` is the repository and tag of a checkpointless image of AWS, without a registry."""
    return image in map(_short_name, _checkpointless_images())


def with_registry(image: str, region: str) -> str | None:
    """Return `image` with AWS's registry in `region` if `image` is a short name. Other names are returned unchanged.

    Return None if AWS has no registry for the image in `region`.
    """
    for known in _checkpointless_images():
        if image == _short_name(known):
            account = known["account"] if "account" in known else known["accounts"].get(region)
            return None if account is None else f"{_registry(account, region)}/{image}"
    return image


def _short_name(known: Mapping[str, Any]) -> str:
    return f"{known['repository']}:{known['tag']}"


def _checkpointless_images() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return facts(_IMAGES)["checkpointless"], facts(_IMAGES)["launch_article"]


def region_of(image: str) -> str | None:
    """Return the AWS region of the registry of `image`; None if the registry is not in Amazon ECR."""
    host = image.partition("/")[0]
    parts = host.split(".")
    return parts[3] if len(parts) >= 6 and parts[1:3] == ["dkr", "ecr"] else None
