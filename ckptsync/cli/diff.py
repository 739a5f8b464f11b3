"""`ckptsync diff`: what changed between two versions, and where."""

from __future__ import annotations

import io
import itertools
import math
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from ..channel import Channel
from ..errors import InvalidInput
from ..manifest import Manifest
from ..wording import plain
from .keys import RequireSignature
from .needs import needs
from .output import BAD, AsJson, Root, out, print_json, print_wide, write_file
from .roots import existing

if TYPE_CHECKING:
    from ..compare import Change, Differences

Which = Annotated[str, typer.Argument(help="latest, 42 or e2-v42.")]


def run(
    root: Root,
    old: Which,
    new: Which,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each layer, not for each tensor.")] = False,
    png: Annotated[str, typer.Option(help="Write a heat map over layers and all live versions from OLD to NEW.")] = "",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Compare two versions: fraction of changed elements, norm of the difference, largest step in ULPs.

    Exit code 0 whether values differ or not; 1 if the two do not have the same tensors, and then it says which.
    """
    needs("torch", "torch")
    from ..compare import by_layer, compare

    channel = existing(root, require_signature)
    first, last = channel.resolve(old), channel.resolve(new)
    found = compare(channel, first, last)
    rows = by_layer(found.tensors) if layers else list(found.tensors)
    if png:
        _draw(channel, first, last, png)
    if as_json:
        rows_json = [{**msgspec.to_builtins(row), "fraction": row.fraction, "relative": row.relative} for row in rows]
        print_json({"old": first.id.label, "new": last.id.label, "rows": rows_json,
                    **msgspec.to_builtins(found.schema)})  # fmt: skip
    else:
        _print(first, last, found, rows)
    if found.schema:
        raise typer.Exit(BAD)


def _print(first: Manifest, last: Manifest, found: Differences, rows: list[Change]) -> None:
    changed, elements = sum(row.changed for row in rows), sum(row.elements for row in rows)
    if changed:
        print_wide(_table([row for row in rows if row.changed]))
    which = f" of the {len(found.tensors)} tensors in both" if found.schema else ""
    if elements:
        share = f"{changed:,} of {elements:,} elements{which} changed ({changed / elements:.3%})"
        out.print(f"{first.id} to {last.id}: {share}")
    if found.schema:
        common = "not the same tensors" if elements else "no tensor in common"
        out.print(f"{first.id} and {last.id} have {common}", style="bold red")
    for line in found.schema.lines():
        out.print(f"    {line}", markup=False, highlight=False)


def _table(rows: list[Change]) -> Table:
    table = Table(box=None, header_style="bold")
    nonfinite = ["not finite"] if any(row.nonfinite for row in rows) else []
    for column in ("name", "elements", "changed", "norm", "relative", "max ULP", *nonfinite):
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        cells = [f"{row.elements:,}", f"{row.fraction:.3%}", _number(row.norm), _number(row.relative),
                 f"{row.max_ulp:,}", f"{row.nonfinite:,}"]  # fmt: skip
        table.add_row(escape(plain(row.name)), *cells[: len(table.columns) - 1])
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _draw(channel: Channel, first: Manifest, last: Manifest, path: str) -> None:
    needs("matplotlib", "plot")
    from ..compare import by_layer, compare

    versions = [version for version in channel.versions() if first.id <= version <= last.id]
    if len(versions) < 2:
        raise InvalidInput(
            f"--png needs two live versions, from the older to the newer: {first.id} to {last.id} has not"
        )
    manifests = [channel.manifest(version) for version in versions]
    columns: list[dict[str, Change]] = []
    for before, after in itertools.pairwise(manifests):
        columns.append({row.name: row for row in by_layer(compare(channel, before, after).tensors)})
    write_file(path, _heat_map(columns, [version.label for version in versions[1:]]))


def _not_finite(columns: list[dict[str, Change]], names: list[str]) -> list[tuple[int, int]]:
    """Column and row of each layer in which something is NaN or infinite on one of the two sides."""
    cells = ((x, column.get(name), y) for x, column in enumerate(columns) for y, name in enumerate(names))
    return [(x, y) for x, change, y in cells if change is not None and change.nonfinite]


def _heat_map(columns: list[dict[str, Change]], labels: list[str]) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for column in columns for name in column))
    cells = [[100 * column[name].fraction if name in column else math.nan for column in columns] for name in names]
    figure, axes = plt.subplots(figsize=(2 + 0.35 * len(labels), 1.5 + 0.22 * len(names)), layout="constrained")
    image = axes.imshow(cells, aspect="auto", cmap="magma")
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    figure.colorbar(image, label="% changed")
    if marked := _not_finite(columns, names):  # a single NaN changes no colour
        axes.scatter(*zip(*marked, strict=True), marker="x", color="cyan", label="NaN or infinite")
        figure.legend(loc="outside lower left", fontsize=7)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    plt.close(figure)
    return drawn.getvalue()
