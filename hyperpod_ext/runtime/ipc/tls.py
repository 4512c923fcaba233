"""TLS 1.3 between processes of a job (`network.tls`).

Nobody issues certificates: each process that listens makes one of its own, whose key never leaves its memory. The job's
secret shows who is of the job, as without TLS. Those proofs are bound to the server's certificate: a third party in
between must show another one, and gets no proof that the server takes.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import ssl
from datetime import UTC, datetime, timedelta

_YEARS = timedelta(days=3650)
"""Of a certificate. Nobody compares clocks: it is known by its bytes."""


class OwnCertificate:
    """What a process needs to be a TLS server."""

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
        self.context.num_tickets = 0  # a connection on which nothing is due has nothing to be read
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)  # ssl reads keys from files only
        try:
            os.write(descriptor, text)
            self.context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


@functools.cache
def own_certificate() -> OwnCertificate:
    """That of this process."""
    return OwnCertificate()


@functools.cache
def client_context() -> ssl.SSLContext:
    """For connections to others of the job. It takes any certificate: the proofs that follow are bound to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bound(secret: bytes, certificate: bytes | None) -> bytes:
    """The key of proofs on a connection to the server that has shown `certificate`: good on no other connection.

    Raises:
        ConnectionError: it has shown none.
    """
    if not certificate:
        raise ConnectionError("a server has shown no certificate")
    return hmac.new(secret, b"hyperpod_ext TLS: " + hashlib.sha256(certificate).digest(), hashlib.sha256).digest()
