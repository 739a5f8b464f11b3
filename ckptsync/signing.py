"""Signatures over manifests and epoch claims: Ed25519, keys as PEM, several trusted at a time.

    signer = Signer.load("run1.pem")                      # the trainer's; `ckptsync keygen run1.pem` makes it
    trust = Trust.load("run1.pem.pub")                    # the readers'

What is signed is the canonical JSON of the record without its `signature` (and `manifest_digest`, which follows from
it), after a word that says what kind of record it is: nothing signed as one can pass for another. The signature is a
field of the record, so a version is signed from the moment at which it exists, wherever it is copied, and releases
that know nothing of it read it as before.

Digests of files are part of the manifest, so they have to be ones that nobody can forge: blake3.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import msgspec

from .canonical import canonical
from .errors import InvalidInput, Untrusted
from .manifest import Manifest, decode

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

STRONG = "blake3"
"""The digest algorithm of signed versions."""

_MANIFEST = b"ckptsync manifest\n"
_CLAIM = b"ckptsync epoch\n"

_PUBLIC = re.compile(
    r"(?:^channel:[ \t]*(\S+)[ \t]*\r?\n)?(-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----)", re.M | re.S
)


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `signature` of a record. `key_id` says which key to try, and no more."""

    key_id: str
    ed25519: str
    """64 bytes in base64."""


class Signer:
    """A private key. Pickling it would carry the key along: it is loaded where it is used."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.key_id = key_id(key.public_key())

    @classmethod
    def load(cls, key: str | Signer) -> Signer:
        """`key`: a path, or the PEM text itself (an environment variable). InvalidInput if it is no Ed25519 key."""
        if isinstance(key, Signer):
            return key
        ed25519, serialization = _cryptography()
        text, remedy = _text(key, _MAKE), f"{_MAKE}, or name the one that it made"
        try:
            found = serialization.load_pem_private_key(text.encode(), password=None)
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{_named(key)} is not a PEM private key without password: {remedy}") from error
        if not isinstance(found, ed25519.Ed25519PrivateKey):
            raise InvalidInput(f"{_named(key)} is not an Ed25519 key: {remedy}")
        return cls(found)

    def __reduce__(self) -> Any:
        raise TypeError("a signing key is not sent to other processes")

    @property
    def trust(self) -> Trust:
        """What this key itself signed."""
        return Trust({self.key_id: TrustedKey(self._key.public_key(), "")})

    def sign_manifest(self, sealed: Manifest) -> tuple[Manifest, bytes]:
        """The same record with a signature, and the bytes to store. InvalidInput if its digests can be forged."""
        if sealed.digest != STRONG:
            raise InvalidInput(
                f"{sealed.id} has {sealed.digest} digests, which anybody can forge: a signed version has {STRONG} "
                "ones; publish it anew"
            )
        raw = msgspec.json.decode(sealed.encoded)
        data = canonical({**raw, "signature": self._sign(_MANIFEST, _bare(raw))})
        return decode(data), data

    def sign_claim(self, claim: bytes, channel_id: str) -> bytes:
        """The claim of an epoch of that channel, with a signature."""
        raw = msgspec.json.decode(claim)
        return canonical({**raw, "signature": self._sign(_claim_of(channel_id), raw)})

    def _sign(self, kind: bytes, raw: dict[str, Any]) -> dict[str, str]:
        value = self._key.sign(kind + canonical(raw))
        return {"key_id": self.key_id, "ed25519": base64.b64encode(value).decode()}


class TrustedKey(NamedTuple):
    """`channel`: the only channel that the key is trusted for; empty for any."""

    key: Ed25519PublicKey
    channel: str


class Trust:
    """The public keys of which one must have signed what is read."""

    def __init__(self, keys: dict[str, TrustedKey]) -> None:
        self._keys = keys

    @classmethod
    def load(cls, keys: str | Self) -> Self:
        """`keys`: a path, or the PEM text itself; as many keys in it as are trusted. A line `channel: ID` before a key
        trusts it for that channel alone. InvalidInput for anything else."""
        if not isinstance(keys, str):
            return keys
        text = _text(keys, _NAME_PUBLIC)
        if "PRIVATE KEY-----" in text:
            raise InvalidInput("a private key was given where readers want public ones: give them the .pub file")
        found = [(channel, pem) for channel, pem in _PUBLIC.findall(text)]
        if not found or len(re.findall(r"^\s*channel:", text, re.M)) != sum(bool(channel) for channel, _ in found):
            raise InvalidInput(
                f"{_named(keys)} has no PEM public key, or a `channel:` line that is not before one: {_NAME_PUBLIC}"
            )
        loaded = [TrustedKey(_public(pem), channel) for channel, pem in found]
        return cls({key_id(trusted.key): trusted for trusted in loaded})

    @property
    def key_ids(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def check_manifest(self, manifest: Manifest, channel_id: str) -> None:
        """Untrusted unless a trusted key signed it, for this channel, and its digests cannot be forged."""
        raw = msgspec.json.decode(manifest.encoded)
        self._check(_MANIFEST, _bare(raw), raw.get("signature"), manifest.channel_id, str(manifest.id))
        if manifest.channel_id != channel_id:
            raise Untrusted(f"{manifest.id} is signed, and of channel {manifest.channel_id}, not of {channel_id}")
        if manifest.digest != STRONG:
            raise Untrusted(f"{manifest.id} is signed, and its {manifest.digest} digests can be forged")

    def check_claim(self, claim: bytes, channel_id: str, what: str) -> None:
        """Untrusted unless a trusted key signed the claim for this channel."""
        raw = msgspec.json.decode(claim)
        self._check(_claim_of(channel_id), raw, raw.pop("signature", None), channel_id, what)

    def _check(self, kind: bytes, raw: dict[str, Any], said: Any, channel_id: str, what: str) -> None:
        from cryptography.exceptions import InvalidSignature

        if said is None:
            raise Untrusted(f"{what} is not signed, and a signature is required")
        try:
            signature = msgspec.convert(said, Signature)
            value = base64.b64decode(signature.ed25519, validate=True)
        except (msgspec.ValidationError, ValueError) as error:
            raise Untrusted(f"the signature of {what} cannot be read: {error}") from error
        trusted = self._keys.get(signature.key_id)
        if trusted is None:
            raise Untrusted(f"{what} is signed by key {signature.key_id}, which is not trusted here")
        if trusted.channel not in ("", channel_id):
            raise Untrusted(f"{what} is of channel {channel_id}, which key {signature.key_id} is not trusted for")
        try:
            trusted.key.verify(value, kind + canonical(raw))
        except InvalidSignature:
            raise Untrusted(f"the signature of {what} is not over what it says: it was altered") from None


def key_id(key: Ed25519PublicKey) -> str:
    """16 hex digits of the sha256 over the raw public key."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def generate(path: str) -> str:
    """A new key pair: `path` for the trainer alone (mode 0600), `path`.pub for readers. Returns the key id.

    InvalidInput if one of the files is there: a key is never overwritten.
    """
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    pem, formats = serialization.Encoding.PEM, (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    for name, data, mode in ((path, key.private_bytes(pem, *formats), 0o600), (f"{path}.pub", public, 0o644)):
        try:
            with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
        except OSError as error:
            raise InvalidInput(f"{name} cannot be made: {error.strerror}") from error
    return key_id(key.public_key())


def _bare(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in ("signature", "manifest_digest")}


def _claim_of(channel_id: str) -> bytes:
    # A claim does not say of which channel it is: what it is signed over does.
    return _CLAIM + channel_id.encode() + b"\n"


def _public(pem: str) -> Ed25519PublicKey:
    ed25519, serialization = _cryptography()
    try:
        found = serialization.load_pem_public_key(pem.encode())
    except ValueError as error:
        raise InvalidInput(f"a trusted key cannot be read: {_NAME_PUBLIC}") from error
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise InvalidInput(f"a trusted key is not an Ed25519 key: {_NAME_PUBLIC}")
    return cast("Ed25519PublicKey", found)


_MAKE = "make one with `ckptsync keygen run1.pem`"
_NAME_PUBLIC = "name the .pub file that `ckptsync keygen` made beside the private key"


def _named(spec: str) -> str:
    return "the key" if "-----BEGIN" in spec else f"key file {spec}"


def _text(spec: str, remedy: str) -> str:
    if not spec:
        raise InvalidInput("the key is empty: name a PEM file, or leave the setting out")
    if "-----BEGIN" in spec:
        return spec
    try:
        with open(spec, encoding="utf-8") as file:
            return file.read(1 << 20)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it cannot be read"
        raise InvalidInput(f"key file {_path_or_secret(spec)}: {reason}: {remedy}") from None


def _path_or_secret(spec: str) -> str:
    """What may be printed: a key that lost its PEM lines on the way is no path."""
    return "(which looks like a key without its PEM lines)" if re.fullmatch(r"[A-Za-z0-9+/=\s]{40,}", spec) else spec


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InvalidInput("signatures need cryptography: pip install 'ckptsync[sign]'") from error
    return ed25519, serialization
