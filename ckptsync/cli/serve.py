"""`watch --serve`: the sidecar's options, and its place beside the watch loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from .output import err

if TYPE_CHECKING:
    from watchers.metrics import Metrics
    from watchers.sidecar import Watched

Address = Annotated[
    str,
    typer.Option(
        "--serve",
        metavar="[HOST]:PORT",
        help="Answer probes, /load and /metrics over HTTP; on loopback unless a host is given.",
    ),
]
Token = Annotated[
    str,
    typer.Option(envvar="CKPTSYNC_SIDECAR_TOKEN", help="The Bearer that --serve wants for all but /healthz."),
]


def metrics(address: str) -> Metrics | None:
    """None without an address: then the libraries behind are not imported either."""
    if not address:
        return None
    from watchers.metrics import Metrics

    return Metrics()


@contextmanager
def sidecar(address: str, token: str, watched: Watched, metrics: Metrics | None) -> Iterator[None]:
    """Serves inside `with`, if there is something to serve; says where on stderr."""
    if metrics is None:
        yield
        return
    from watchers.sidecar import Sidecar

    with Sidecar(watched, metrics, address, token=token) as served:
        err.print(f"sidecar on {served.url}", highlight=False)
        yield
