"""The signed record that makes a snapshot exist. Written last; without one there is no snapshot.

Read leniently, so that an older runtime can read a newer writer's extra fields, and refused when the
format itself is newer. Never unpickled, never trusted before its signature and the bytes' checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from hyperpod_ext.errors import CorruptSnapshotError

FORMAT = 1

Manifest = dict[str, Any]
"""JSON object: format, job, owner (rank), generation, step, save_id, nbytes, crc64nvme (hex), skeleton,
tensors (the item table of `image.py`), extras, signature."""


def crc64nvme(data: Any) -> str:
    """CRC64-NVME of a buffer, as 16 hex digits: the checksum S3 computes too."""
    from awscrt import checksums

    return f"{checksums.crc64nvme(data):016x}"


def sign(manifest: Manifest, secret: bytes) -> Manifest:
    """`manifest` with an HMAC-SHA256 over everything else in it."""
    return {**manifest, "signature": _signature(manifest, secret)}


def check_manifest(manifest: Manifest, secret: bytes, *, job: str) -> None:
    """Refuse a manifest that this job's processes did not write.

    Raises:
        CorruptSnapshotError: newer format, wrong signature or another job's.
    """
    where = f"snapshot of rank {manifest.get('owner')} at step {manifest.get('step')}"
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise CorruptSnapshotError(
            f"{where}: format {manifest.get('format')} is newer than {FORMAT}, the newest this version reads",
            hint="Upgrade hyperpod_ext in the container.",
        )
    if not hmac.compare_digest(str(manifest.get("signature")), _signature(manifest, secret)):
        raise CorruptSnapshotError(f"{where}: its manifest is not signed with this job's secret")
    if manifest["job"] != job:
        raise CorruptSnapshotError(f"{where}: it belongs to job {manifest['job']!r}, not to {job!r}")


def check_bytes(manifest: Manifest, data: Any) -> None:
    """Refuse bytes that are not those the manifest was signed for."""
    actual = crc64nvme(data)
    if actual != manifest["crc64nvme"]:
        raise CorruptSnapshotError(
            f"snapshot of rank {manifest['owner']} at step {manifest['step']}: "
            f"CRC64-NVME is {actual}, the manifest says {manifest['crc64nvme']}"
        )


def _signature(manifest: Manifest, secret: bytes) -> str:
    signed = {key: value for key, value in manifest.items() if key != "signature"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
