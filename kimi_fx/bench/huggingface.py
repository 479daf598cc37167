"""A Kimi checkpoint in Hugging Face transformers, fp32: an independent meaning of the format, and a peer in speed.

Needs the `test` extra; the import waits until it is asked for.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import read_json


def check_installed() -> None:
    """Raises ValueError where a package is missing that the model needs."""
    missing = [name for name in ("transformers", "compressed_tensors") if find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise ValueError(f"Hugging Face needs {names}: pip install 'kimi-fx[test]', or -e '.[test]' in a clone.")


def huggingface(folder: Path, lora_norm_eps: float | None = None) -> Any:
    """`DeepseekV3ForCausalLM` of a checkpoint folder, eager attention.

    The latent norms use `lora_norm_eps`, else the config's epsilon (transformers fixes them at 1e-6). Cast to fp32
    after loading, since experts decompress to bf16(q * scale) whatever dtype is asked for. AssertionError if any
    tensor was missing or left over.
    """
    model, notes = load(folder)
    assert not any(notes.values()), notes
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = model.config.rms_norm_eps if lora_norm_eps is None else lora_norm_eps
    return model.to(torch.float32).eval()


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model as transformers loads it, and what it has to say about the names."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    whole = read_json(folder / "config.json")
    settings = whole.get("text_config", whole) | {"model_type": "deepseek_v3"}
    loaded: Any = DeepseekV3ForCausalLM.from_pretrained(
        folder,
        config=DeepseekV3Config(**settings),
        attn_implementation="eager",
        dtype=torch.bfloat16,
        key_mapping={"^language_model\\.": ""},
        output_loading_info=True,
    )
    return loaded
