"""A whole publish (plan, digests, shards, fsync, commit, head) against plain O_DIRECT writes of the same bytes.

    python -m benchmarks.publish [--gb 2] [--root FOLDER] [--rounds 5] [--json]

Each round runs both, in turning order. `of plain` is the median over the rounds of plain time / publish time.
"""

from __future__ import annotations

import os
import shutil

from benchmarks.common import Row, compare
from benchmarks.shards import Shards, command
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
    command(__doc__, run)


if __name__ == "__main__":
    main()
