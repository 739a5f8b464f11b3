"""`ckptsync watch`: keep one engine, or many replicas, on the versions of a channel."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from watchers.claims import claimed
from watchers.discover import Following
from watchers.fleet import Fleet
from watchers.health import IN_RECEIPT, Health, Receipt
from watchers.rollout import Quorum, parse_rollout
from watchers.watcher import Watcher

from ..channel import Channel
from ..errors import CkptSyncError, InvalidInput
from ..store import is_there, open_store
from ..wording import counted
from . import engines, serve
from .ending import as_it_goes, told_to_end
from .keys import RequireSignature
from .output import AsJson, LogHandler, Root, err, human_bytes, human_seconds, out, print_line

if TYPE_CHECKING:
    from watchers.metrics import Metrics

_COLOURS = {"serving": "green", "refused": "yellow", "failed": "red", "dirty": "bold red"}


def run(
    root: Root,
    engine: engines.Kind,
    url: engines.Urls = None,
    router: engines.RouterUrl = "",
    engines_file: engines.EnginesFile = "",
    dns: engines.DnsName = "",
    rollout: Annotated[
        str, typer.Option(help="Many replicas: all at once, or rolling:N, the next N when those before are decided.")
    ] = "all",
    quorum: Annotated[
        str, typer.Option(help="Many replicas: how many, or what share such as 60%, make a version the fleet's.")
    ] = "51%",
    deadline: Annotated[
        float, typer.Option(help="Many replicas: seconds after which a rollout waits for a replica no longer.", min=1)
    ] = 600.0,
    follow: Annotated[
        str, typer.Option(help="latest, every (in order), every:10, 'step>=500', or a version such as 42 or e2-v42.")
    ] = "latest",
    stage: engines.StageFolder = engines.DEFAULT_STAGE,
    poll: Annotated[float, typer.Option(help="Seconds between looks at the store.", min=0.01)] = 1.0,
    reader: engines.Reader = "",
    pause_mode: engines.PauseMode = "",
    cache: engines.Cache = "",
    api_key: engines.ApiKey = "",
    admin_key: engines.AdminKey = "",
    proof: engines.Proof = 2,
    trusted: engines.Trusted = "",
    allow_cast: engines.AllowCast = False,
    address: serve.Address = "",
    token: serve.Token = "",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Find, stage, verify and load each version, until interrupted. With --json one line per attempt.

    Nothing touches an engine before every byte is on this host and verified; after a failed load the last good
    version is loaded again. Of many replicas each goes its own way: a bad one is named, and holds no other.
    """
    if not as_json:
        hide_what_receipts_say()
    given, found = url or [], bool(router or engines_file or dns)
    alone = len(given) == 1 and not found
    connect = partial(engines.connect, engine, api_key=api_key, admin_key=admin_key, pause_mode=pause_mode, cache=cache)
    member = partial(Watcher, proof=proof, trusted=engines.trusted_checksums(trusted), allow_cast=allow_cast)
    roster = engines.roster(given, router, engines_file, dns, api_key)
    fleet = partial(Fleet, member=member, at_once=parse_rollout(rollout), deadline=deadline,
                    quorum=_reachable(quorum, 0 if found else len(given)))  # fmt: skip
    metrics = serve.metrics(address)
    stop = told_to_end()
    options = {"follow": follow, "stage": stage, "reader": reader or None, "poll": poll,
               "require_signature": require_signature, **_told(metrics, as_json, stop, named=not alone)}  # fmt: skip
    store = open_store(root)
    with ExitStack() as stack:
        if alone:
            connected = connect(given[0])
            stack.enter_context(claimed(stage, given[0], root))
        watcher = member(store, connected, **options) if alone else fleet(store, roster, connect, **options)
        stack.callback(watcher.close)
        stack.enter_context(serve.sidecar(address, token, watcher, metrics))
        if not as_json:
            say_begun(follow, watcher.channel)
        watcher.run(stop)


def _reachable(text: str, known: int) -> Quorum:
    """InvalidInput for more than all of the engines, if it is `known` how many there will be."""
    quorum = Quorum.parse(text)
    if known and quorum.of(known) > known:
        raise InvalidInput(f"--quorum {text} can never be reached by {counted(known, 'engine')}")
    return quorum


def _told(metrics: Metrics | None, as_json: bool, stop: threading.Event, *, named: bool) -> dict[str, Any]:
    """What is done with each attempt, and with a failure: it is printed, and counted if somebody asks."""

    printed = as_it_goes(print_receipt, stop)

    def attempted(receipt: Receipt) -> None:
        printed(receipt, as_json, named=named)
        if metrics is not None:
            metrics.observe(receipt)

    failed = metrics.failed if metrics is not None else None
    return {"on_receipt": attempted, "on_failure": failed, "on_dead": shout}


def say_begun(follow: str, channel: Channel) -> None:
    """What is due, or waited for. A store that is away is the watcher's own news, a moment later."""
    store, found = channel.store, None
    with suppress(CkptSyncError):
        found = Following(follow).next(channel, None, lambda _: "try")
    if found is not None:
        err.print(
            f"found {found.id} in {store.url}: staging it, unless it is served already", highlight=False, soft_wrap=True
        )
        return
    yet = "" if is_there(store) else ", which does not exist yet"
    err.print(f"waiting for {_wanted(follow)} in {store.url}{yet}", highlight=False, soft_wrap=True)


def _wanted(follow: str) -> str:
    if follow == "latest" or follow.startswith("every"):
        return "a version"
    return f"a version with {follow}" if follow.startswith("step") else follow


def print_receipt(receipt: Receipt, as_json: bool, *, named: bool = False) -> None:
    """One attempt, as a line for people or for scripts; `named` for one of many engines."""
    if as_json:
        print_line(receipt.as_dict())
        return
    times = f"staged {human_seconds(receipt.stage_seconds)}, paused {human_seconds(receipt.pause_seconds)}"
    colour = _COLOURS[receipt.state]
    out.print(f"{receipt.version} [{colour}]{receipt.state}[/]  {human_bytes(receipt.bytes)}, {times}")
    if named:
        out.print(f"    {receipt.engine}", style="dim", markup=False, highlight=False)
    if receipt.error:
        out.print(f"    {receipt.error['kind']}: {receipt.error['message']}", markup=False, highlight=False)
    for warning in receipt.warnings:
        out.print(f"    note: {warning}", style="dim", markup=False, highlight=False)


def hide_what_receipts_say() -> None:
    """Leave out log lines whose receipt, or error, the command prints itself."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            handler.addFilter(lambda record: not IN_RECEIPT.keys() & vars(record))


def shout(health: Health) -> None:
    err.print(f"restart the engine: {health.reason}", style="bold red", markup=False)
