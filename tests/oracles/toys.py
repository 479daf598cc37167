"""Small models: random pairs of a millisecond a step, and toys whose every probability is known.

A toy's target is one dense layer whose output is nothing, between a one-hot embedding and a head that holds a table
of logits: row t for the token after t. Its latent rows are real and so are engine, tree, walk and commit. What a
drafter proposes is scripted by replacing `graphs.drafter.draft`. Its vocabulary is the 256 bytes, some words, and
256 control ids.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kimi_fx.checkpoint.load import random_params
from kimi_fx.compose import load_config
from kimi_fx.config import DrafterModel, Rope, TargetModel
from kimi_fx.engine import Engine
from kimi_fx.graphs.params import Params, drafter_plan, target_plan
from kimi_fx.graphs.pytree import tree_map
from kimi_fx.graphs.state import Model
from kimi_fx.ops import REFERENCE
from kimi_fx.runtime.load import Loaded, Text, load
from kimi_fx.tokenizer import Tokenizer, load_tokenizer
from oracles.write_checkpoint import drafter_config, target_config, write_drafter, write_target

BEST, SECOND = 10.0, 9.5
Script = Callable[[int, int], Sequence[int]]  # (anchor, depth - 1) -> tokens, the most probable first


def toy(
    logits: Tensor,  # [V, V] row t: logits of the token after t
    stop_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    block: int = 8,
    max_position: int = 4096,
) -> Loaded:
    """A target that follows the table, with a drafter whose weights are random."""
    V, cpu, f32 = logits.shape[0], torch.device("cpu"), torch.float32
    target = TargetModel(
        layers=1, dense_layers=1, D=V, H=1, V=V, nope=2, R=2, value=2, q_lora=2, L=2, dense=2, E=1, K=1, I=32,
        shared=1, routed_scale=1.0, norm_eps=1e-12, lora_norm_eps=1e-6, rope=Rope(1e4), max_position=max_position,
    )  # fmt: skip
    drafter = DrafterModel(
        layers=1, D=V, H=1, KV=1, head=2, inner=2, norm_eps=1e-6, rope=Rope(1e4), block=block, mask_id=V - 1,
        taps=(0,), windows=(0,), causal=(False,), max_position=max_position,
    )  # fmt: skip
    weights = random_params(target_plan(target), 0, cpu, f32)
    (layer,) = weights.layers
    silent = replace(
        layer,
        attention=replace(layer.attention, o=torch.zeros_like(layer.attention.o)),
        mlp=tree_map(torch.zeros_like, layer.mlp),
    )
    weights = replace(
        weights, embed=torch.eye(V), layers=(silent,), norm=torch.full((V,), V**-0.5), lm_head=logits.T.contiguous()
    )
    params = Params(weights, random_params(drafter_plan(drafter), 1, cpu, f32))
    return Loaded(params, Model(target, drafter, REFERENCE), cpu, f32, Text(tokenizer, None, tuple(stop_ids), {}))


def engine_of(loaded: Loaded, *overrides: str) -> Engine:
    """An engine over a toy; text prompts get no [BOS]."""
    return Engine(load_config(["target.bos=false", "cache.max_len=512", *overrides]), loaded)


def counter(V: int = 48) -> Tensor:
    """Logits of COUNTER: the next token is t + 1, the second best t + 2, modulo V."""
    return successors([(t + 1) % V for t in range(V)], [(t + 2) % V for t in range(V)])


def successors(best: Sequence[int], second: Sequence[int]) -> Tensor:
    """Logits under which `best[t]` follows t."""
    table = torch.zeros(len(best), len(best))
    rows = torch.arange(len(best))
    table[rows, torch.tensor(second)] = SECOND
    table[rows, torch.tensor(best)] = BEST
    return table


def story(ids: Sequence[int], V: int) -> Tensor:
    """Logits under which each id of a text without repetitions is followed by the next one, the last by the first."""
    best = list(range(V))
    for here, there in zip(ids, [*ids[1:], ids[0]], strict=True):
        best[here] = there
    return successors(best, [(t + 1) % V for t in best])


def same_after_all(probabilities: Sequence[float]) -> Tensor:
    """Logits of independent tokens with these probabilities."""
    return torch.tensor(probabilities).log().repeat(len(probabilities), 1)


def scripted(monkeypatch, script: Script) -> None:
    """Make every drafter propose what the script says: logits 0, -1, -2, … for its tokens, -inf for all others."""

    def draft(params, target, m, ops, pool, state, block, axis):
        logits = torch.full((len(state.anchor), block - 1, target.embed.shape[0]), -torch.inf)
        for b, anchor in enumerate(state.anchor.tolist()):
            for d in range(block - 1):
                for rank, token in enumerate(script(anchor, d)):
                    logits[b, d, token] = -float(rank)
        return logits

    monkeypatch.setattr("kimi_fx.graphs.drafter.draft", draft)


def ahead(*steps: int, V: int = 48) -> Script:
    """A script for COUNTER: at each depth the tokens `steps` beyond the one before; (1,) is right."""
    return lambda anchor, d: [(anchor + d + step) % V for step in steps]


def following(table: Tensor) -> Script:
    """The script that is always right: the table's best token after its best token after …"""
    best = table.argmax(1).tolist()

    def script(anchor: int, d: int) -> list[int]:
        for _ in range(d + 1):
            anchor = best[anchor]
        return [anchor]

    return script


def byte_tokenizer(folder: Path, words: Iterable[str] = ()) -> Tokenizer:
    """Ids 0..255 are bytes, then come the words, then 256 control ids."""
    ranks = [bytes([i]) for i in range(256)] + [word.encode() for word in words]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    return load_tokenizer(folder)


def random_pair(folder: Path, V: int, layers: int, block: int, inner: int = 32) -> Loaded:
    """A random checkpoint pair without a tokenizer, both of 1 or 2 layers: the target's last has experts."""
    target = target_config(
        vocab_size=V, hidden_size=32, num_hidden_layers=layers, first_k_dense_replace=layers - 1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, moe_intermediate_size=inner,
        n_routed_experts=4, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, bos_token_id=V - 3, eos_token_id=V - 2, pad_token_id=V - 1,
        max_position_embeddings=512,
    )  # fmt: skip
    drafter = drafter_config(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention", "sliding_attention"][:layers],
        block_size=block, num_target_layers=layers, max_position_embeddings=512,
        dflash_config={"target_layer_ids": list(reversed(range(layers))), "mask_token_id": V - 1},
    )  # fmt: skip
    write_target(folder / "target", target, latent=1.0)
    write_drafter(folder / "drafter", drafter, folder / "target")
    paths = [f"target={folder / 'target'}", f"drafter={folder / 'drafter'}"]
    return load(load_config([*paths, "dtype=float32", "device=cpu"]), progress=False)
