"""The drafter's dense parts as operators: the cut is right, and what cannot be had is refused in a sentence.

Engines themselves are `test_gpu_tensorrt.py`'s. On a CPU such an operator is the function that an engine is built from.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_fx.admit import plan
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs import drafter
from kimi_fx.graphs.pytree import tree_map
from kimi_fx.graphs.state import Shape, slots
from kimi_fx.ops import KERNELS, REFERENCE
from kimi_fx.runtime import tensorrt
from kimi_fx.runtime.buckets import buckets
from kimi_fx.runtime.ingredients import ingredients
from kimi_fx.runtime.load import Loaded
from kimi_fx.runtime.rounds import Rounds
from oracles.rounds import prefilled

ASKED = "drafter.backend=tensorrt"
CUDA = torch.device("cuda")


def block(engine: Engine, prompts: list[list[int]], **parts: Any) -> Tensor:
    """The drafter's marginals after prefill; `parts` stand in for its own."""
    pool, state = prefilled(engine, prompts, [7] * len(prompts))
    p, m = engine.loaded.params, engine.model
    return drafter.draft(p.drafter, p.target, m.drafter, replace(REFERENCE, **parts), pool, state, 8)


def test_the_parts_together_are_the_block(make_engine: Any, held_out: list[list[int]]) -> None:
    """Bit for bit, as operators and as the graphs that engines are built from."""
    engine, prompts = make_engine(), [held_out[0][:70], held_out[1][:30]]
    called = []

    def exported(part: str) -> Any:
        def call(*given: Any) -> Any:
            called.append(part)
            found = tensorrt.exported(part, given[:-1], given[-1]).module()(*given[:-1])
            return found if part == "project" else found[0] if isinstance(found, tuple) else found

        return call

    whole = block(engine, prompts)
    assert torch.equal(
        whole, block(engine, prompts, draft_project=tensorrt.draft_project, draft_finish=tensorrt.draft_finish)
    )
    graphs = block(engine, prompts, draft_project=exported("project"), draft_finish=exported("finish"))
    assert torch.allclose(graphs, whole, rtol=1e-4, atol=1e-4)
    assert called == ["project", "finish"] * engine.model.drafter.layers


@pytest.mark.parametrize("part", ["draft_project", "draft_finish"])
def test_operators_are_sound(make_engine: Any, part: str) -> None:
    engine = make_engine()
    name = part.removeprefix("draft_")
    *tensors, eps = given(engine, 2)[name]
    torch.library.opcheck(getattr(tensorrt, part), (*(torch.randn(x.shape) for x in tensors), eps))


def given(engine: Engine, batch: int) -> dict[str, tuple[Any, ...]]:
    model = replace(engine.model, ops=tensorrt.operators("tensorrt"))
    return tensorrt.inputs(engine.loaded.params, engine.pool, slots(engine.state, batch), Shape(batch, 8, 8, 7), model)


def test_an_engine_is_named_by_its_shapes(make_engine: Any) -> None:
    """Weights are inputs, whole and contiguous; neither their values nor their memory matter."""
    engine = make_engine()
    names = {part: tensorrt.key(part, x) for part, x in given(engine, 2).items()}
    assert names.keys() == {"project", "finish"}
    other = replace(engine.loaded, params=tree_map(torch.zeros_like, engine.loaded.params))
    assert names == {part: tensorrt.key(part, x) for part, x in given(Engine(engine.config, other), 2).items()}
    assert not set(names.values()) & {tensorrt.key(part, x) for part, x in given(engine, 4).items()}
    for x in given(engine, 2).values():
        assert all(tensor.is_contiguous() for tensor in x[:-1]) and x[-1] == engine.model.drafter.norm_eps


def test_without_engines_nothing_is_built(make_engine: Any, tmp_path: Path) -> None:
    engine = make_engine()
    tensorrt.load_engines((engine.loaded.params, engine.pool, engine.state, Shape(4, 8, 8, 7), engine.model), tmp_path)
    asked = replace(engine.model, ops=tensorrt.operators("tensorrt"))
    tensorrt.load_engines((engine.loaded.params, engine.pool, engine.state, Shape(4, 1, 1, 1), asked), tmp_path)
    assert not list(tmp_path.iterdir())
    assert tensorrt.operators("inductor") is KERNELS


@pytest.mark.parametrize(
    ("words", "device", "compiled", "said"),
    [
        ([], torch.device("cpu"), True, "needs a CUDA device and this runs on cpu"),
        (["mesh.tp=2"], CUDA, True, "serves one rank and mesh.tp is 2"),
        ([], CUDA, False, "is part of compiled rounds and none are in use"),
    ],
)
def test_refusals(words: list[str], device: torch.device, compiled: bool, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{ASKED} {said}: leave it out, or change that.$"):
        tensorrt.check_backend(load_config([ASKED, *words]), device, compiled)
    tensorrt.check_backend(load_config(words), device, compiled)


def test_a_missing_package_is_one_sentence(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the steps are looked up, before any weight is read."""
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    config = load_config([ASKED])
    said = r"torch_tensorrt cannot be imported \(.*\): pip install 'kimi-fx\[tensorrt\]'"
    with pytest.raises(ValueError, match=said):
        Rounds(config, loaded, plan(config, loaded.model, "tree", None))


@pytest.mark.parametrize(
    "words", [["drafter=none"], ["step=plain"], ["step.budget=0"], ["step.block=1"], ["step.block=1", "run.nodes=[8]"]]
)
def test_engines_with_nothing_to_draft_are_refused(words: list[str], loaded: Loaded) -> None:
    """Also where none could be made, where no package is missed."""
    config = load_config([ASKED, "run.compile=true", *words])
    model = replace(loaded.model, drafter=None) if "drafter=none" in words else loaded.model
    with pytest.raises(ValueError, match=f"^{ASKED} makes what drafts, and no compiled round here does"):
        buckets(config, model, plan(config, model, config.step.mode, config.step.budget))
    nodes = load_config([ASKED, "step=plain", "run.nodes=[1,8]"])
    assert buckets(nodes, loaded.model, plan(nodes, loaded.model, "plain", None))


def test_an_engine_refuses_before_weights_are_read(loaded: Loaded) -> None:
    for words in ([], ["run.compile=true"]):
        with pytest.raises(ValueError, match=ASKED):
            Engine(load_config([ASKED, "device=cpu", *words]), replace(loaded, params=None))


def test_the_store_tells_back_ends_apart(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_fx.runtime.ingredients.versions", lambda: "tensorrt 1.4, torch-tensorrt 2.11")
    found = [
        ingredients(replace(loaded.model, ops=tensorrt.operators(backend)), torch.float32, torch.device("cpu"))
        for backend in ("inductor", "tensorrt")
    ]
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"drafter.backend"}
    assert "kimi_fx/runtime/tensorrt.py" in found[0]
