"""`ckptsync keygen`: a key pair for signed versions."""

from __future__ import annotations

from typing import Annotated

import typer

from ..signing import generate
from .output import AsJson, out, print_json


def run(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The private key; PATH.pub becomes the public one.")],
    as_json: AsJson = False,
) -> None:
    """Make an Ed25519 key: the private file for the trainer (`sign_key`, --sign-key), the .pub file for all readers
    (`require_signature`, --require-signature), who may trust several in one file."""
    key_id = generate(path)
    if as_json:
        print_json({"key_id": key_id, "private": path, "public": f"{path}.pub"})
        return
    out.print(f"key {key_id}: {path} signs, for the trainer alone; {path}.pub is what readers trust", highlight=False)
