"""Split the upload of a checkpoint: divide snapshots among nodes, and each snapshot into files.

Large frozen parameters of a snapshot get a separate file, which can be copied from an earlier checkpoint instead of
uploaded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hyperpod_ext.runtime.snapshot.manifest import Manifest, checksum_after, content_of, crc_text, crc_value
from hyperpod_ext.runtime.storage.names import frozen_file_of, image_of

FROZEN_BYTES = 1 << 20
"""Minimum size of a file for frozen parameters. For fewer bytes, uploading again costs less than copying a file."""


class ImageFile(NamedTuple):
    """A file with consecutive bytes of one rank's snapshot."""

    name: str
    start: int
    """Position of the file's first byte in the snapshot."""
    nbytes: int
    crc64nvme: str


def frozen_part(snapshot: Manifest) -> ImageFile | None:
    """Return the file for the frozen parameters, which are at the start of a rank's snapshot.

    Return None if the snapshot has no frozen parameters, or too small ones for a separate file.

    Args:
        snapshot: manifest of the snapshot, from the rank that uploads it.
    """
    nbytes, checksum = snapshot.get("extras", {}).get("frozen") or (0, "")
    if not FROZEN_BYTES <= int(nbytes) < int(snapshot["nbytes"]):
        return None
    return ImageFile(frozen_file_of(int(snapshot["rank"])), 0, int(nbytes), str(checksum))


def split_image(name: str, snapshot: Manifest, frozen: ImageFile | None) -> tuple[ImageFile, ...]:
    """Return the files of one rank's snapshot, in the order of their bytes.

    Args:
        name: name of the file with all bytes that are not in `frozen`.
        snapshot: manifest of the snapshot.
        frozen: the file for the frozen parameters; None: the snapshot has only one file.

    Raises:
        ValueError: the sizes or checksums contradict each other.
    """
    nbytes, checksum = int(snapshot["nbytes"]), str(snapshot["crc64nvme"])
    if frozen is None:
        return (ImageFile(name, 0, nbytes, checksum),)
    rest = nbytes - frozen.nbytes
    if not 0 < frozen.nbytes < nbytes:
        raise ValueError(f"{frozen.name} cannot have {frozen.nbytes} of the {nbytes} bytes of an image")
    checksum = crc_text(checksum_after(crc_value(checksum), crc_value(frozen.crc64nvme), rest))
    return frozen, ImageFile(name, frozen.nbytes, rest, checksum)


def files_of(checkpoint: Manifest, rank: str) -> tuple[ImageFile, ...]:
    """Return the files of one rank's snapshot, according to the checkpoint's manifest, in the order of their bytes.

    Raises:
        ValueError: the sizes or checksums in the manifest contradict each other.
    """
    name = str(checkpoint["files"][rank])
    known = checkpoint.get("frozen", {}).get(name)
    frozen = known and ImageFile(str(known["file"]), 0, int(known["nbytes"]), str(known["crc64nvme"]))
    return split_image(name, checkpoint["ranks"][rank], frozen)


def partition_uploads(records: Mapping[int, Sequence[Manifest]]) -> tuple[dict[int, str], dict[int, list[int]]]:
    """Return the name of each rank's file, and the ranks whose files each node uploads.

    Ranks with equal bytes, as in data parallelism, share one file. Among the nodes that have a rank's bytes, the node
    with the fewest bytes to upload so far uploads the file. Every node computes the same division.

    Args:
        records: the manifests that each node has announced.
    """
    holders: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, int] = {}
    for node, manifests in sorted(records.items()):
        for manifest in manifests:
            content = content_of(manifest)
            holders.setdefault(content, []).append((int(manifest["rank"]), node))
            sizes[content] = int(manifest["nbytes"])
    files: dict[int, str] = {}
    uploads: dict[int, list[int]] = {node: [] for node in records}
    load = dict.fromkeys(records, 0)
    for content, places in sorted(holders.items(), key=lambda item: (-sizes[item[0]], min(item[1]))):
        node = min({node for _, node in places}, key=lambda node: (load[node], node))
        rank = min(rank for rank, where in places if where == node)
        uploads[node].append(rank)
        load[node] += sizes[content]
        files.update({other: image_of(rank) for other, _ in places})
    return files, uploads
