"""Message authentication codes of checkpoint files: nobody can make one without the job's secret.

A CRC64 detects damage. It is linear, so an attacker who changes bytes can compute eight others that restore the CRC.
Hence the signed manifest of a checkpoint has a MAC of each file, too: AES-256-GMAC, three quarters as fast as the CRC
on processors with AES, and ten times as fast as SHA-256.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError
from hyperpod_ext.runtime.snapshot.manifest import Manifest, crc64nvme, crc_text
from hyperpod_ext.runtime.storage.object_store import MIB, Cancelled, never
from hyperpod_ext.runtime.storage.upload_split import ImageFile
from hyperpod_ext.terminal import quote

KIND = "aes-256-gmac"
PIECE = MIB
"""Bytes per call, so that other threads get the interpreter in between."""
_SALT_BYTES = 16
_KEY_OF = b"hyperpod_ext: MAC of a file\0"

Mac = dict[str, str]
"""kind, salt and tag (hex)."""

UNBOUND = (
    "an earlier version of hyperpod_ext wrote it, with no MAC of its files: it cannot be told whether somebody who can "
    "write there has changed them"
)


class Running:
    """A MAC computed piece by piece, with a key per file from the secret and a salt.

    Two messages with the same key and nonce break GMAC; with a new key each time one nonce is enough.

    Raises:
        HyperpodExtError: the package cryptography is not installed.
    """

    def __init__(self, secret: bytes, salt: bytes | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise HyperpodExtError(
                "cryptography, which computes the MACs of checkpoints, is not here",
                hint="pip install 'hyperpod-ext[runtime]'",
            ) from error
        self._salt = salt if salt is not None else secrets.token_bytes(_SALT_BYTES)
        key = hmac.digest(secret, _KEY_OF + self._salt, "sha256")
        self._cipher = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()

    def update(self, data: memoryview) -> None:
        for start in range(0, len(data), PIECE):
            self._cipher.authenticate_additional_data(data[start : start + PIECE])

    def end(self) -> Mac:
        self._cipher.finalize()
        return {"kind": KIND, "salt": self._salt.hex(), "tag": self._cipher.tag.hex()}


def mac_of(secret: bytes, data: memoryview, cancelled: Callable[[], bool] = never) -> Mac:
    """Return a new MAC of `data`.

    Raises:
        Cancelled: `cancelled()` was true.
    """
    running = Running(secret)
    for start in range(0, len(data), 8 * PIECE):
        if cancelled():
            raise Cancelled("a MAC")
        running.update(data[start : start + 8 * PIECE])
    return running.end()


def read_mac(mac: Any) -> tuple[bytes, str]:
    """Return salt and tag of a MAC in a manifest.

    Raises:
        ValueError: not a MAC, or of a kind that this version cannot check.
    """
    if not isinstance(mac, Mapping) or mac.get("kind") != KIND:
        raise ValueError(f"a MAC of kind {quote(mac.get('kind'))}" if isinstance(mac, Mapping) else "no MAC")
    salt, tag = bytes.fromhex(str(mac.get("salt"))), str(mac.get("tag"))
    if len(salt) != _SALT_BYTES or len(bytes.fromhex(tag)) != 16:
        raise ValueError("a MAC that is cut off")
    return salt, tag


@dataclass(frozen=True, slots=True)
class Expected:
    """A file of a checkpoint with its expected size, CRC and MAC."""

    name: str
    nbytes: int
    crc64nvme: str
    mac: Mac | None = None
    """None: an earlier version wrote it."""

    @classmethod
    def of(cls, manifest: Manifest, file: ImageFile) -> Expected:
        """Return a file of a checkpoint, with the MAC in the checkpoint's manifest."""
        mac = manifest["macs"][file.name] if is_bound(manifest) else None
        return cls(file.name, file.nbytes, file.crc64nvme, mac)

    def check(self, data: memoryview, secret: bytes, where: str) -> None:
        """Check the file's MAC. Files without a MAC pass; the reader checks their CRC.

        Raises:
            CorruptSnapshotError: the bytes are damaged, or were changed without the secret.
        """
        if self.mac is None:
            return
        reading = Reading(self, secret, crc=False)
        reading.update(data)
        if reading.wrong() is not None:
            again = Reading(self, secret)  # with the CRC, to name the kind of damage
            again.update(data)
            raise CorruptSnapshotError(f"{where}: {again.wrong()}", hint=_HINT)


_HINT = (
    "An older step is tried. `hp-ext checkpoints verify --all --secret-file FILE` tells of the others; where one was "
    "changed, see who may write there."
)


class Reading:
    """CRC and MAC of a file's bytes, computed in order while they are read. Without `secret` only the CRC."""

    def __init__(self, file: Expected, secret: bytes | None, *, crc: bool = True) -> None:
        self._file = file
        self._crc = 0 if crc else None
        self._mac: Running | None = None
        if file.mac is not None and secret is not None:
            try:
                salt, self._tag = read_mac(file.mac)
            except ValueError as error:
                raise CorruptSnapshotError(
                    f"{file.name}: {error} stands in the manifest, which this version cannot check",
                    hint="Upgrade hyperpod_ext in the container.",
                ) from error
            self._mac = Running(secret, salt)

    def update(self, piece: memoryview) -> None:
        for start in range(0, len(piece), PIECE):  # small pieces stay in the cache for both sums
            part = piece[start : start + PIECE]
            if self._crc is not None:
                self._crc = crc64nvme(part, self._crc)
            if self._mac is not None:
                self._mac.update(part)

    def wrong(self) -> str | None:
        """Return the mismatch, after the last byte; None if the bytes are right."""
        if self._crc is not None and crc_text(self._crc) != self._file.crc64nvme:
            return f"CRC64-NVME is {crc_text(self._crc)}, the manifest says {self._file.crc64nvme}"
        if self._mac is not None and not hmac.compare_digest(self._mac.end()["tag"], self._tag):
            return "its CRC64-NVME is right, but not its MAC: somebody has changed it who has not the job's secret"
        return None


def is_bound(manifest: Manifest) -> bool:
    """Return whether a checkpoint's manifest has MACs of its files; manifests of earlier versions do not."""
    return "macs" in manifest
