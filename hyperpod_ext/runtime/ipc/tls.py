"""TLS 1.3 between the processes of a job (`network.tls`).

TLS works without a certificate authority. Each listening process creates its own certificate, whose private key never
leaves the memory of the process. With and without TLS, the two sides authenticate by proving that they have the job's
secret. With TLS, each proof also depends on the server's certificate. A man in the middle has another certificate, so
the real server rejects any proof that a client made for the attacker.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import ssl
from datetime import UTC, datetime, timedelta

_YEARS = timedelta(days=3650)
"""Time before and after its creation for which a certificate is valid. Clients do not check the dates of a
certificate, because the proofs depend on the certificate itself."""


class OwnCertificate:
    """The certificate of this process, and the TLS context with which it accepts connections."""

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
        # send no session tickets, because an idle connection with a ticket would look closed
        self.context.num_tickets = 0
        # write the key to a file in memory, because the ssl module reads keys only from files
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, text)
            self.context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


@functools.cache
def own_certificate() -> OwnCertificate:
    """Return the certificate of this process. The first call creates the certificate."""
    return OwnCertificate()


@functools.cache
def client_context() -> ssl.SSLContext:
    """Return the TLS context with which clients connect. Clients accept any certificate, because the proofs of the
    authentication handshake depend on the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bound(secret: bytes, certificate: bytes | None) -> bytes:
    """Return the key with which clients and the server that has `certificate` make their proofs. A server with another
    certificate rejects proofs with this key.

    Raises:
        ConnectionError: the server has sent no certificate.
    """
    if not certificate:
        raise ConnectionError("a server has sent no certificate")
    return hmac.new(secret, b"hyperpod_ext TLS: " + hashlib.sha256(certificate).digest(), hashlib.sha256).digest()
