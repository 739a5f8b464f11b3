"""How numbers and names are said."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KB'; powers of 1000, as storage is sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def exact_bytes(count: int) -> str:
    """`4.2 MB (4194304 bytes)`: where somebody has to make room, and compares."""
    return human_bytes(count) if abs(count) < 1000 else f"{human_bytes(count)} ({count} bytes)"


def counted(number: int, thing: str) -> str:
    """`1 version`, `3 versions`, `12,000 versions`. Of several words the last is the one that is counted."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def shortened(name: str, limit: int = 120) -> str:
    """A name of any length on one line: what is too long keeps both ends."""
    kept = (limit - 3) // 2
    return name if len(name) <= limit else f"{name[:kept]}...{name[-kept:]}"


def plain(name: str) -> str:
    """A name that somebody else gave, on one line: quoted if it is empty, or would break or steer a terminal."""
    return name if name and name.isprintable() else repr(name)
