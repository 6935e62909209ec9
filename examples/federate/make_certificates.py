"""Make what a deployment on this machine needs: a certificate authority, the server's certificate, a key per node.

Usage: python make_certificates.py FOLDER [NODES] [HOST]. Refuses to write over anything. The certificates are valid
for 30 days and for HOST (default: localhost and 127.0.0.1). Use your own authority for anything but a trial.
"""

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

START = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
END = START + datetime.timedelta(days=30)


def certificate(subject: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    """Begin a certificate; without an issuer it is its own."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer or name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(START).not_valid_after(END)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)


def authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Make a certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    ) | {"key_cert_sign": True, "crl_sign": True, "encipher_only": False, "decipher_only": False}
    builder = certificate("netweight example authority", None, key)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    return builder.add_extension(x509.KeyUsage(**usage), True).sign(key, hashes.SHA256()), key


def server(ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, hosts: list[str]) -> tuple[bytes, bytes]:
    """Make the server's certificate and key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = certificate(hosts[0], ca.subject, key)
    builder = builder.add_extension(x509.SubjectAlternativeName([named(host) for host in hosts]), False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    signed = builder.add_extension(issuer, False).sign(ca_key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM), private(key, serialization.PrivateFormat.PKCS8)


def named(host: str) -> x509.GeneralName:
    """A host's name or address as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    """A private key as text, not encrypted."""
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a new file."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def main(folder: str, nodes: str = "3", *hosts: str) -> None:
    """Write ca.crt, server.pem, server.key, and node-N with node-N.pub for each node, from 0."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    ca, ca_key = authority()
    pem, key = server(ca, ca_key, list(hosts) or ["localhost", "127.0.0.1"])
    write(place / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    write(place / "server.pem", pem)
    write(place / "server.key", key, 0o600)
    for number in range(int(nodes)):
        own = ec.generate_private_key(ec.SECP384R1())
        public = own.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write(place / f"node-{number}", private(own, serialization.PrivateFormat.OpenSSH), 0o600)
        write(place / f"node-{number}.pub", public)


if __name__ == "__main__":
    main(*sys.argv[1:])
