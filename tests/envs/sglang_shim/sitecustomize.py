"""Two repairs that a CPU-only SGLang needs, made when the modules concerned are first imported.

torchvision: SGLang 0.5.23 imports it always. PyPI's build links CUDA, so beside a CPU torch its C library
does not load, and its Python half then fails on two operators that nobody declared. Declaring them is
enough.

pin_memory: SGLang's LoRA pins memory without asking whether there is a CUDA to pin for.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import forks

_alive: list[object] = []  # a torch.library.Library undoes its definitions when it is collected


def declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _alive.append(library)


def drop_pin_memory() -> None:
    import torch

    for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
        setattr(torch, name, _without_pin(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _without_pin(function: Callable[..., object]) -> Callable[..., object]:
    def unpinned(*args: object, **kwargs: object) -> object:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return unpinned


class BeforeImport(importlib.abc.MetaPathFinder):
    """Runs a repair once, when its module is first looked for; finds nothing itself."""

    def __init__(self, repairs: dict[str, Callable[[], None]]) -> None:
        self.repairs = repairs

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        repair = self.repairs.pop(name, None)
        if repair is not None:
            repair()
        return None


forks.instead_of_spawning()
sys.meta_path.insert(0, BeforeImport({"torchvision": declare_torchvision_operators, "sglang": drop_pin_memory}))
