"""Message authentication codes (MACs) of checkpoint files. Nobody can compute a valid MAC without the job's secret.

A CRC64 detects accidental damage, but no attack, because an attacker who changes bytes can choose eight other bytes
that restore the CRC. To detect attacks, the signed manifest of a checkpoint also has a MAC of each file. The algorithm
is AES-256-GMAC, which on processors with AES instructions has three quarters of the CRC's speed, and ten times that of
SHA-256.
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
"""Number of bytes per call of the cipher; other threads get the GIL between two calls."""
_SALT_BYTES = 16
_KEY_OF = b"hyperpod_ext: MAC of a file\0"

Mac = dict[str, str]
"""A MAC as JSON: kind, and salt and tag in hex."""

UNBOUND = (
    "an earlier version of hyperpod_ext wrote it, with no MAC of its files: changes by somebody with write access "
    "cannot be detected"
)
"""Warning about a checkpoint without MACs."""


class Running:
    """Computes the MAC of one file piece by piece, with a key that is derived from the secret and a salt.

    Two messages with the same key and nonce would break GMAC. Each file has its own key, so the nonce can be constant.

    Args:
        secret: the job's secret.
        salt: salt of an existing MAC, to verify it; None: a new random salt.

    Raises:
        HyperpodExtError: the package cryptography is not installed.
    """

    def __init__(self, secret: bytes, salt: bytes | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise HyperpodExtError(
                "the package cryptography, which computes the MACs of checkpoints, is not installed",
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
    """Return a new MAC of `data`, with a random salt.

    Raises:
        Cancelled: `cancelled()` has returned True.
    """
    running = Running(secret)
    for start in range(0, len(data), 8 * PIECE):
        if cancelled():
            raise Cancelled("a MAC")
        running.update(data[start : start + 8 * PIECE])
    return running.end()


def read_mac(mac: Any) -> tuple[bytes, str]:
    """Return the salt and the tag of a MAC in a manifest.

    Raises:
        ValueError: `mac` is no MAC, or its kind is one that this version cannot check.
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
    """MAC of the file; None: an earlier version wrote the checkpoint, without MACs."""

    @classmethod
    def of(cls, manifest: Manifest, file: ImageFile) -> Expected:
        """Return the expected values of a checkpoint's file, with the MAC from the checkpoint's manifest."""
        mac = manifest["macs"][file.name] if is_bound(manifest) else None
        return cls(file.name, file.nbytes, file.crc64nvme, mac)

    def check(self, data: memoryview, secret: bytes, where: str) -> None:
        """Check the MAC of a file's bytes. A file without a MAC passes: the reader checks the file's CRC.

        Args:
            data: all bytes of the file.
            secret: the job's secret.
            where: the file's URL, for the error.

        Raises:
            CorruptSnapshotError: the bytes are damaged, or somebody without the secret has changed them.
        """
        if self.mac is None:
            return
        reading = Reading(self, secret, crc=False)
        reading.update(data)
        if reading.wrong() is not None:
            again = Reading(self, secret)  # compute the CRC, too, to recognize accidental damage
            again.update(data)
            raise CorruptSnapshotError(f"{where}: {again.wrong()}", hint=_HINT)


_HINT = (
    "An older step is tried. `hp-ext checkpoints verify --all --secret-file FILE` checks all other checkpoints. If a "
    "file was changed, check who has write access."
)


class Reading:
    """Computes the CRC and the MAC of a file while its bytes are read in order, and compares them with `file`.

    Args:
        file: the expected values.
        secret: the job's secret; None: only the CRC is computed.
        crc: whether to compute the CRC.
    """

    def __init__(self, file: Expected, secret: bytes | None, *, crc: bool = True) -> None:
        self._file = file
        self._crc = 0 if crc else None
        self._mac: Running | None = None
        if file.mac is not None and secret is not None:
            try:
                salt, self._tag = read_mac(file.mac)
            except ValueError as error:
                raise CorruptSnapshotError(
                    f"{file.name}: the manifest has {error}, which this version cannot check",
                    hint="Upgrade hyperpod_ext in the container.",
                ) from error
            self._mac = Running(secret, salt)

    def update(self, piece: memoryview) -> None:
        for start in range(0, len(piece), PIECE):  # small pieces stay in the CPU's cache for both CRC and MAC
            part = piece[start : start + PIECE]
            if self._crc is not None:
                self._crc = crc64nvme(part, self._crc)
            if self._mac is not None:
                self._mac.update(part)

    def wrong(self) -> str | None:
        """Return a description of the mismatch; None if the bytes are right. Call this after the last byte."""
        if self._crc is not None and crc_text(self._crc) != self._file.crc64nvme:
            return f"CRC64-NVME is {crc_text(self._crc)}, but the manifest lists {self._file.crc64nvme}"
        if self._mac is not None and not hmac.compare_digest(self._mac.end()["tag"], self._tag):
            return "its CRC64-NVME is right, but not its MAC: somebody has changed it without the job's secret"
        return None


def is_bound(manifest: Manifest) -> bool:
    """Return whether a checkpoint's manifest has MACs of the files. Manifests of earlier versions have no MACs."""
    return "macs" in manifest
