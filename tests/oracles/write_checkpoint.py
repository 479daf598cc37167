"""Random checkpoints in the real on-disk format, of any geometry: Kimi K2.x targets and DFlash drafters.

What is written follows the loader's plan; that the names are right is for Hugging Face to say. Every tensor is
random and none is neutral: norms differ from 1, the router bias from 0, and INT4 codes reach -8.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kimi_fx.checkpoint.configs import read_drafter, read_target
from kimi_fx.graphs.params import Leaf, Source, drafter_plan, target_plan
from kimi_fx.graphs.pytree import tree_leaves

QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}  # fmt: skip


def target_config(**changes: Any) -> dict[str, Any]:
    """A text config that differs from Kimi's in every number a graph could have hard-coded, but latent and rope."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 320,
        "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 2, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 192, "moe_intermediate_size": 64,
        "n_routed_experts": 40, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.75, "num_nextn_predict_layers": 0,
        "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 48, "qk_rope_head_dim": 64,
        "v_head_dim": 24, "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 16.0,
            "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.75,
        },
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 317, "eos_token_id": 318,
        "pad_token_id": 319, "dtype": "bfloat16", "quantization_config": QUANTISATION,
    } | changes  # fmt: skip


def drafter_config(**changes: Any) -> dict[str, Any]:
    """A drafter of `target_config()`, one sliding layer and one full."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 128,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48,
        "rope_theta": 20000.0, "rope_scaling": None, "max_position_embeddings": 2048, "block_size": 6,
        "num_target_layers": 4, "dtype": "bfloat16",
        "dflash_config": {"target_layer_ids": [2, 0, 3], "mask_token_id": 316},
    } | changes  # fmt: skip


def write_target(
    folder: Path,
    config: dict[str, Any],
    seed: int = 0,
    wrapped: bool = True,  # nested config and prefixed names, as K2.5 and K2.6 have them
    files: int = 2,  # shards; one is written without an index
    latent: float = 0.01,  # root mean square of q_a's and kv_a's latents, before their norms
) -> dict[str, Tensor]:
    """Write config and shards; returns the tensors as written, by their names on disk."""
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": config,
    }
    _write_config(folder, wrapper | {"tie_word_embeddings": False} if wrapped else config)
    model = read_target(folder, None)
    tensors = _random(target_plan(model), seed)
    for name, tensor in tensors.items():
        if name.endswith("q_a_proj.weight"):
            tensor *= latent
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensor[: model.L] *= latent
    prefix = "language_model." if wrapped else ""
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    write_shards(folder, named, files)
    return named


def write_drafter(
    folder: Path, config: dict[str, Any], target: Path, seed: int = 0, prefix: str = ""
) -> dict[str, Tensor]:
    """Write a drafter for the target in another folder; returns the tensors as written."""
    _write_config(folder, config)
    model = read_drafter(folder, read_target(target, None), None, None)
    named = {prefix + name: tensor for name, tensor in _random(drafter_plan(model), seed).items()}
    write_shards(folder, named, 1)
    return named


def write_shards(folder: Path, tensors: dict[str, Tensor], files: int) -> None:
    """The tensors spread over `files` shards, with an index if there are several."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards = [f"model-{i + 1:05}-of-{files:06}.safetensors" for i in range(files)]
    index = {name: shards[i * files // len(tensors)] for i, name in enumerate(tensors)}
    for shard in shards:
        held = {name: tensor for name, tensor in tensors.items() if index[name] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _random(plan: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for leaf in tree_leaves(plan):
        for source in leaf.sources:
            if source.name in tensors:
                continue
            tensors[source.name] = _draw(leaf, source, generator)
            if leaf.init == "words":
                rows, words = source.shape
                shape = torch.tensor([rows, 8 * words], dtype=torch.int32)
                tensors[source.name.replace("weight_packed", "weight_shape")] = shape
    return tensors


def _draw(leaf: Leaf, source: Source, generator: torch.Generator) -> Tensor:
    """Sized so that activations stay near 1 and router scores spread."""
    if leaf.init == "words":
        return torch.randint(-(2**31), 2**31, source.shape, generator=generator, dtype=torch.int32)
    if leaf.init == "scales":  # of codes that deviate by 4.6, over 32 inputs a scale
        size = (source.shape[-1] * 32) ** -0.5 / 4.6
        return (size * (0.5 + torch.rand(source.shape, generator=generator))).to(leaf.stored)
    noise = torch.randn(source.shape, generator=generator)
    if leaf.init == "ones":
        return (1 + 0.2 * noise).to(leaf.stored)
    if source.name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    size = 1.0 if "embed_tokens" in source.name else source.shape[-1] ** -0.5
    return (size * noise).to(leaf.stored)
