"""A checkpoint's `config.json` as the geometry the graphs close over.

Accepts Kimi K2.x text models (nested in `text_config` or not) and DFlash drafters, with both spellings of
the rope settings. Everything the graphs do not do is refused by name, all problems in one message. Reads no
tensors, no tokenizer and no `generation_config.json`.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from ..config import DrafterModel, TargetModel
from .fields import (
    ANY,
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    SIZE,
    Json,
    differing,
    is_kind,
    malformed,
    malformed_if_given,
    read_rope,
    rope_problems,
)
from .files import CheckpointError, read_json, refuse

GROUP = 32  # inputs that share one INT4 scale
TARGET_TYPES = ("kimi_k2", "kimi_k25", "deepseek_v3")
TARGET_KEYS = {
    "num_hidden_layers": SIZE, "first_k_dense_replace": COUNT, "hidden_size": SIZE,
    "num_attention_heads": SIZE, "vocab_size": SIZE, "qk_nope_head_dim": SIZE, "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE, "q_lora_rank": SIZE, "kv_lora_rank": SIZE, "intermediate_size": SIZE,
    "n_routed_experts": SIZE, "num_experts_per_tok": SIZE, "moe_intermediate_size": SIZE,
    "n_shared_experts": SIZE, "routed_scaling_factor": NUMBER, "rms_norm_eps": NUMBER,
    "max_position_embeddings": SIZE, "n_group": ANY, "topk_group": ANY, "norm_topk_prob": ANY,
}  # fmt: skip
DRAFTER_KEYS = {
    "num_hidden_layers": SIZE, "hidden_size": SIZE, "num_attention_heads": SIZE, "num_key_value_heads": SIZE,
    "head_dim": SIZE, "intermediate_size": SIZE, "rms_norm_eps": NUMBER, "max_position_embeddings": SIZE,
    "block_size": SIZE, "target_layer_ids": ANY, "mask_token_id": ANY,
}  # fmt: skip
DRAFTER_FLAGS = {"is_causal": FLAG, "causal": FLAG, "use_swa": FLAG}  # may be absent
# The one value the graphs implement. An absent key is taken to agree.
TARGET_FIXED = {
    "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
DRAFTER_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "input_embedding_scale": 1, "output_multiplier": 1,
    "final_logit_softcapping": 0, "attention_sink_bias": False, "attention_value_scale": 1,
    "is_neox_style": True, "projector_type": "dflash", "shift_label": False, "markov_rank": 0,
    "sample_from_anchor": False,
}  # fmt: skip
DFLASH2 = ("selector_", "conv_")  # how the keys of DFlash 2 begin
INT4 = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
    "dynamic": False, "actorder": None,
}  # fmt: skip


P = ParamSpec("P")
M = TypeVar("M")


def understood(read: Callable[Concatenate[Path, P], M]) -> Callable[Concatenate[Path, P], M]:
    """A reader of config.json whose CheckpointError also covers values of a kind it does not expect anywhere."""

    @wraps(read)
    def guarded(folder: Path, *args: P.args, **kwargs: P.kwargs) -> M:
        try:
            return read(folder, *args, **kwargs)
        except CheckpointError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
            kind = type(error).__name__
            what = f"a value is not of the expected kind ({kind}: {error})"
            raise CheckpointError(f"{folder}/config.json: {what}") from None

    return guarded


@understood
def read_target(
    folder: Path,
    lora_norm_eps: float | None,  # of the two latent norms; None: the checkpoint's rms_norm_eps
) -> TargetModel:
    """Geometry of a Kimi K2.x text model. Raises CheckpointError with everything missing or not supported."""
    where = f"{folder}/config.json"
    whole = read_json(folder / "config.json")
    refuse(where, malformed_if_given(whole, {"text_config": OBJECT, "quantization_config": OBJECT}))
    text = whole.get("text_config", whole)
    kinds = dict.fromkeys(config["model_type"] for config in (whole, text) if "model_type" in config)
    strange = [kind for kind in kinds if kind not in TARGET_TYPES]
    problems = [f"model_type {kind!r} is none of {', '.join(TARGET_TYPES)}" for kind in strange]
    refuse(where, problems if kinds else ["model_type is missing"])
    problems = malformed(text, TARGET_KEYS) + differing(whole | text, TARGET_FIXED) + rope_problems(text)
    problems += _quantisation_problems(text.get("quantization_config") or whole.get("quantization_config"))
    refuse(where, problems)
    eps = float(text["rms_norm_eps"])
    model = TargetModel(
        layers=text["num_hidden_layers"],
        dense_layers=text["first_k_dense_replace"],
        D=text["hidden_size"],
        H=text["num_attention_heads"],
        V=text["vocab_size"],
        nope=text["qk_nope_head_dim"],
        R=text["qk_rope_head_dim"],
        value=text["v_head_dim"],
        q_lora=text["q_lora_rank"],
        L=text["kv_lora_rank"],
        dense=text["intermediate_size"],
        E=text["n_routed_experts"],
        K=text["num_experts_per_tok"],
        I=text["moe_intermediate_size"],
        shared=text["n_shared_experts"],
        routed_scale=float(text["routed_scaling_factor"]),
        norm_eps=eps,
        lora_norm_eps=eps if lora_norm_eps is None else lora_norm_eps,
        rope=read_rope(text),
        max_position=text["max_position_embeddings"],
        group=GROUP,
    )
    refuse(where, _contradictions(model))
    return model


@understood
def read_drafter(
    folder: Path,
    target: TargetModel,
    window: int | None,  # context tokens a slot sees at most; None: as each layer says
    rope_amplitude: float | None,  # on cos and sin; None: from the rope settings
) -> DrafterModel:
    """Geometry of a DFlash drafter for `target`. Raises CheckpointError as `read_target` does.

    `dflash_config` goes before the top level, wherever a key is in both.
    """
    where = f"{folder}/config.json"
    config = read_json(folder / "config.json")
    refuse(where, malformed_if_given(config, {"dflash_config": OBJECT}))
    config |= config.get("dflash_config") or {}
    if config.get("architectures") != ["DFlashDraftModel"]:
        found = config.get("architectures")
        refuse(where, [f"architectures is {found}, only ['DFlashDraftModel'] is supported"])
    problems = malformed(config, DRAFTER_KEYS) + malformed_if_given(config, DRAFTER_FLAGS)
    problems += differing(config, DRAFTER_FIXED) + rope_problems(config)
    dflash2 = [key for key in config if key.startswith(DFLASH2) and config[key]]
    problems += [f"{key} is {config[key]!r}: DFlash 2 is not supported" for key in dflash2]
    refuse(where, problems)
    problems = _misfits(config, target) + _layer_problems(config)
    if window is not None and window < 1:
        problems.append(f"drafter.window is {window}, at least 1 is needed")
    refuse(where, problems)
    windows, causal = _masks(config, window)
    return DrafterModel(
        layers=config["num_hidden_layers"],
        D=config["hidden_size"],
        H=config["num_attention_heads"],
        KV=config["num_key_value_heads"],
        head=config["head_dim"],
        inner=config["intermediate_size"],
        norm_eps=float(config["rms_norm_eps"]),
        rope=read_rope(config, rope_amplitude),
        block=config["block_size"],
        mask_id=config["mask_token_id"],
        taps=tuple(config["target_layer_ids"]),
        windows=windows,
        causal=causal,
        max_position=config["max_position_embeddings"],
    )


def _quantisation_problems(config: Json | None) -> list[str]:
    """None for compressed-tensors' pack-quantized INT4 in symmetric groups of 32 inputs."""
    loads = f"experts load as pack-quantized INT4 in symmetric groups of {GROUP} (K2-Thinking, K2.5, K2.6)"
    if not config:
        return [f"quantization_config is missing; {loads}"]
    method = {key: config[key] for key in ("quant_method", "format", "fmt") if key in config}
    if method.get("quant_method") != "compressed-tensors" or method.get("format") != "pack-quantized":
        return [f"quantization_config is {method}; {loads}"]
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        return [f"quantization_config has {len(groups)} config_groups; {loads}"]
    weights = {"dynamic": False} | (groups[0].get("weights") or {})
    wrong = [f"{key} {weights.get(key)!r} in place of {INT4[key]!r}" for key in INT4 if weights.get(key) != INT4[key]]
    if groups[0].get("input_activations") is not None:
        wrong.append("quantized activations")
    return [f"quantization_config has {', '.join(wrong)}; {loads}"] if wrong else []


def _contradictions(m: TargetModel) -> list[str]:
    widths = {"hidden_size": m.D, "moe_intermediate_size": m.I}
    problems = [
        f"{key} is {n}, not a multiple of the INT4 group of {m.group}" for key, n in widths.items() if n % m.group
    ]
    if m.K > m.E:
        problems.append(f"num_experts_per_tok is {m.K}, of {m.E} experts")
    if m.dense_layers > m.layers:
        problems.append(f"first_k_dense_replace is {m.dense_layers}, of {m.layers} layers")
    if m.R % 2:
        problems.append(f"qk_rope_head_dim is {m.R}, an even number is needed")
    return problems


def _misfits(config: Json, target: TargetModel) -> list[str]:
    """Where a drafter does not fit the target it is loaded for."""
    same = {
        "hidden_size": target.D, "vocab_size": target.V, "draft_vocab_size": target.V,
        "num_target_layers": target.layers,
    }  # fmt: skip
    given = [key for key in same if config.get(key) is not None]
    problems = [f"{key} is {config[key]}, the target has {same[key]}" for key in given if config[key] != same[key]]
    mask, taps = config["mask_token_id"], config["target_layer_ids"]
    if not (is_kind(mask, COUNT) and mask < target.V):
        problems.append(f"mask_token_id is {mask!r}, the target's ids are 0 to {target.V - 1}")
    if not isinstance(taps, list) or not taps or not all(is_kind(t, COUNT) and t < target.layers for t in taps):
        problems.append(f"target_layer_ids is {taps!r}, the target's layers are 0 to {target.layers - 1}")
    elif len(set(taps)) < len(taps):
        problems.append(f"target_layer_ids {taps} repeats a layer, each of 0 to {target.layers - 1} may be there once")
    return problems


def _layer_problems(config: Json) -> list[str]:
    """What is wrong with the drafter's heads and its layers' kinds."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    heads, kv, head = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    problems = []
    if heads % kv or head % 2:
        problems.append(f"{heads} heads of {head} cannot share {kv} key/value heads, or rotate in halves")
    if config.get("use_swa"):
        problems += malformed(config, {"swa_window_size": SIZE})
    if kinds is None:
        return problems
    if not isinstance(kinds, list) or len(kinds) != layers:
        return [*problems, f"layer_types is {kinds!r}, a list of {layers} is needed, one for each layer"]
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        problems.append(f"layer_types has {unknown}, only full_attention and sliding_attention are supported")
    if "sliding_attention" in kinds:
        problems += malformed(config, {"sliding_window": SIZE})
    return problems


def _masks(config: Json, cap: int | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window (0: none) and causality inside the block, of each layer.

    A sliding layer sees W tokens and is causal, a full one sees everything both ways. `use_swa` puts a window
    on every layer, `is_causal` or `causal` decides for every layer, and `cap` narrows every window.
    """
    sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or []]
    sliding = sliding or [False] * config["num_hidden_layers"]
    windows = [config["sliding_window"] if slides else 0 for slides in sliding]
    if config.get("use_swa"):
        windows = [config["swa_window_size"]] * len(windows)
    if cap is not None:
        windows = [min(window, cap) if window else cap for window in windows]
    decided = [config[key] for key in ("is_causal", "causal") if config.get(key) is not None]
    return tuple(windows), tuple([decided[0]] * len(sliding) if decided else sliding)
