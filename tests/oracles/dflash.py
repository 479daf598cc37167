"""DFlash as its paper draws it (arXiv:2602.06036), dense, from the tensors and keys of a checkpoint folder.

Context and block stand side by side in one attention without pages or caches; loader and graphs play no part.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kimi_fx.checkpoint.files import read_json
from kimi_fx.ops import build_tree


class DFlash:
    """A drafter on its target's embedding and head."""

    def __init__(self, folder: Path, embed: Tensor, head: Tensor) -> None:
        self.config = read_json(folder / "config.json")
        self.weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
        self.embed, self.head = embed, head
        self.taps = self.config["dflash_config"]["target_layer_ids"]

    def __call__(
        self,
        features: Tensor,  # [c, taps * D] of the c committed tokens
        anchor: int,
    ) -> Tensor:  # [S - 1, V]
        config, c = self.config, len(features)
        block = [anchor] + [config["dflash_config"]["mask_token_id"]] * (config["block_size"] - 1)
        x = self.embed[block]
        context = self._norm(features @ self.weights["fc.weight"].T, "hidden_norm.weight")
        for i in range(config["num_hidden_layers"]):
            x = x + self._attend(i, x, context, self._sees(i, c, len(block)))
            h = self._norm(x, f"layers.{i}.post_attention_layernorm.weight")
            gate, up = (h @ self.weights[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate.sigmoid() * gate * up) @ self.weights[f"layers.{i}.mlp.down_proj.weight"].T
        return self._norm(x, "norm.weight")[1:] @ self.head.T

    def _sees(self, i: int, c: int, slots: int) -> Tensor:  # [S, c + S]
        """A sliding layer is causal and sees `sliding_window` tokens, itself among them; a full one sees all."""
        back = torch.arange(c, c + slots)[:, None] - torch.arange(c + slots)
        if self.config["layer_types"][i] == "full_attention":
            return back > -torch.inf
        return (back >= 0) & (back < self.config["sliding_window"])

    def _attend(self, i: int, x: Tensor, context: Tensor, sees: Tensor) -> Tensor:
        at, slots, head = f"layers.{i}.self_attn.", len(x), self.config["head_dim"]
        x = self._norm(x, f"layers.{i}.input_layernorm.weight")
        both = torch.cat((context, x))

        def project(of: Tensor, name: str) -> Tensor:  # [heads, tokens, head]
            return (of @ self.weights[f"{at}{name}_proj.weight"].T).unflatten(-1, (-1, head)).transpose(0, 1)

        positions = torch.arange(len(both))
        q = self._rotate(self._norm(project(x, "q"), at + "q_norm.weight"), positions[-slots:])
        k = self._rotate(self._norm(project(both, "k"), at + "k_norm.weight"), positions)
        shared = len(q) // len(k)
        k, v = (kv.repeat_interleave(shared, 0) for kv in (k, project(both, "v")))
        scores = (q @ k.mT * head**-0.5).masked_fill(~sees, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.weights[f"{at}o_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.weights[name]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Elements i and i + head / 2 as one complex number."""
        frequencies, amplitude = self._frequencies()
        turn = torch.polar(torch.tensor(amplitude), positions[:, None] * frequencies)
        z = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((z.real, z.imag), -1)

    def _frequencies(self) -> tuple[Tensor, float]:
        if not self.config["rope_scaling"]:
            head = self.config["head_dim"]
            return self.config["rope_theta"] ** (-torch.arange(0, head, 2) / head), 1.0
        keys = ("head_dim", "rope_theta", "rope_scaling", "max_position_embeddings")
        known: Any = Qwen3Config(**{key: self.config[key] for key in keys})
        return ROPE_INIT_FUNCTIONS["yarn"](known, torch.device("cpu"))


def rounds(
    dflash: DFlash,
    features: Tensor,  # [tokens, taps * D] of the whole text
    text: list[int],
    prompt: int,  # tokens of it
    budget: int,
) -> list[int]:
    """Tokens that each verify step adds when the target is bound to write `text`; cut where the text ends."""
    start, counts = prompt, []
    while start + 1 < len(text):
        anchor, everything = torch.tensor([text[start]]), torch.tensor([budget])
        logits = dflash(features[:start], text[start])[None]
        token, parent, _, _, _, valid = build_tree.reference(logits, anchor, everything, everything, budget + 1, budget)
        children = dict(zip(zip(parent[0].tolist(), token[0].tolist(), strict=True), range(budget + 1), strict=True))
        assert valid.all()
        node, count = 0, 1
        while (node := children.get((node, text[start + count]))) is not None and start + count + 1 < len(text):
            count += 1
        counts.append(count)
        start += count
    return counts
