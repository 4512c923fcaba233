"""The signed records of snapshots and checkpoints. Written last: without a manifest there is no snapshot.

Readers ignore unknown fields of newer writers, and refuse a newer format. Manifests are never unpickled, and never
trusted before the signature and the bytes' checksum are verified.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.terminal import quote

FORMAT = 2
"""2: a checkpoint may have frozen parameters in files of their own. Both formats are read."""
LIGHT_BYTES = 4 << 20
LIGHT_VALUES = 1 << 18
"""Documents with more bytes or values are parsed only if signed by the job: a parsed value may take 30 times its
bytes."""
_SIGNATURE = re.compile(rb',"signature":"([0-9a-f]{64})"')
_TAIL = 4096
_PIECE = 1 << 20

Manifest = dict[str, Any]
"""Fields of a snapshot's manifest: format, job, rank, world_size, generation, step, save_id, plan (digest), nbytes,
crc64nvme (hex), values (plain values in the plan's order), extras, saved_at (Unix seconds), signature.

Fields of a checkpoint's manifest: format, job, generation, step, save_id, world_size, ranks (rank to manifest of its
snapshot), files (rank to the name of its image), frozen (name of an image to file, nbytes and crc64nvme of its frozen
part, which is not in the image's file), macs (name of a file to its MAC, see storage/mac.py), derived (sizes and
checksums of torch's files), created_at, signature."""


def save_id_of(generation: int, step: int) -> str:
    """Return the name of a commit. A step repeated after a fault is another commit."""
    return f"g{generation}-s{step}"


def save_id_in(save_id: str, run: str) -> str:
    """Return the name of a commit of another run, for disks with commits of several runs; empty `run`: this run."""
    return f"{save_id}@{run}" if run else save_id


def without_run(save_id: str) -> tuple[str, str]:
    """Return the save ID without the run, and the run; empty: this run."""
    own, _, run = save_id.partition("@")
    return own, run


@functools.lru_cache(maxsize=4096)
def generation_of(save_id: str) -> int:
    """Return the generation in a save ID."""
    return int(save_id.removeprefix("g").partition("-")[0])


def crc64nvme(data: Any, previous: int = 0) -> int:
    """Return the CRC64-NVME of a buffer, which S3 computes, too. Frees the GIL."""
    from awscrt import checksums

    return int(checksums.crc64nvme(data, previous))


def join_checksums(parts: Sequence[tuple[int, int]]) -> int:
    """Return the CRC64-NVME of consecutive parts, from the checksum and the length of each."""
    from awscrt import checksums

    combined = 0
    for checksum, nbytes in parts:
        combined = int(checksums.combine_crc64nvme(combined, checksum, nbytes))
    return combined


def checksum_after(total: int, first: int, nbytes: int) -> int:
    """Return the CRC64-NVME of the last `nbytes` bytes, from the checksums of all bytes and of the bytes before."""
    from awscrt import checksums

    return total ^ int(checksums.combine_crc64nvme(first, 0, nbytes))


def crc_text(checksum: int) -> str:
    """Return a CRC64 in the form of manifests: 16 hex digits."""
    return f"{checksum:016x}"


def crc_value(text: str) -> int:
    """Return the CRC64 in a text of `crc_text`. Raises ValueError for anything else."""
    if len(text) != 16:
        raise ValueError(f"{text!r} is not a CRC64 of 16 hex digits")
    return int.from_bytes(bytes.fromhex(text), "big")


def content_of(manifest: Mapping[str, Any]) -> str:
    """Return a digest of a snapshot's contents: snapshots with equal digests are bit for bit interchangeable."""
    parts = [manifest["plan"], manifest["crc64nvme"], manifest["nbytes"], manifest["values"]]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


def sign(manifest: Mapping[str, Any], secret: bytes) -> Manifest:
    """Return `manifest` with an HMAC-SHA256 over all other fields."""
    return {**manifest, "signature": _signature(manifest, secret)}


def signed_text(manifest: Mapping[str, Any], secret: bytes) -> bytes:
    """Return the signed manifest as JSON that `is_signed_text` can check without parsing."""
    return _canonical(sign(manifest, secret))


def is_signed_text(read: Callable[[int, int], Any], nbytes: int, secret: bytes) -> bool:
    """Return whether `signed_text` made a document with this secret, without parsing the document.

    The signature is near the end, and covers the text without itself.

    Args:
        read: returns the bytes from the first number up to the second.
        nbytes: length of the document.
    """
    first = max(nbytes - _TAIL, 0)
    found = [*_SIGNATURE.finditer(read(first, nbytes))]
    if not found:
        return False
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for start, end in ((0, first + found[-1].start()), (first + found[-1].end(), nbytes)):
        for at in range(start, end, _PIECE):
            mac.update(read(at, min(at + _PIECE, end)))
    return hmac.compare_digest(mac.hexdigest().encode(), found[-1][1])


def check_manifest(manifest: Mapping[str, Any], secret: bytes, *, job: str, where: str = "") -> None:
    """Check that this job's processes wrote a manifest.

    Raises:
        CorruptSnapshotError: newer format, wrong signature, or another job.
    """
    rank = f" of rank {quote(manifest['rank'])}" if "rank" in manifest else ""
    where = where or f"snapshot{rank} at step {quote(manifest.get('step'))}"
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise CorruptSnapshotError(
            f"{where}: format {quote(manifest.get('format'))} is newer than {FORMAT}, the newest this version reads",
            hint="Upgrade hyperpod_ext in the container.",
        )
    if manifest.get("job") != job:
        raise CorruptSnapshotError(f"{where}: it belongs to job {quote(manifest.get('job'))}, not to {job!r}")
    signature = str(manifest.get("signature")).encode(errors="replace")  # compare_digest refuses text beyond ASCII
    if not hmac.compare_digest(signature, _signature(manifest, secret).encode()):
        raise CorruptSnapshotError(
            f"{where}: its manifest is not signed with this job's secret",
            hint="Either it was tampered with, or the job runs with another secret than the one that wrote it.",
        )


def check_bytes(manifest: Mapping[str, Any], data: Any, where: str = "") -> None:
    """Check bytes against the manifest's length and checksum."""
    check_crc(manifest, len(data), crc64nvme(data), where)


def check_crc(manifest: Mapping[str, Any], nbytes: int, checksum: int, where: str = "") -> None:
    """Check a length and a checksum against the manifest."""
    where = where or f"snapshot of rank {manifest['rank']} at step {manifest['step']}"
    if nbytes != manifest["nbytes"]:
        raise CorruptSnapshotError(f"{where}: it is {nbytes} bytes long, the manifest says {manifest['nbytes']}")
    if crc_text(checksum) != manifest["crc64nvme"]:
        raise CorruptSnapshotError(
            f"{where}: CRC64-NVME is {crc_text(checksum)}, the manifest says {manifest['crc64nvme']}"
        )


class TooHeavyError(CorruptSnapshotError):
    """A document is not light, and not signed by the job."""

    def __init__(self, where: str, nbytes: int) -> None:
        super().__init__(
            f"{where}: it has {nbytes} bytes; a document of more than {LIGHT_BYTES} bytes or {LIGHT_VALUES} values is "
            "read only if the job has signed it",
            hint="Remove it if the job has not written it. If an earlier version has, restore it with that version.",
        )


def is_light(data: bytes) -> bool:
    """Return whether an unsigned document is small enough to be parsed."""
    return len(data) <= LIGHT_BYTES and sum(map(data.count, (b",", b":", b"[", b"{"))) <= LIGHT_VALUES


def read_document(data: bytes, where: str, *, trusted: bool = False) -> dict[str, Any]:
    """Parse a JSON object from storage.

    Args:
        trusted: the job wrote these bytes, so any number is allowed.

    Raises:
        CorruptSnapshotError: the bytes are empty, truncated, or no JSON object.
    """
    if not trusted and not is_light(data):
        raise TooHeavyError(where, len(data))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptSnapshotError(f"{where}: not JSON ({error}); {len(data)} bytes") from error
    if not isinstance(document, dict):
        raise CorruptSnapshotError(f"{where}: not a JSON object")
    return document


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _signature(manifest: Mapping[str, Any], secret: bytes) -> str:
    signed = {key: value for key, value in manifest.items() if key != "signature"}
    try:
        return hmac.new(secret, _canonical(signed), hashlib.sha256).hexdigest()
    except RecursionError:  # the parser allowed one more level of nesting
        raise CorruptSnapshotError("a manifest is nested too deep") from None
