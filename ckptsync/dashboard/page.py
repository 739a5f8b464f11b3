"""The page as one file: HTML with its style and its script inside, nothing loaded from anywhere else.

What comes from a store reaches the page as JSON, and the document by `textContent` alone. The policy in it allows
exactly this script: whatever got into the markup besides would not run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Any

import msgspec

from .board import Board

STYLES = ("style.css", "parts.css")
SCRIPTS = ("dom.js", "timeline.js", "loads.js", "heat.js", "fleet.js", "drawer.js", "page.js")


def served_page(every: float) -> bytes:
    """A page that asks the server it came from, `every` seconds."""
    return _page({"every": every})


def static_page(board: Board, *, details: int = 200) -> bytes:
    """A page that shows one look, and needs no server. Of the newest `details` versions with all that a click shows."""
    found = board.look()
    newest = [version.version for version in found.status.versions if not version.problem][-details:]
    return _page({"page": found, "details": {label: board.detail(label) for label in newest}})


def _page(data: dict[str, Any]) -> bytes:
    script = _read(*SCRIPTS)
    policy = (
        f"default-src 'none'; script-src 'sha256-{_sha256(script)}'; style-src 'sha256-{_sha256(_read(*STYLES))}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    # "<" would end the script element, or begin a comment, in the middle of a string.
    json = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = _read("page.html")
    for name, text in (("POLICY", policy), ("STYLE", _read(*STYLES)), ("SCRIPT", script), ("DATA", json)):
        page = page.replace(f"%{name}%", text, 1)
    return page.encode()


@functools.cache
def _read(*names: str) -> str:
    folder = resources.files(__package__)
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
