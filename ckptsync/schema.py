"""Does a version give an engine exactly what it needs? Asked before an engine is touched, whichever way weights go.

An engine's HTTP 200 proves nothing: some serve uninitialised memory for a tensor that never came, and SGLang 0.5.23
dies of one of another shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .manifest import TensorSpec

_FLOATS = {"F64", "F32", "F16", "BF16"}
_SHOWN = 3

Specs = Mapping[str, TensorSpec]


def differences(provided: Specs, ties: Mapping[str, str], needed: Specs, *, allow_cast: bool = False) -> list[str]:
    """What does not fit, as clauses with counts and first names; empty if the version fits.

    `provided` has every name of the version, `ties` a tied tensor's further names -> its first: it is provided under
    each of them and needed under one. Another dtype is a difference, since engines cast silently and what they then
    serve is not what was trained; with `allow_cast`, plain floats may differ.
    """
    both = [(provided[name], spec) for name, spec in needed.items() if name in provided]
    return [
        *_told("that the engine needs are not in the version", [name for name in needed if name not in provided]),
        *_told("that the engine does not know", _unknown(provided, ties, needed)),
        *_told("of another shape", [f"{p.name} {_dims(p)} but the engine has {_dims(n)}"
                                    for p, n in both if p.shape != n.shape]),
        *_told("of another dtype", [f"{p.name} {p.dtype} but the engine has {n.dtype}"
                                    for p, n in both if not _dtype_fits(p, n, allow_cast)]),
    ]  # fmt: skip


def _unknown(provided: Specs, ties: Mapping[str, str], needed: Specs) -> list[str]:
    known = {ties.get(name, name) for name in provided if name in needed}
    return [name for name in provided if ties.get(name, name) not in known]


def _dtype_fits(provided: TensorSpec, needed: TensorSpec, allow_cast: bool) -> bool:
    return provided.dtype == needed.dtype or (allow_cast and {provided.dtype, needed.dtype} <= _FLOATS)


def _dims(spec: TensorSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"


def _told(what: str, items: list[str]) -> Iterable[str]:
    if items:
        yield f"{len(items)} {what} ({', '.join(items[:_SHOWN])}{', ...' if len(items) > _SHOWN else ''})"
