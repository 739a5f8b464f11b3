"""The page in a real headless Chromium: what a person sees, clicks and copies. `make browser` installs one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.dashboard.board import Board
from ckptsync.dashboard.page import static_page
from ckptsync.dashboard.server import serving
from ckptsync.version import VersionId
from tests.core.manifests import tensor, track
from tests.envs import browser as chromium
from tests.retention.channels import Trainer

from .channels import write_reader

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # One for the module, not for the session: while it is there an event loop runs in this thread, and tests elsewhere
    # call asyncio.run.
    path = chromium.executable()
    if path is None:
        message = "no Chromium on this machine: `make browser` installs one"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with playwright.sync_playwright() as running:
        # Its own sandbox needs user namespaces, which containers and root do not have.
        launched = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """A page at a URL; at the end of the test nothing in it may have gone wrong."""
    contexts, wrong = [], []

    def said(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            wrong.append(message.text)

    def make(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"color_scheme": "dark", "locale": "en-GB", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", said)
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.goto(url)
        page.wait_for_selector(".tile")
        return page

    yield make
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def url(channel: Channel) -> Iterator[str]:
    with serving(Board(channel, every=0.3), ":0") as server:
        yield server.url


def shoot(page: Any, folder: Path, name: str) -> None:
    """A picture for people to look at; with CKPTSYNC_SCREENSHOTS they are kept there."""
    page.screenshot(path=os.path.join(os.environ.get("CKPTSYNC_SCREENSHOTS", folder), f"{name}.png"), full_page=True)


def colours(page: Any, selector: str) -> set[str]:
    return set(page.eval_on_selector_all(selector, "all => all.map(e => getComputedStyle(e).backgroundColor)"))


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_everything_there_is_to_see_at_a_glance(open_page, url, theme, tmp_path):
    page = open_page(url, color_scheme=theme, viewport={"width": 1360, "height": 900})
    assert page.title() == "e3-v16 · ckptsync"
    assert page.get_attribute("html", "data-theme") == theme
    tiles = page.locator(".tile .big").all_inner_texts()
    assert tiles[:4] == ["e3-v16", "5 / 7", "3 versions", "1"]
    assert page.locator(".v").count() == 12 + 9 + 1
    assert page.locator(".v.dead").count() == 6
    assert page.locator(".v.newest").get_attribute("data-key") == "e3-v16"
    assert page.locator(".branch").count() == 2
    assert page.locator(".fleet tbody tr").count() == 7
    worst = page.locator(".fleet tbody tr").first.inner_text()
    assert "gpu-ill" in worst
    assert "differs from the manifest" in worst
    assert "e1-v4 is pinned: table 3 of the paper" in page.inner_text("#holds")
    assert page.locator("#loads circle").count() > 50
    assert len(colours(page, ".cell")) > 10, "the heat map has shades"
    assert "live" in page.inner_text("#pulse")
    shoot(page, tmp_path, f"dashboard-{theme}")


def test_a_click_shows_the_manifest_and_commands_to_copy(open_page, url, root, tmp_path):
    page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
    page.locator('.v[data-key="e1-v5"]').click()
    page.wait_for_selector(".facts")
    sheet = page.inner_text("#drawer")
    for fact in ("e1-v5", "grpo-7b", "e1-v4", "reward", "delta/", "14 tensors (14 BF16)"):
        assert fact in sheet
    page.get_by_role("button", name="Copy: Load it once").click()
    page.get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f"ckptsync load {root} e1-v5 --engine vllm --url http://127.0.0.1:8000"
    assert page.url.endswith("#e1-v5")
    shoot(page, tmp_path, "dashboard-version")
    page.keyboard.press("Escape")
    assert not page.locator("#drawer").is_visible()
    assert open_page(f"{url}#e1-v5").locator(".facts").inner_text(), "an address leads to the version"


def test_a_full_version_is_compared_when_asked_for(open_page, url):
    page = open_page(f"{url}#e3-v16")
    page.locator("#drawer").get_by_text("at most").wait_for()
    page.get_by_role("button", name="Compare exactly").click()
    page.get_by_text("Layers that changed most since e2-v15").wait_for()
    playwright.expect(page.locator("#drawer")).not_to_contain_text("≤")
    playwright.expect(page.locator(".cell.hatch")).to_have_count(0)
    page.get_by_label("Compare with").select_option("e1-v2")
    page.get_by_role("button", name="Compare exactly").click()
    page.get_by_text("Layers that changed most since e1-v2").wait_for()


def test_a_new_version_and_a_lost_server_show_without_a_reload(open_page, tmp_path, monkeypatch):
    trainer = Trainer(Channel.create(str(tmp_path / "root")))
    trainer.publish(1)
    with serving(Board(Channel.open(trainer.channel.store), every=0.2), ":0") as server:
        page = open_page(server.url)
        page.locator('.v[data-key="e1-v1"]').focus()
        trainer.publish(2)
        page.locator('.v[data-key="e1-v2"]').wait_for()
        assert page.evaluate("document.activeElement.dataset.key") == "e1-v1", "the focus stays"
        assert page.title().startswith("e1-v2")
        page.route("**/data", lambda route: route.fulfill(status=502, json={"message": "the store is away"}))
        page.get_by_text("no answer: the store is away").wait_for()
        page.unroute("**/data")
        page.locator("#pulse.live").wait_for()
        page.evaluate("window.stop()")
        page.context.close()


@pytest.mark.parametrize("width", [360, 390])
def test_it_works_on_a_phone(open_page, url, width, tmp_path):
    page = open_page(url, **{**PHONE, "viewport": {"width": width, "height": 780}})
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing hangs over the edge"
    assert page.locator('.v[data-key="e3-v16"]').evaluate(
        "e => { const box = e.getBoundingClientRect(); return box.left >= 0 && box.right <= innerWidth }"
    ), "the newest version is in sight"
    page.locator('.v[data-key="e3-v16"]').tap()
    page.wait_for_selector(".facts")
    assert page.locator("#drawer").bounding_box()["width"] <= width
    page.get_by_role("button", name="Close").tap()
    if width == 390:
        shoot(page, tmp_path, "dashboard-phone")


HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\'"</title>'


@pytest.fixture
def hostile(tmp_path: Path) -> Channel:
    """Markup wherever a store lets somebody put text."""
    channel = Channel.create(str(tmp_path / "it's <b>bold"))
    trainer = Trainer(channel)
    trainer.epoch = channel.claim_epoch(HOSTILE)
    for number in (1, 2):
        weights = tensor(name=f"model.layers.0.{HOSTILE}", value=number.to_bytes(8, "big"))
        other = tensor(name=HOSTILE, value=number.to_bytes(8, "big"))
        trainer.publish(number, run_id=HOSTILE, metadata={HOSTILE: HOSTILE}, producer={HOSTILE: HOSTILE},
                        tracks={"model": track(weights, other, size=100)})  # fmt: skip
    holds.pin(channel, VersionId(trainer.epoch.number, 1), HOSTILE)
    name = HOSTILE.replace("/", "")
    write_reader(channel, name, "e2-v2", ["e2-v1", HOSTILE], error={"kind": HOSTILE, "message": HOSTILE})
    channel.lease(name, VersionId(2, 2), 600.0)
    return channel


@pytest.mark.parametrize("form", ["served", "static"])
def test_nothing_that_comes_from_the_store_becomes_markup(open_page, hostile, form, tmp_path):
    board = Board(hostile)
    file = tmp_path / "page.html"
    file.write_bytes(static_page(board))
    with serving(board, ":0") as server:
        page = open_page(f"file://{file}" if form == "static" else server.url)
        page.locator('.v[data-key="e2-v2"]').click()
        page.wait_for_selector(".facts")
        seen = page.inner_text("body")
        assert seen.count("<script>window.pwned=1</script>") >= 5, "it is there to be read"
        assert page.evaluate("window.pwned") is None
        assert page.locator("img, b:text('bold'), body script:not(#data)").count() == 1, "the page's own script alone"
        assert page.locator(".v").first.get_attribute("title")
        root = hostile.store.url.replace("'", "'\\''")
        assert f"ckptsync load '{root}' e2-v2 --engine" in seen, "quoted for a shell"
        page.context.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """One of everything: every element costs the checker time."""
    trainer = Trainer(Channel.create(str(tmp_path)))
    trainer.publish(1, 2, 3)
    holds.pin(trainer.channel, VersionId(1, 2), "good")
    Trainer(trainer.channel, VersionId(1, 2)).publish(3, kind="adapter")
    write_reader(trainer.channel, "gpu-0", "e2-v3", ["e1-v1", "e2-v3"])
    write_reader(trainer.channel, "gpu-1", "e1-v2", ["e1-v2"], error={"kind": "bad-shard", "message": "it differs"})
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "torn.json").write_text("{")
    with serving(Board(trainer.channel), ":0") as server:
        yield server.url


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_it_is_accessible(open_page, small, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(small, color_scheme=theme)
    found = axe.run(page, options={} if theme == "dark" else {"runOnly": ["color-contrast"]})
    assert found.response["violations"] == [], found.generate_report()
    assert page.locator("[data-key]").evaluate_all("all => all.every(e => e.tabIndex === 0)"), "reached by keyboard"
    page.locator('.v[data-key="e2-v3"]').press("Enter")
    page.wait_for_selector(".facts")
    found = axe.run(page, context={"include": [["#drawer"]]})
    assert found.response["violations"] == [], found.generate_report()
