"""`ckptsync load`: bring an engine to one version, once."""

from __future__ import annotations

import typer

from watchers.watcher import Watcher

from . import engines
from .output import BAD, AsJson, Root, Version
from .watch import print_receipt


def run(
    root: Root,
    version: Version,
    engine: engines.Kind,
    url: engines.Url,
    stage: engines.StageFolder = engines.DEFAULT_STAGE,
    reader: engines.Reader = "",
    pause_mode: engines.PauseMode = "",
    cache: engines.Cache = "",
    api_key: engines.ApiKey = "",
    admin_key: engines.AdminKey = "",
    allow_cast: engines.AllowCast = False,
    as_json: AsJson = False,
) -> None:
    """Load exactly this version into the engine, forwards or back, and prove it. Exit code 1 if it does not serve it.

    Stop a watcher that follows `latest` on the same engine first: it would bring the engine back.
    """
    watcher = Watcher(
        root,
        engines.connect(engine, url, api_key, admin_key, pause_mode, cache),
        follow=version,
        stage=stage,
        reader=reader or None,
        allow_cast=allow_cast,
    )
    try:
        receipt = watcher.load_version(version)
    finally:
        watcher.close()
    print_receipt(receipt, as_json)
    if receipt.state != "serving":
        raise typer.Exit(BAD)
