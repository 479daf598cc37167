"""The target against Hugging Face on a geometry of no published model; latent epsilons, features, chunks, bf16.

The random checkpoint's latents have mean squares near 1e-4, where an epsilon of 1e-6 in place of 1e-5 moves a norm
by 4 %. Hugging Face's model is what it is compared with, so a wrong epsilon in either norm is planted there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from checks import LOGITS
from kimi_fx.bench.huggingface import huggingface
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.runtime.load import load
from oracles.rounds import forward, one_round, path, plain_logits, prefill, prefilled, random_engine, shape, unseated

LENGTH = 70
TOLERANCE = 2e-5  # of the largest logit; a wrong epsilon must lie a thousand times over it


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any]:
    folder = tmp_path_factory.mktemp("pair")
    return random_engine(folder), huggingface(folder / "target")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return torch.randint(0, 320, (2, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()


def logits_of(hf: Any, prompts: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return hf(torch.tensor(prompts)).logits


def difference(pair: tuple[Engine, Any], prompts: list[list[int]]) -> float:
    """Largest, as a share of the largest logit."""
    engine, hf = pair
    theirs = logits_of(hf, prompts)
    return ((plain_logits(engine, prompts, 0) - theirs).abs().max() / theirs.abs().max()).item()


def captured(hf: Any, names: list[str], prompts: list[list[int]]) -> dict[str, Any]:
    """What the named modules take and give."""
    seen: dict[str, Any] = {}
    hooks = [
        hf.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args, out)}))
        for name in names
    ]
    logits_of(hf, prompts)
    for hook in hooks:
        hook.remove()
    return seen


def test_logits_are_hugging_faces(pair: tuple[Engine, Any], prompts: list[list[int]]) -> None:
    m = pair[0].model.target
    assert (m.H, m.nope, m.value, m.E, m.K, m.dense_layers) == (16, 48, 24, 40, 6, 2)
    assert difference(pair, prompts) < TOLERANCE


@pytest.mark.parametrize("norm", ["q_a_layernorm", "kv_a_layernorm"])
def test_a_wrong_epsilon_in_either_latent_norm_shows(
    pair: tuple[Engine, Any], prompts: list[list[int]], norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = pair[1]
    names = [f"model.layers.{i}.self_attn.{norm}" for i in range(4)]
    for (latent, *_), _ in captured(hf, names, prompts).values():
        assert 5e-5 < latent.square().mean() < 2e-4
    for name in names:
        module = hf.get_submodule(name)
        assert module.variance_epsilon == 1e-5
        monkeypatch.setattr(module, "variance_epsilon", 1e-6)
    assert difference(pair, prompts) > 1000 * TOLERANCE


def test_features_are_the_outputs_of_the_tapped_layers(pair: tuple[Engine, Any], prompts: list[list[int]]) -> None:
    """In the order the drafter names them, the last layer's before the final norm."""
    engine, hf = pair
    assert engine.model.taps == (2, 0, 3) and engine.model.target.layers == 4
    names = [f"model.layers.{i}" for i in engine.model.taps]
    theirs = captured(hf, names, prompts)
    outputs = [theirs[name][1] for name in names]
    expected = torch.cat([out[0] if isinstance(out, tuple) else out for out in outputs], -1)
    torch.testing.assert_close(forward(engine, prompts)[2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, LENGTH])
def test_prompt_chunks_do_not_change_the_last_logits(
    pair: tuple[Engine, Any], prompts: list[list[int]], chunk: int
) -> None:
    """The first token, and the logits of the round after it, which read every row of the prompt."""
    engine = pair[0]
    pool, state = unseated(engine, 1, 2)
    seen: list[Tensor] = []
    prefill(engine, pool, state, 0, prompts[0], chunk, seen)
    theirs = logits_of(pair[1], prompts)[0, -1]
    assert (seen[-1][0, 0] - theirs).abs().max() < LOGITS
    anchor = int(theirs.argmax())
    assert (state.anchor.tolist(), state.length.tolist(), state.active.tolist()) == ([anchor], [LENGTH], [True])
    _, _, logits = one_round(engine, pool, state, shape(engine, 1))
    assert (logits[0, 0] - logits_of(pair[1], [[*prompts[0], anchor]])[0, -1]).abs().max() < LOGITS


@pytest.fixture(scope="module")
def half() -> Engine:
    config = load_config(["dtype=bfloat16", "device=cpu"])
    return Engine(config, load(config, progress=False))


def test_bfloat16_follows_float32(half: Engine, make_engine: Any, golden: list[dict[str, Tensor]]) -> None:
    """Logits differ little, and the best token only where fp32 has two that are nearly equal."""
    texts = [g["prompt"].tolist() + g["greedy"].tolist() for g in golden[:4]]
    cut = min(map(len, texts))
    ours, exact = (plain_logits(engine, [t[:cut] for t in texts], 0) for engine in (half, make_engine()))
    error = (ours - exact).square().mean().sqrt().item()
    assert error < 0.03 * exact.std()
    gap = exact.topk(2).values @ torch.tensor([1.0, -1.0])
    assert (gap[ours.argmax(-1) != exact.argmax(-1)] < 4 * error).all()


def test_bfloat16_tree_follows_bfloat16_plain(half: Engine, golden: list[dict[str, Tensor]]) -> None:
    prompt = golden[0]["prompt"].tolist()
    pool, state = prefilled(half, [prompt], [15])
    tree, _, logits = one_round(half, pool, state, shape(half, 16))
    nodes = path(tree, 0, 15)
    plain = plain_logits(half, [[*prompt, *tree.token[0, nodes].tolist()]], len(prompt))[0]
    assert (logits[0, nodes] - plain).square().mean().sqrt() < 0.03 * plain.std()
