"""A whole publish (plan, digests, shards, fsync, commit, head) against plain O_DIRECT writes of the same bytes.

    python -m benchmarks.publish [--gb 2] [--root FOLDER] [--rounds 5] [--json]

Each round runs both, in turning order. `of plain` is the median over the rounds of plain time / publish time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict

from rich.console import Console

from benchmarks.common import Row, compare, load
from benchmarks.shards import Shards, table
from ckptsync.publish import Publisher


def run(root: str, gb: float, rounds: int) -> list[Row]:
    shards = Shards(root, gb)
    channel = os.path.join(root, "channel")

    def fresh() -> None:
        """Uncounted: no file to truncate, and never two versions on the disk."""
        shards.drop("plain")
        shutil.rmtree(os.path.join(channel, "data"), ignore_errors=True)

    with Publisher(channel) as publisher:
        contenders = {
            "plain O_DIRECT": shards.write_plain,
            "Publisher.publish": lambda: _publish(publisher, shards),
        }
        return compare("publish", shards.gb, rounds, contenders, fresh)


def _publish(publisher: Publisher, shards: Shards) -> None:
    # One byte moves on, or the second publish would warn that nothing changed.
    shards.memory[0:1] = bytes([(shards.memory[0] + 1) % 128])
    publisher.publish(shards.state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--root", help="a folder on the disk to be measured; not tmpfs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        rows = run(root, options.gb, options.rounds)
    if options.json:
        json.dump({"rows": [asdict(row) for row in rows], "load": load()}, sys.stdout)
    else:
        Console().print(table(rows), load())


if __name__ == "__main__":
    main()
