"""An engine's end of a group: a queue in this process, or a real gloo rank in another."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from typing import Any

import torch


class QueueGroup:
    """Both ends. `stuck` lets the sender wait forever, as NCCL does when the other end is gone."""

    def __init__(self) -> None:
        self.sent: queue.Queue[torch.Tensor] = queue.Queue()
        self.opened: list[tuple[str, int, int, str]] = []
        self.aborted = 0
        self.release: Any = None

    def open(self, address: str, port: int, world_size: int, name: str) -> QueueGroup:
        self.opened.append((address, port, world_size, name))
        return self

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.release is not None:
            self.release.wait()
            return
        for tensor in tensors:
            self.sent.put(tensor.clone())

    def abort(self) -> None:
        self.aborted += 1

    def received(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """As vLLM's worker: one broadcast for each tensor that was announced."""
        found = {}
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            tensor = self.sent.get(timeout=60)
            if str(tensor.dtype) != f"torch.{dtype}" or list(tensor.shape) != shape:
                raise ValueError(f"{name} was announced as {dtype} {shape}")
            found[name] = tensor
        return found


class GlooRank:
    """A process that joins as SGLang's scheduler does, and receives flattened buckets."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=serve_group, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def join(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.pipe.send(("join", body))
        return 200, {"success": self.pipe.recv(), "message": ""}

    def received(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        self.pipe.send(("receive", body))
        data = torch.frombuffer(bytearray(self.pipe.recv()), dtype=torch.uint8)
        found, start = {}, 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            kind = getattr(torch, dtype)
            end = start + torch.Size(shape).numel() * kind.itemsize
            found[name], start = data[start:end].view(kind).view(shape).clone(), end
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def serve_group(pipe: Any) -> None:
    """SGLang 0.5.23: `init_custom_process_group`, then `_receive_bucketed_weights_from_distributed`."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
    from torch.distributed.rendezvous import rendezvous

    while True:
        what, body = pipe.recv()
        if what == "join":
            size, name, rank = body["world_size"], body["group_name"], body["rank_offset"]
            store, _, _ = next(rendezvous(f"tcp://{body['master_address']}:{body['master_port']}", rank, size))
            group, _ = _new_process_group_helper(
                size, rank, [], dist.Backend(body["backend"]), PrefixStore(name, store), group_name=name,
                timeout=timedelta(seconds=30),
            )  # fmt: skip
            _world.pg_group_ranks[group] = {at: at for at in range(size)}
            pipe.send(True)
        else:
            nbytes = sum(
                torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
            )
            data = torch.empty(nbytes, dtype=torch.uint8)
            dist.broadcast(data, src=0, group=group)
            pipe.send(bytes(data.numpy()))
