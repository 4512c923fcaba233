"""TLS 1.3 between processes of a job (`network.tls`).

There is no certificate authority: each listening process makes its own certificate, and the key never leaves its
memory. As without TLS, peers are authenticated by proofs of the job's secret. The proofs are bound to the server's
certificate: an attacker in between has another certificate, so the server does not accept the proofs made for it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import ssl
from datetime import UTC, datetime, timedelta

_YEARS = timedelta(days=3650)
"""Validity of a certificate before and after now. No peer checks it, because proofs are bound to its bytes."""


class OwnCertificate:
    """Certificate and TLS context of a server."""

    def __init__(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hyperpod-ext")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - _YEARS)
            .not_valid_after(now + _YEARS)
            .sign(key, hashes.SHA256())
        )
        self.bytes = certificate.public_bytes(serialization.Encoding.DER)
        kind, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        text = key.private_bytes(serialization.Encoding.PEM, kind, no_password)
        text += certificate.public_bytes(serialization.Encoding.PEM)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # a ticket would make an idle connection readable, like one that was closed
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)  # ssl reads keys from files only
        try:
            os.write(descriptor, text)
            self.context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


@functools.cache
def own_certificate() -> OwnCertificate:
    """Return the certificate of this process, made at the first call."""
    return OwnCertificate()


@functools.cache
def client_context() -> ssl.SSLContext:
    """Return the TLS context of clients. It accepts any certificate, because the following proofs are bound to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bound(secret: bytes, certificate: bytes | None) -> bytes:
    """Return the key for proofs on a connection to the server with `certificate`. It is valid for no other server.

    Raises:
        ConnectionError: the server has sent no certificate.
    """
    if not certificate:
        raise ConnectionError("a server has sent no certificate")
    return hmac.new(secret, b"hyperpod_ext TLS: " + hashlib.sha256(certificate).digest(), hashlib.sha256).digest()
