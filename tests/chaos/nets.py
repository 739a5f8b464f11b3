"""Hosts of their own for the parts of a run: network namespaces on a bridge, whose links can be cut and made slow.

This process is the host that sees all of them. Without the right to make namespaces everything is on one host, and no
link is cut.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

NETEM = ("netem", "delay", "150ms", "50ms", "loss", "2%")
TBF = ("tbf", "rate", "1mbit", "burst", "4kb", "latency", "300ms")
"""How a link is slow: late by 100 to 200 ms and lossy; or, on kernels without netem, at 1 Mbit/s, where packets queue
for up to 300 ms and those that find the queue full are lost."""


@dataclass(frozen=True)
class Host:
    """Where a process runs: here, or in a network namespace."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    """What a command line begins with, so that it runs on this host."""

    link: str = ""
    """This process's end of the host's cable; empty if there is none."""

    device: str = "lo"
    """The host's own end."""

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")

    def slow(self, how: tuple[str, ...]) -> None:
        """Both ways."""
        _tc("qdisc", "replace", "dev", self.link, "root", *how)
        _tc("qdisc", "replace", "dev", self.device, "root", *how, prefix=self.prefix)

    def fast(self) -> None:
        _tc("qdisc", "del", "dev", self.link, "root")
        _tc("qdisc", "del", "dev", self.device, "root", prefix=self.prefix)


@dataclass
class Network:
    """Namespaces `<name>-<host>` on the bridge `name`, in 10.x.y.0/24."""

    name: str
    subnet: str
    slowness: tuple[str, ...] = ()
    """How its links can be made slow; empty if this kernel cannot."""

    hosts: list[str] = field(default_factory=list)

    def host(self, name: str) -> Host:
        number = len(self.hosts) + 2
        space, ours, theirs = f"{self.name}-{name}", f"{self.name}{number}", f"{self.name}{number}b"
        self.hosts.append(space)
        _ip("netns", "add", space)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        _ip("link", "set", ours, "master", self.name, "up")
        address = f"{self.subnet}.{number}"
        for command in (
            ("addr", "add", f"{address}/24", "dev", theirs), ("link", "set", theirs, "up"), ("link", "set", "lo", "up"),
        ):  # fmt: skip
            _ip("-n", space, *command)
        return Host(address, ("ip", "netns", "exec", space), ours, theirs)

    def find_slowness(self) -> None:
        """Which of the ways to make a link slow this kernel has, tried on the bridge."""
        for how in (NETEM, TBF):
            with suppress(subprocess.CalledProcessError, FileNotFoundError):
                _tc("qdisc", "replace", "dev", self.name, "root", *how)
                _tc("qdisc", "del", "dev", self.name, "root")
                self.slowness = how
                return

    def close(self) -> None:
        for space in self.hosts:
            _ip("netns", "del", space)
        _ip("link", "del", self.name)


class OneHost:
    """Everything here."""

    slowness: tuple[str, ...] = ()

    def host(self, _name: str) -> Host:
        return Host()


@contextmanager
def network() -> Iterator[Network | OneHost]:
    if os.geteuid() != 0:
        yield OneHost()
        return
    # A name of at most 15 characters, and a subnet that another run on this machine will hardly have.
    made = Network(f"ck{secrets.token_hex(2)}", f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}")
    try:
        _ip("link", "add", made.name, "type", "bridge")
        _ip("addr", "add", f"{made.subnet}.1/24", "dev", made.name)
        _ip("link", "set", made.name, "up")
    except (subprocess.CalledProcessError, FileNotFoundError):
        with suppress(subprocess.CalledProcessError, FileNotFoundError):
            _ip("link", "del", made.name)
        yield OneHost()
        return
    made.find_slowness()
    try:
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tc(*arguments: str, prefix: tuple[str, ...] = ()) -> None:
    subprocess.run([*prefix, "tc", *arguments], check=True, capture_output=True)
