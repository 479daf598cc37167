"""Shared fixtures: the shipped checkpoint pair in fp32 on the CPU, loaded once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_fx.compose import load_config
from kimi_fx.config import package_path
from kimi_fx.engine import Engine
from kimi_fx.runtime.load import Loaded, load

pytest.register_assert_rewrite("checks")
torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "xdist_group" not in item.keywords)  # groups are long: they begin first
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    torch.manual_seed(0)  # what a test and fixtures of its own draw does not depend on those before it


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    return load(load_config(["dtype=float32", "device=cpu"]), progress=False)


@pytest.fixture(scope="session")
def make_engine(loaded):
    """A fresh engine over the loaded pair, configured by overrides."""

    def make(*overrides: str) -> Engine:
        return Engine(load_config(["dtype=float32", "device=cpu", *overrides]), loaded)

    return make


@pytest.fixture(scope="session")
def golden() -> list[dict[str, torch.Tensor]]:
    """Hugging Face's prompt, greedy ids, last-position logits and smallest top-2 gap, per prompt."""
    tensors = load_file(GOLDEN / "kimi-nano-hf-fp32.safetensors")
    fields = ("prompt", "greedy", "last_logits", "min_gap")
    return [{f: tensors[f"{k}.{f}"] for f in fields} for k in range(len(tensors) // len(fields))]


@pytest.fixture(scope="session")
def held_out() -> list[list[int]]:
    """96 held-out prompts of 128 ids."""
    return load_file(package_path("kimi_fx:nano/acceptance-prompts.safetensors"))["prompts"].tolist()
