"""`ckptsync load`: bring an engine to one version, once."""

from __future__ import annotations

import typer

from watchers.claims import claimed
from watchers.watcher import Watcher

from . import engines
from .keys import RequireSignature
from .output import BAD, AsJson, Root, Version
from .roots import existing
from .watch import hide_what_receipts_say, print_receipt, shout


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
    proof: engines.Proof = 2,
    trusted: engines.Trusted = "",
    allow_cast: engines.AllowCast = False,
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Load exactly this version into the engine, forwards or back, and prove it. Exit code 1 if it does not serve it.

    Stop a watcher of the same engine first: it would bring the engine back. One on this host is noticed, and
    nothing is loaded.
    """
    hide_what_receipts_say()
    store, connected = existing(root).store, engines.connect(engine, url, api_key, admin_key, pause_mode, cache)
    with claimed(stage, url, root):
        watcher = Watcher(
            store,
            connected,
            follow=version,
            stage=stage,
            reader=reader or None,
            proof=proof,
            trusted=engines.trusted_checksums(trusted),
            allow_cast=allow_cast,
            require_signature=require_signature,
            on_dead=shout,
        )
        try:
            receipt = watcher.load_version(version)
        finally:
            watcher.close()
    print_receipt(receipt, as_json)
    if receipt.state != "serving":
        raise typer.Exit(BAD)
