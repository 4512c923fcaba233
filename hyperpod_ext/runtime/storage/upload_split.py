"""Split the upload of a checkpoint among its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyperpod_ext.runtime.snapshot.manifest import Manifest, content_of
from hyperpod_ext.runtime.storage.names import image_of


def partition_uploads(records: Mapping[int, Sequence[Manifest]]) -> tuple[dict[int, str], dict[int, list[int]]]:
    """Return the file of each rank, and the ranks that each node uploads. Every node computes the same result.

    Ranks with equal bytes (data parallelism) share one file: the node with the smallest load uploads it, once.
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
