"""TLS 1.3 between the processes of a job (`network.tls`).

There is no certificate authority. Each listening process makes its own certificate, and the key never leaves its
memory. As without TLS, peers authenticate by proofs of the job's secret. The proofs are bound to the server's
certificate. An attacker between the two sides has a different certificate, so proofs made for the attacker are invalid
at the server.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import ssl
from datetime import UTC, datetime, timedelta

_YEARS = timedelta(days=3650)
"""A certificate is valid this long before and after its creation. No peer checks these dates, because proofs are bound
to the certificate's bytes."""


class OwnCertificate:
    """The certificate and TLS context of a server."""

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
        self.context.num_tickets = 0  # a ticket would make an idle connection readable, as if it had been closed
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)  # ssl reads keys only from files
        try:
            os.write(descriptor, text)
            self.context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


@functools.cache
def own_certificate() -> OwnCertificate:
    """Return the certificate of this process, which the first call makes."""
    return OwnCertificate()


@functools.cache
def client_context() -> ssl.SSLContext:
    """Return the TLS context of clients. Clients accept any certificate, because the proofs that follow are bound to
    it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bound(secret: bytes, certificate: bytes | None) -> bytes:
    """Return the key for proofs to the server with `certificate`. Proofs with this key are invalid for any other
    server.

    Raises:
        ConnectionError: the server has sent no certificate.
    """
    if not certificate:
        raise ConnectionError("a server has sent no certificate")
    return hmac.new(secret, b"hyperpod_ext TLS: " + hashlib.sha256(certificate).digest(), hashlib.sha256).digest()
