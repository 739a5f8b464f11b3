"""Every call of a logger in the packages, and whether it names an event."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from typing import NamedTuple

import ckptsync
import watchers

LOGGERS = {"log", "logger"}
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
WITH_EVENT = {"for_log", "_in_receipt"}
"""What returns an `extra` that has one, as `test_logs` sees in their lines."""

PACKAGES = (ckptsync, watchers)


class Call(NamedTuple):
    place: str
    event: bool


def calls() -> Iterator[Call]:
    for package in PACKAGES:
        (root,) = package.__path__
        for folder, _, names in os.walk(root):
            for name in names:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as file:
                        yield from calls_in(file.read(), os.path.relpath(path, os.path.dirname(root)))


def calls_in(code: str, path: str) -> Iterator[Call]:
    for scope in ast.walk(ast.parse(code)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(scope):
            if _is_log(node):
                extra = next((keyword.value for keyword in node.keywords if keyword.arg == "extra"), None)
                yield Call(f"{path}:{node.lineno}", extra is not None and _names_event(extra, scope))


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
    )


def _names_event(extra: ast.AST, scope: ast.AST) -> bool:
    """In the expression itself, in what it calls (`receipt.for_log()`), or where its variable is set."""
    if isinstance(extra, ast.Name):
        return any(
            isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == extra.id for target in node.targets)
            and _names_event(node.value, scope)
            for node in ast.walk(scope)
        )
    return any(
        (isinstance(node, ast.Constant) and node.value == "event")
        or (isinstance(node, ast.keyword) and node.arg == "event")
        or (isinstance(node, ast.Attribute) and node.attr in WITH_EVENT)
        or (isinstance(node, ast.Name) and node.id in WITH_EVENT)
        for node in ast.walk(extra)
    )
