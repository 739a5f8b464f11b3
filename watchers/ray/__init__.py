"""Trainers and engines as Ray actors: watchers on each node, a board that passes on news, calls with deadlines.

    from watchers.ray import EngineActor, GROUPS, ask, by_node, meet_at, open_board, watch

    @ray.remote(num_gpus=1, concurrency_groups=GROUPS)
    class Rollout(EngineActor):                                   # an engine that lives in an actor
        def __init__(self, model):
            self.engine = ModuleEngine(model)                     # or LlmEngine(vllm.LLM(...)): an adapter in there
        def rollout(self, prompts):
            with self.engine.gate:                                # a load waits for it, and it for a load
                return self.engine.status().label, generate(self.engine.module, prompts)

    rollouts = {f"rollout-{i}": Rollout.remote(model) for i in range(8)}
    board = open_board("run1", root)                              # a named actor; open_board("run1") finds it anywhere
    watchers = watch(root, by_node(rollouts), stage="/dev/shm/ckptsync", board=board)     # node id -> WatcherActor

    # the trainer's rank 0
    published = publisher.publish(model, step=step)
    board.push(published.version, step=step)                      # watchers look now, not at their next poll

    # the driver
    board.wait_for(published.version, timeout=60)                 # until every engine serves at least this version
    answers = ask(rollouts, "rollout", prompts, deadline=120)     # .answered, .failed, .late: by name
    for label, _ in answers.answered.values():
        board.used(label)
    board.staleness()                                             # {0: 812, 1: 155, 2: 3}: versions behind -> rollouts

The store is the truth and the board a hint: a watcher that hears nothing polls, so a board that is slow, wrong or dead
costs seconds and no correctness. Everything about placement, restarts, names and timeouts is Ray's own. Needs
`ckptsync[ray]`.
"""

from .board import Board, BoardUnavailable, open_board
from .calls import Answers, PartialFailure, ask
from .engine import GROUPS, EngineActor, RayEngine
from .meeting import Meeting, meet_at, meeting_here, node_address
from .nodes import Connect, WatcherActor, by_node, node_of, watch
from .version_board import News, NotFresh, Standing, VersionBoard

__all__ = [
    "GROUPS",
    "Answers",
    "Board",
    "BoardUnavailable",
    "Connect",
    "EngineActor",
    "Meeting",
    "News",
    "NotFresh",
    "PartialFailure",
    "RayEngine",
    "Standing",
    "VersionBoard",
    "WatcherActor",
    "ask",
    "by_node",
    "meet_at",
    "meeting_here",
    "node_address",
    "node_of",
    "open_board",
    "watch",
]
