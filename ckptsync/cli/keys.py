"""The options by which commands sign, and want signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from ..errors import InvalidInput

RequireSignature = Annotated[
    str | None,
    typer.Option(
        envvar="CKPTSYNC_REQUIRE_SIGNATURE",
        help="A PEM file of trusted public keys (or its text): what none of them signed is not a version.",
    ),
]
SignKey = Annotated[
    str | None,
    typer.Option(envvar="CKPTSYNC_SIGN_KEY", help="Sign what is committed: a PEM file with the private key."),
]


def refuse_empty(environ: Mapping[str, str]) -> None:
    """InvalidInput for a key's variable that is set and empty: a missing secret must not mean "no signature"."""
    for name in ("CKPTSYNC_REQUIRE_SIGNATURE", "CKPTSYNC_SIGN_KEY"):
        if environ.get(name) == "":
            raise InvalidInput(f"{name} is set and empty: give it a key, or unset it")
