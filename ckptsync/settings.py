"""What a call leaves open: `CKPTSYNC_*` of the environment first, then a `ckptsync.toml` beside the run.

    root = "s3://bucket/run1"        # for every command that has such an option

    [watch]                          # for one command
    engine = "vllm"
    url = ["http://127.0.0.1:8000"]

    [publisher]                      # for PublisherConfig.load()
    max_lag = 4

Nothing in here is asked by the code that does the work: the command line and `PublisherConfig.load` do, once.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from .errors import InvalidInput

FILE = "ckptsync.toml"
PREFIX = "CKPTSYNC_"
FEW = 8
"""So many names are said in full where one is not known."""

WHERE = "CKPTSYNC_CONFIG"
"""The variable that names the file, where it is not the working folder's `ckptsync.toml`."""


class Setting(NamedTuple):
    """A value as it was found, and the variable or the file (with its table) that it is from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One look at the environment and the file."""

    path: str = ""
    """Of the file that was read; empty if there is none."""

    tables: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str = "", environ: Mapping[str, str] = os.environ) -> Self:
        """From `path`, else the file that CKPTSYNC_CONFIG names, else `ckptsync.toml` in the working folder if it is
        there. InvalidInput for a file that was named and is not there, or that is no TOML."""
        named = path or environ.get(WHERE, "")
        path = named or FILE
        if not named and not os.path.exists(path):
            return cls(environ=environ)
        try:
            with open(path, "rb") as file:
                return cls(path=path, tables=tomllib.load(file), environ=environ)
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidInput(f"the settings in {path} cannot be read: {reason}") from error

    def of(self, section: str, variables: Mapping[str, str], *, shared: bool = True) -> dict[str, Setting]:
        """What is set for one section, by key; `variables`: each key's variable. `shared`: keys outside of all tables
        count too. A variable that is empty is none."""
        own = self._table(section)
        found = {}
        for key, variable in variables.items():
            if self.environ.get(variable):
                found[key] = Setting(self.environ[variable], variable)
            elif key in own:
                found[key] = Setting(own[key], f"{self.path} [{section}]")
            elif shared and key in self.tables:
                found[key] = Setting(self.tables[key], self.path)
        return found

    def check_file(
        self,
        known: Mapping[str, Collection[str]],
        shared: Collection[str],
        elsewhere: Mapping[str, Mapping[str, str]],
    ) -> None:
        """InvalidInput, naming the nearest, for a table or a key that nobody knows. `known`: keys by section;
        `elsewhere`: what is said by other means, by section and key, and how."""
        for name, value in self.tables.items():
            if name not in known and name not in shared:
                what = f"{self.path}: {'table ' * isinstance(value, dict)}{name!r}"
                raise _unknown(what, name, [*known, *shared], "COMMAND")
        for section, keys in known.items():
            self.check_section(section, keys, elsewhere.get(section, {}))

    def check_section(self, section: str, known: Collection[str], elsewhere: Mapping[str, str]) -> None:
        """The same for the keys of one table, if it is there."""
        for key in self._table(section):
            plain = key.lstrip("-").replace("-", "_")
            if key not in known and plain in elsewhere:
                raise InvalidInput(f"{self.path}: {key!r} in [{section}] {elsewhere[plain]}")
            if key not in known:
                raise _unknown(f"{self.path}: {key!r} in [{section}]", key, known, section)

    def check_environment(self, variables: Collection[str]) -> None:
        """InvalidInput for a variable that is nearly one of ours. Others belong to somebody else: Kubernetes sets
        CKPTSYNC_SERVICE_HOST and the like beside a service of that name."""
        for name in sorted(self.environ):
            if name.startswith(PREFIX) and name not in variables and name != WHERE:
                suffixes = {each.removeprefix(PREFIX): each for each in variables}
                if near := difflib.get_close_matches(name.removeprefix(PREFIX), suffixes, 1, 0.8):
                    raise InvalidInput(f"{name} is not known: {suffixes[near[0]]} is the nearest")

    def _table(self, section: str) -> Mapping[str, Any]:
        table = self.tables.get(section, {})
        if not isinstance(table, dict):
            raise InvalidInput(f"{self.path}: {section!r} must be a table: [{section}]")
        return table


def variable(key: str) -> str:
    """`keep_last` -> `CKPTSYNC_KEEP_LAST`."""
    return PREFIX + re.sub(r"[^A-Za-z0-9]", "_", key).upper()


def nearest(name: str, known: Sequence[str]) -> str:
    """The one that `name` is most likely mistyped for; empty if none is like it."""
    return next(iter(difflib.get_close_matches(name, known, 1, 0.6)), "")


def _unknown(what: str, name: str, known: Iterable[str], section: str) -> InvalidInput:
    ordered = sorted(set(known))
    near = nearest(name, ordered)
    few = f"known are {', '.join(ordered)}" if len(ordered) <= FEW else f"`ckptsync config {section}` lists what is"
    said = f"{near!r} is the nearest" if near else few
    return InvalidInput(f"{what} is not known: {said}")
