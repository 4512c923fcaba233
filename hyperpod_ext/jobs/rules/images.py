"""Container images: it is named, and all nodes can pull the same one."""

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
    "Pods run an image; without a name there is none that they could run.",
    "Write image. In mode aws-checkpointless AWS's own is taken when --cluster says the region.",
)
def image_is_named(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target not in KUBERNETES or job.image is not None:
        return
    if job.mode == "aws-checkpointless" and context.target == "hyperpod-eks":
        if context.cluster is None:
            yield Finding(
                ("image",), "AWS's image differs by region, and none is known", "add image, or --cluster FILE"
            )
        return  # HPX132 reports regions without it
    known = training_image(context.cluster.region) if context.cluster is not None else None
    such = f"; AWS's own for PyTorch there is {known}" if known else ""
    yield Finding(("image",), "is missing: pods run a container image", f"add image: REGISTRY/NAME:TAG{such}")


_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])"
_REFERENCE = re.compile(
    rf"(?:{_HOST}(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::\w[-\w.]{{0,127}})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9A-Fa-f]{32,})?",
    re.ASCII,
)
"""`registry:port/path:tag@digest`, as container runtimes read it."""


@rule(
    "HPX136",
    "error",
    "a name that no image can have",
    "Pods with it stay at InvalidImageName: their nodes ask no registry for such a name.",
    "Write REGISTRY/NAME:TAG, the name in lower-case letters, without https:// and without spaces.",
)
def image_name_is_one(context: Context) -> Iterator[Finding]:
    image = context.job.image
    if context.target in KUBERNETES and image is not None and not _REFERENCE.fullmatch(image):
        hint = "write REGISTRY/NAME:TAG, the name in lower-case letters, without https:// and without spaces"
        yield Finding(("image",), f"`{image}` is no name of an image", hint)


@rule(
    "HPX132",
    "error",
    "no checkpointless image in this region",
    "AWS publishes its checkpointless container in some regions only.",
    "Run in one of those, or copy the image to a registry of your own and name it in image.",
)
def checkpointless_image_is_there(context: Context) -> Iterator[Finding]:
    job, cluster = context.job, context.cluster
    if job.mode != "aws-checkpointless" or job.image is not None or cluster is None:
        return
    if checkpointless_image(cluster.region) is None:
        listed = ", ".join(checkpointless_regions())
        yield Finding(("image",), f"AWS has no checkpointless image in {cluster.region}", f"it has in: {listed}")


@rule(
    "HPX137",
    "error",
    "AWS's image without its registry",
    "On hyperpod-eks the repository and tag of a checkpointless image of AWS are completed with the registry of the "
    "cluster's region. Without a cluster, or on another target, nodes would look for the name in Docker Hub.",
    "Add --cluster FILE, or write the whole name: ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG.",
)
def short_name_is_completed(context: Context) -> Iterator[Finding]:
    image, cluster = context.job.image, context.cluster
    if image is None or not is_short_name(image):
        return
    if context.target != "hyperpod-eks":
        message = f"`{image}` has no registry, and only hyperpod-eks completes the name"
        yield Finding(("image",), message, "write the whole name, with its registry")
    elif cluster is None:
        yield Finding(("image",), f"the registry of `{image}` differs by region", "add --cluster FILE")
    elif with_registry(image, cluster.region) is None:
        listed = ", ".join(checkpointless_regions())
        yield Finding(("image",), f"AWS has no `{image}` in {cluster.region}", f"it has in: {listed}")


@rule(
    "HPX133",
    "warning",
    "the image is in another region",
    "Every node fetches the image across regions: slow, paid for by the GB, and not possible without a way out.",
    "Copy the image to a registry of the cluster's region; ECR can replicate it.",
)
def image_is_near(context: Context) -> Iterator[Finding]:
    image, cluster = context.job.image, context.cluster
    region = region_of(image) if image else None
    if region and cluster and region != cluster.region:
        yield Finding(("image",), f"is in {region}; the cluster is in {cluster.region}", f"copy it to {cluster.region}")


@rule(
    "HPX134",
    "warning",
    "the image may change under the job",
    "With no tag, or with `latest`, a node that joins later may run another build than the others.",
    "Name a tag that is never moved, or a digest: NAME@sha256:...",
)
def image_is_pinned(context: Context) -> Iterator[Finding]:
    image = context.job.image
    if image is None or "@sha256:" in image or image.endswith(".sqsh"):  # a file, on Slurm
        return
    tag = image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield Finding(("image",), f"`{tag or 'no tag'}` may mean another build tomorrow", "name a tag that stays")


@rule(
    "HPX135",
    "warning",
    "AWS's image from an account that has none in its region",
    "AWS's images for PyTorch are in one account in most regions, and in others elsewhere: nodes find no such image.",
    "Write the registry that AWS has in the region.",
)
def image_is_in_its_registry(context: Context) -> Iterator[Finding]:
    image = context.job.image
    if image is not None and (registry := wrong_registry(image)) is not None:
        yield Finding(("image",), f"is not in account {image.partition('.')[0]} there", f"write {registry}/...")
