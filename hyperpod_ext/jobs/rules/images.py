"""Rules of container images: the image has a name, and all nodes can pull the same image."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hyperpod_ext.catalog.images import (
    checkpointless_image,
    checkpointless_regions,
    is_short_name,
    region_of,
    training_image,
    with_registry,
    wrong_registry,
)
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule


@rule(
    "HPX131",
    "error",
    "no container image",
    "Pods run a container image, so the spec must name one.",
    "Write image. In mode aws-checkpointless, AWS's image is the default if --cluster sets the region.",
)
def image_is_named(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target not in KUBERNETES or job.image is not None:
        return
    if job.mode == "aws-checkpointless" and context.target == "hyperpod-eks":
        if context.cluster is None:
            yield Finding(
                ("image",),
                "is missing: the default, AWS's image, depends on the region, which is unknown",
                "add image, or the option --cluster FILE",
            )
        return  # the cluster's region determines the image; HPX132 reports regions without AWS's image
    known = training_image(context.cluster.region) if context.cluster is not None else None
    such = f"; AWS's image for PyTorch in this region is {known}" if known else ""
    yield Finding(("image",), "is missing: pods run a container image", f"add image: REGISTRY/NAME:TAG{such}")


_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])"
_REFERENCE = re.compile(
    rf"(?:{_HOST}(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::\w[-\w.]{{0,127}})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9A-Fa-f]{32,})?",
    re.ASCII,
)
"""Pattern of an image name, `registry:port/path:tag@digest`, as container runtimes accept it."""
_FULL_NAME = "write REGISTRY/NAME:TAG"
_FAULTS = (
    (r".*\s.*", "contains a space", "remove the space"),
    (r".*://.*", "begins with a URL scheme", "remove the scheme, such as https://"),
    (r"/.*", "is a path, not an image name", _FULL_NAME),
    (r"(?:.*/)?[^/@]*:[^/@]*:[^/@]*(?:@.*)?", "has two tags", _FULL_NAME),
    (r"[^@]+@[^/]*", "has an invalid digest", "write 64 hexadecimal digits after @sha256:, or a tag instead"),
)
"""Patterns of invalid image names, each with the fault and a hint."""


def _fault(image: str) -> tuple[str, str]:
    """Return the fault of an invalid image name, and a hint."""
    if _REFERENCE.fullmatch(image.lower()):
        return "has upper-case letters before the tag", "write them in lower case"
    if "@" in image and not _REFERENCE.fullmatch(image.partition("@")[0]):
        image = image.partition("@")[0]  # look for the fault before the digest, which may be valid
    found = [(fault, hint) for form, fault, hint in _FAULTS if re.fullmatch(form, image, re.DOTALL)]
    return found[0] if found else ("is not a valid image name", f"{_FULL_NAME} in lower-case letters")


@rule(
    "HPX136",
    "error",
    "an invalid image name",
    "Pods with this image would wait with InvalidImageName, because nodes do not query a registry for an invalid name.",
    "Write REGISTRY/NAME:TAG in lower-case letters, without https:// and without spaces.",
)
def image_name_is_one(context: Context) -> Iterator[Finding]:
    image = context.job.image
    if context.target in KUBERNETES and image is not None and not _REFERENCE.fullmatch(image):
        fault, hint = _fault(image)
        yield Finding(("image",), f"`{image}` {fault}", hint)


@rule(
    "HPX132",
    "error",
    "no checkpointless image in this region",
    "AWS publishes its checkpointless container only in some regions.",
    "Run the job in one of these regions, or copy the image to your own registry and name it in image.",
)
def checkpointless_image_is_there(context: Context) -> Iterator[Finding]:
    job, cluster = context.job, context.cluster
    if job.mode != "aws-checkpointless" or job.image is not None or cluster is None:
        return
    if checkpointless_image(cluster.region) is None:
        listed = ", ".join(checkpointless_regions())
        yield Finding(
            ("image",), f"AWS has no checkpointless image in {cluster.region}", f"regions with this image: {listed}"
        )


@rule(
    "HPX137",
    "error",
    "AWS's image without a registry",
    "hyperpod-eks adds the registry of the cluster's region to the short name of AWS's checkpointless image. "
    "Without a cluster, or on another target, nodes would search the name in Docker Hub.",
    "Add --cluster FILE, or write the whole name: ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG.",
)
def short_name_is_completed(context: Context) -> Iterator[Finding]:
    image, cluster = context.job.image, context.cluster
    if image is None or not is_short_name(image):
        return
    if context.target != "hyperpod-eks":
        message = f"`{image}` has no registry, and only target hyperpod-eks adds it"
        yield Finding(("image",), message, "write the whole name, with its registry")
    elif cluster is None:
        yield Finding(
            ("image",), f"the registry of `{image}` depends on the region, which is unknown", "add --cluster FILE"
        )
    elif with_registry(image, cluster.region) is None:
        listed = ", ".join(checkpointless_regions())
        yield Finding(("image",), f"AWS has no `{image}` in {cluster.region}", f"regions with this image: {listed}")


@rule(
    "HPX133",
    "warning",
    "the image is in another region",
    "Every node would pull the image from another region. This is slow, costs money per GB, and fails without "
    "internet access.",
    "Copy the image to a registry in the cluster's region. ECR can replicate images.",
)
def image_is_near(context: Context) -> Iterator[Finding]:
    image, cluster = context.job.image, context.cluster
    region = region_of(image) if image else None
    if region and cluster and region != cluster.region:
        yield Finding(
            ("image",), f"is in {region}, but the cluster is in {cluster.region}", f"copy it to {cluster.region}"
        )


@rule(
    "HPX134",
    "warning",
    "an image that may change while the job runs",
    "Without a tag, or with `latest`, a node that joins later may run another build than the other nodes.",
    "Use a tag that never changes, or a digest: NAME@sha256:...",
)
def image_is_pinned(context: Context) -> Iterator[Finding]:
    image = context.job.image
    if image is None or "@sha256:" in image or image.endswith(".sqsh"):  # .sqsh is an image file on Slurm
        return
    tag = image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        named = f"with tag `{tag}`" if tag else "without a tag"
        message = f"{named}, a node that joins later may run another build"
        yield Finding(("image",), message, "use a tag that never changes")


@rule(
    "HPX135",
    "warning",
    "AWS's image with the account of another region",
    "AWS's images for PyTorch are in different accounts in different regions, so nodes will not find this image.",
    "Write AWS's registry for this region.",
)
def image_is_in_its_registry(context: Context) -> Iterator[Finding]:
    image = context.job.image
    if image is not None and (registry := wrong_registry(image)) is not None:
        yield Finding(
            ("image",), f"is not in account {image.partition('.')[0]} in this region", f"write {registry}/..."
        )
