"""Manifests: the signed records of snapshots and checkpoints.

A manifest is written after all other data: a snapshot or checkpoint without a manifest counts as not written. Readers
ignore unknown fields, which newer versions may add, and refuse a newer `format`. Manifests are JSON, never pickles.
Readers use a manifest only after they have verified its signature, and a snapshot only after they have verified the
checksum of its bytes.
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
"""Format of new manifests. In format 2 a checkpoint may have its frozen parameters in separate files. Formats 1 and 2
can be read."""
LIGHT_BYTES = 4 << 20
LIGHT_VALUES = 1 << 18
"""A JSON document with more bytes or values than these limits is parsed only if the job has signed it, because a parsed
value may take 30 times the memory of its text."""
_SIGNATURE = re.compile(rb',"signature":"([0-9a-f]{64})"')
_TAIL = 4096
_PIECE = 1 << 20

Manifest = dict[str, Any]
"""Fields of a snapshot's manifest: format, job, rank, world_size, generation, step, save_id, own_digest (digest of the
state that may differ between ranks), plan (digest), nbytes, crc64nvme (hex), values (plain values in the plan's order),
extras, saved_at (Unix seconds), signature.

Fields of a checkpoint's manifest: format, job, generation, step, save_id, world_size, ranks (by rank: manifest of its
snapshot), files (by rank: file name of its image), frozen (by file name of an image: file, nbytes and crc64nvme of its
frozen parameters, which are in that separate file), macs (by file name: its MAC, see storage/mac.py), derived (sizes
and checksums of DCP's files), of_node (true if the checkpoint has only one node's ranks), nbytes, created_at (Unix
seconds), signature."""


def save_id_of(generation: int, step: int) -> str:
    """Return the save ID of a commit (a finished step): its generation and step.

    A step that is repeated after a fault is another commit, because its generation differs.
    """
    return f"g{generation}-s{step}"


def save_id_in(save_id: str, run: str) -> str:
    """Return a save ID with the run of its commit, for disks with commits of several runs.

    Args:
        save_id: the save ID without a run.
        run: another run of the job; empty for this run, whose save IDs stay unchanged.
    """
    return f"{save_id}@{run}" if run else save_id


def without_run(save_id: str) -> tuple[str, str]:
    """Split a result of `save_id_in` into the save ID and the run; the run is empty for this run."""
    own, _, run = save_id.partition("@")
    return own, run


@functools.lru_cache(maxsize=4096)
def generation_of(save_id: str) -> int:
    """Return the generation of a save ID."""
    return int(save_id.removeprefix("g").partition("-")[0])


def crc64nvme(data: Any, previous: int = 0) -> int:
    """Return the CRC64-NVME of a buffer, a checksum that S3 also computes. The function releases the GIL.

    Args:
        data: the buffer.
        previous: checksum of earlier bytes. The result is the checksum of the earlier bytes followed by the buffer.
    """
    from awscrt import checksums

    return int(checksums.crc64nvme(data, previous))


def join_checksums(parts: Sequence[tuple[int, int]]) -> int:
    """Return the CRC64-NVME of the concatenation of several parts, from the checksum and the length of each part."""
    from awscrt import checksums

    combined = 0
    for checksum, nbytes in parts:
        combined = int(checksums.combine_crc64nvme(combined, checksum, nbytes))
    return combined


def checksum_after(total: int, first: int, nbytes: int) -> int:
    """Return the CRC64-NVME of the last `nbytes` bytes of a buffer.

    Args:
        total: checksum of the whole buffer.
        first: checksum of the bytes before the last `nbytes`.
        nbytes: number of last bytes.
    """
    from awscrt import checksums

    return total ^ int(checksums.combine_crc64nvme(first, 0, nbytes))


def crc_text(checksum: int) -> str:
    """Return a CRC64 as 16 hex digits, the form in manifests."""
    return f"{checksum:016x}"


def crc_value(text: str) -> int:
    """Return the CRC64 as a number, from a text that `crc_text` has returned.

    Raises:
        ValueError: the text is not 16 hex digits.
    """
    if len(text) != 16:
        raise ValueError(f"{text!r} is not a CRC64 of 16 hex digits")
    return int.from_bytes(bytes.fromhex(text), "big")


def content_of(manifest: Mapping[str, Any]) -> str:
    """Return a digest of a snapshot's contents. Snapshots with equal digests are bitwise equal."""
    parts = [manifest["plan"], manifest["crc64nvme"], manifest["nbytes"], manifest["values"]]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


def sign(manifest: Mapping[str, Any], secret: bytes) -> Manifest:
    """Return `manifest` with the field `signature`: an HMAC-SHA256 over all other fields."""
    return {**manifest, "signature": _signature(manifest, secret)}


def signed_text(manifest: Mapping[str, Any], secret: bytes) -> bytes:
    """Return the signed manifest as JSON that `is_signed_text` can check without parsing."""
    return _canonical(sign(manifest, secret))


def is_signed_text(read: Callable[[int, int], Any], nbytes: int, secret: bytes) -> bool:
    """Return whether a document was written by `signed_text` with this secret, without parsing the document.

    The signature is near the end of the text, and is computed over the text without the signature.

    Args:
        read: returns the document's bytes from a first offset up to a second offset.
        nbytes: length of the document in bytes.
        secret: the job's secret.
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


NOT_SIGNED = "not signed with this job's secret"
OTHER_SECRET = "Either the manifest was changed, or the job had another secret when it wrote the manifest."
"""Hint for a manifest that is not signed with the job's secret."""


def check_manifest(manifest: Mapping[str, Any], secret: bytes, *, job: str, where: str = "") -> None:
    """Check that processes of this job have written a manifest.

    Args:
        manifest: the parsed manifest.
        secret: the job's secret.
        job: the job's name.
        where: place of the manifest, for errors; empty to name the manifest's rank and step instead.

    Raises:
        CorruptSnapshotError: the manifest has a newer format or a wrong signature, or belongs to another job.
    """
    rank = f" of rank {quote(manifest['rank'])}" if "rank" in manifest else ""
    where = where or f"snapshot{rank} at step {quote(manifest.get('step'))}"
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise CorruptSnapshotError(
            f"{where}: format {quote(manifest.get('format'))} is newer than {FORMAT}, the newest this version reads",
            hint="Upgrade hyperpod_ext in the container.",
        )
    if manifest.get("job") != job:
        raise CorruptSnapshotError(f"{where}: belongs to job {quote(manifest.get('job'))}, not to {job!r}")
    signature = str(manifest.get("signature")).encode(errors="replace")  # compare_digest refuses non-ASCII text
    if not hmac.compare_digest(signature, _signature(manifest, secret).encode()):
        raise CorruptSnapshotError(
            f"{where}: {NOT_SIGNED}",
            hint=OTHER_SECRET,
        )


def check_bytes(manifest: Mapping[str, Any], data: Any, where: str = "") -> None:
    """Raise CorruptSnapshotError if `data` does not have the length and checksum in the manifest."""
    check_crc(manifest, len(data), crc64nvme(data), where)


def check_crc(manifest: Mapping[str, Any], nbytes: int, checksum: int, where: str = "") -> None:
    """Raise CorruptSnapshotError if `nbytes` and `checksum` are not those in the manifest.

    Args:
        manifest: a snapshot's manifest.
        nbytes: number of bytes that were read.
        checksum: CRC64-NVME of the bytes that were read.
        where: place of the bytes, for errors; empty to name the manifest's rank and step instead.
    """
    where = where or f"snapshot of rank {manifest['rank']} at step {manifest['step']}"
    if nbytes != manifest["nbytes"]:
        raise CorruptSnapshotError(f"{where}: has {nbytes} bytes, but the manifest lists {manifest['nbytes']}")
    if crc_text(checksum) != manifest["crc64nvme"]:
        raise CorruptSnapshotError(
            f"{where}: CRC64-NVME is {crc_text(checksum)}, but the manifest lists {manifest['crc64nvme']}"
        )


class TooHeavyError(CorruptSnapshotError):
    """A document was not parsed: it is large, and the job has not signed it."""

    def __init__(self, where: str, nbytes: int) -> None:
        super().__init__(
            f"{where}: it has {nbytes} bytes; a document of more than {LIGHT_BYTES} bytes or {LIGHT_VALUES} values is "
            "read only if the job has signed it",
            hint="Remove the document if the job has not written it. If an earlier version of hyperpod_ext has written "
            "it, restore with that version.",
        )


def is_light(data: bytes) -> bool:
    """Return whether an unsigned document is small enough to be parsed."""
    return len(data) <= LIGHT_BYTES and sum(map(data.count, (b",", b":", b"[", b"{"))) <= LIGHT_VALUES


def read_document(data: bytes, where: str, *, trusted: bool = False) -> dict[str, Any]:
    """Parse a JSON object from storage.

    Args:
        data: the bytes.
        where: place of the document, for errors.
        trusted: the job has signed these bytes, so the document may have any size.

    Raises:
        CorruptSnapshotError: the bytes are no JSON object, for example empty or truncated.
        TooHeavyError: the document is too large to be parsed without a signature.
    """
    if not trusted and not is_light(data):
        raise TooHeavyError(where, len(data))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptSnapshotError(f"{where}: not JSON ({error}); size: {len(data)} bytes") from error
    if not isinstance(document, dict):
        raise CorruptSnapshotError(f"{where}: not a JSON object")
    return document


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _signature(manifest: Mapping[str, Any], secret: bytes) -> str:
    signed = {key: value for key, value in manifest.items() if key != "signature"}
    try:
        return hmac.new(secret, _canonical(signed), hashlib.sha256).hexdigest()
    except RecursionError:  # the parser allows more nesting than the encoder
        raise CorruptSnapshotError("a manifest is nested too deeply for its signature to be checked") from None
