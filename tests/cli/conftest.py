from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptsync.cli import main


@dataclass
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def claims_of_its_own(monkeypatch, tmp_path):
    """Every test run on this host follows the engine that never answers. Pytest's own folders are made by now."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def ckptsync(monkeypatch, capsys):
    """Run `ckptsync ARGS...` in this process."""

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ckptsync", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err)

    return run


@pytest.fixture
def hf_folder(tmp_path):
    """Make a small Hugging Face folder whose weights depend on `seed`."""

    def make(seed: int = 0) -> str:
        folder = tmp_path / f"hf{seed}"
        folder.mkdir()
        torch.manual_seed(seed)
        tensors = {f"model.layers.{i}.mlp.weight": torch.randn(8, 16).bfloat16() for i in range(12)}
        save_file(
            {"model.embed_tokens.weight": torch.randn(32, 16).bfloat16(), **tensors},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 16}')
        (folder / "tokenizer.json").write_text("{}")
        return str(folder)

    return make


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "channel")
