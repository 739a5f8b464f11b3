"""What the documentation tells to type is what the command line takes. The site itself is built by `make check`."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import ckptsync
from ckptsync import errors
from ckptsync.cli import load_command

HERE = Path(__file__).parents[2]
PAGES = [HERE / "README.md", *sorted((HERE / "docs").glob("*.md")), *sorted((HERE / "examples").rglob("*.md"))]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `ckptsync …` in the page's code blocks, as far as one shell command goes."""
    fences = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for block in [text for language, text in fences if language in {"", "console", "bash"}]:
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*ckptsync (.*)", line):
                words = re.split(r"\s#|\s&|\||;", match[1])[0].replace("…", "")
                yield shlex.split(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_one_that_is_there(page):
    for words in commands(page):
        while words and words[0].startswith("--"):
            words = words[1:]
        if not words or words == ["--version"]:
            continue
        name, *arguments = words
        command = load_command(name)
        try:
            command.make_context(name, arguments)
        except typer.BadParameter as error:
            if type(error).__name__ != "MissingParameter":  # an option that is left out by `…` is no mistake
                pytest.fail(f"ckptsync {' '.join(words)}: {error}")


def test_pages_have_commands_to_check():
    assert sum(len(list(commands(page))) for page in PAGES) > 40


def test_every_error_has_a_remedy_on_the_page_of_errors():
    page = (HERE / "docs" / "faq.md").read_text()
    raised = [getattr(errors, name) for name in errors.__all__ if name != "CkptSyncError"]
    leaves = [error for error in raised if not error.__subclasses__()]
    assert [error.kind for error in leaves if f"`{error.kind}`" not in page] == []


def names(page: Path) -> Iterator[str]:
    """Every dotted name of ours on a page, and what its code imports of us."""
    text = page.read_text()
    yield from re.findall(r"\b(?:ckptsync|watchers)(?:\.[A-Za-z_]\w*)+", text)
    for module, imported in re.findall(r"^ *from ((?:ckptsync|watchers)[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        yield from (f"{module}.{name.strip()}" for name in imported.split(","))


def is_there(name: str) -> bool:
    """Whether it can be imported as it is written. Read in the sources: some need an engine to be imported."""
    top, first, *rest = name.split(".")
    if top == "ckptsync" and first in ckptsync.__all__:
        return True
    path, parts = HERE / top, [first, *rest]
    while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").is_file()):
        path = path / parts.pop(0)
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return not parts or parts[0] in defined(ast.parse(source.read_text()))


def defined(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node.value, ast.List):  # `__all__` has what is imported on first use
                yield from (str(each.value) for each in node.value.elts if isinstance(each, ast.Constant))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_ours_on_a_page_can_be_imported_as_it_is_written(page):
    files = {"ckptsync.toml", "ckptsync.json"}
    assert [name for name in sorted({*names(page)} - files) if not is_there(name)] == []


def test_a_name_that_is_not_there_is_found_and_pages_have_names_to_check():
    assert not is_there("ckptsync.Fence")
    assert not is_there("ckptsync.errors.Fence")
    assert not is_there("watchers.nothing")
    assert sum(len({*names(page)}) for page in PAGES) > 60
