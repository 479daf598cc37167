"""config.json -> geometry: spellings, values of the family, and every refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kimi_fx.checkpoint import CheckpointError, read_drafter, read_target
from kimi_fx.config import DrafterModel, TargetModel
from oracles.write_checkpoint import QUANTISATION, drafter_config, target_config

CONF = Path(__file__).parents[2] / "conf"
YARN = target_config()["rope_scaling"]


def target(folder: Path, config: dict[str, Any], eps: float | None = None) -> TargetModel:
    (folder / "config.json").write_text(json.dumps(config))
    return read_target(folder, eps)


def drafter(folder: Path, window: int | None = None, amplitude: float | None = None, **changes: Any) -> DrafterModel:
    model = target(folder, target_config())
    (folder / "config.json").write_text(json.dumps(drafter_config(**changes)))
    return read_drafter(folder, model, window, amplitude)


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": drafter_config()["dflash_config"] | changes}


def test_kimi_k2_6() -> None:
    m = read_target(CONF / "target" / "kimi_k2_6", None)
    assert (m.layers, m.dense_layers, m.D, m.H, m.V, m.E, m.K, m.I) == (61, 1, 7168, 64, 163840, 384, 8, 2048)
    assert (m.nope, m.R, m.value, m.q_lora, m.L, m.dense, m.row) == (128, 64, 128, 1536, 512, 18432, 576)
    assert m.routed_scale == 2.827 and m.norm_eps == m.lora_norm_eps == 1e-5
    assert m.rope.factor == 64 and m.rope.beta_fast == 32 and m.rope.amplitude == 1.0
    assert m.softmax_scale == pytest.approx(0.1446796258, abs=1e-10)
    assert m.max_position == 262144
    d = read_drafter(CONF / "drafter" / "kimi_k2_6_dflash", m, None, None)
    assert (d.layers, d.D, d.H, d.KV, d.head, d.inner, d.block) == (6, 7168, 64, 8, 128, 18432, 8)
    assert d.taps == (1, 12, 24, 35, 47, 58) and d.mask_id == 163838 and d.rope.amplitude == 1.0


def test_nested_and_top_level_agree(tmp_path: Path) -> None:
    text = target_config()
    plain = target(tmp_path, text)
    wrapper = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 9}}
    assert target(tmp_path, wrapper) == plain
    bare = {key: value for key, value in text.items() if key != "quantization_config"}
    assert target(tmp_path, {**wrapper, "text_config": bare, "quantization_config": QUANTISATION}) == plain
    assert target(tmp_path, text | {"model_type": "deepseek_v3"}) == plain


def test_all_rope_spellings_agree(tmp_path: Path) -> None:
    plain = target(tmp_path, target_config())
    new = {key: value for key, value in YARN.items() if key != "type"} | {"rope_type": "yarn"}
    inside = new | {"rope_theta": 10000.0}
    for rope in (
        {"rope_scaling": new},
        {"rope_scaling": None, "rope_parameters": inside, "rope_theta": None},
        {"rope_scaling": None, "rope_parameters": YARN},
        {"rope_scaling": inside, "rope_theta": None},
    ):
        assert target(tmp_path, target_config(**rope)) == plain
    none = target(tmp_path, target_config(rope_scaling=None)).rope
    assert none == target(tmp_path, target_config(rope_scaling={"rope_type": "default"})).rope
    assert (none.theta, none.factor, none.amplitude) == (10000.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "extra",
    [{}, {"mscale": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.4},
     {"mscale": 1.0, "mscale_all_dim": 0.0}, {"attention_factor": 1.3}],
)  # fmt: skip
def test_amplitude_is_transformers(tmp_path: Path, extra: dict[str, float]) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256} | extra
    config = target_config(rope_scaling=yarn)
    hugging = DeepseekV3Config(**config | {"model_type": "deepseek_v3"})
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](hugging, torch.device("cpu"))
    assert target(tmp_path, config).rope.amplitude == pytest.approx(factor)
    assert drafter(tmp_path, rope_scaling=yarn).rope.amplitude == pytest.approx(factor)
    assert drafter(tmp_path, None, 1.25, rope_scaling=yarn).rope.amplitude == 1.25


def test_epsilons(tmp_path: Path) -> None:
    m = target(tmp_path, target_config(rms_norm_eps=1e-3), 1e-6)
    assert (m.norm_eps, m.lora_norm_eps) == (1e-3, 1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_group", 8), ("topk_group", 4), ("scoring_func", "softmax"), ("topk_method", "greedy"),
        ("norm_topk_prob", False), ("tie_word_embeddings", True), ("attention_bias", True), ("moe_layer_freq", 2),
        ("num_nextn_predict_layers", 1), ("hidden_act", "gelu"), ("q_lora_rank", None), ("model_type", "llama"),
        ("hidden_size", 100), ("hidden_size", "128"), ("hidden_size", True), ("num_experts_per_tok", 41),
        ("first_k_dense_replace", 5), ("first_k_dense_replace", -1),
        ("rms_norm_eps", 0.0), ("routed_scaling_factor", float("nan")), ("qk_rope_head_dim", 63),
    ],
)  # fmt: skip
def test_target_refuses(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{key}"):
        target(tmp_path, target_config(**{key: value}))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear", "factor": 2.0}, "rope type 'linear'"),
        ({"type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        (YARN | {"factor": 0.5}, "factor is 0.5"),
        (YARN | {"truncate": False}, "truncate"),
        ({"full_attention": YARN}, "full_attention alone"),
        (YARN | {"mscale": "1"}, "mscale is '1', not a number of at least 0"),
        (YARN | {"mscale_all_dim": True}, "mscale_all_dim is True"),
        (YARN | {"attention_factor": float("nan")}, "attention_factor is nan, not a number above 0"),
        ([YARN], "rope_scaling is .*, not an object"),
    ],
)
def test_rope_refuses(tmp_path: Path, rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        target(tmp_path, target_config(rope_scaling=rope))


def weights(**changes: Any) -> dict[str, Any]:
    group = QUANTISATION["config_groups"]["group_0"]  # type: ignore[index]
    return QUANTISATION | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "missing"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8.*e4m3"),
        (QUANTISATION | {"format": "int-quantized"}, "int-quantized"),
        (QUANTISATION | {"config_groups": {}}, "0 config_groups"),
        (weights(num_bits=8), "num_bits 8"),
        (weights(group_size=128, symmetric=False), "symmetric False.*group_size 128"),
        (weights(actorder="group"), "actorder 'group'"),
    ],
)
def test_quantisation_refuses(tmp_path: Path, config: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message + ".*load as pack-quantized INT4 in symmetric groups of 32"):
        target(tmp_path, target_config(quantization_config=config))


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    config = target_config(n_group=8, hidden_act="gelu", rope_theta=None)
    del config["vocab_size"], config["kv_lora_rank"]
    with pytest.raises(CheckpointError) as error:
        target(tmp_path, config)
    for word in (
        "n_group",
        "hidden_act",
        "rope_theta",
        "2 keys are missing or null: vocab_size, kv_lora_rank",
    ):
        assert word in str(error.value)


def test_drafter_layers(tmp_path: Path) -> None:
    assert drafter(tmp_path).windows == (48, 0) and drafter(tmp_path).causal == (True, False)
    assert drafter(tmp_path, 16).windows == (16, 16) and drafter(tmp_path, 64).windows == (48, 64)
    assert drafter(tmp_path, 16).causal == (True, False)
    assert drafter(tmp_path, layer_types=None).windows == (0, 0)
    assert drafter(tmp_path, is_causal=True, **dflash(causal=False)).causal == (True, True)
    assert drafter(tmp_path, **dflash(causal=False)).causal == (False, False)
    swa = drafter(tmp_path, layer_types=None, **dflash(use_swa=True, swa_window_size=32))
    assert swa.windows == (32, 32) and swa.causal == (False, False)


def test_drafter_geometry(tmp_path: Path) -> None:
    d = drafter(tmp_path)
    assert (d.layers, d.D, d.H, d.KV, d.head, d.inner, d.block) == (2, 128, 4, 2, 32, 160, 6)
    assert d.taps == (2, 0, 3) and d.mask_id == 316 and d.norm_eps == 1e-6 and d.rope.theta == 20000.0
    assert drafter(tmp_path, block_size=None, **dflash(block_size=5)).block == 5
    assert drafter(tmp_path, block_size=6, **dflash(block_size=5)).block == 5
    moved = {"target_layer_ids": [1, 3], "mask_token_id": 4, "dflash_config": {}}
    assert drafter(tmp_path, **moved).taps == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": None}, "architectures is None"),
        (dflash(target_layer_ids=None), "target_layer_ids"),
        (dflash(target_layer_ids=[]), "layers are 0 to 3"),
        (dflash(target_layer_ids=[0, 4]), r"\[0, 4\].*0 to 3"),
        (dflash(target_layer_ids=[-1, 2]), r"\[-1, 2\].*0 to 3"),
        (dflash(target_layer_ids=[1, 1]), r"\[1, 1\] repeats.*0 to 3"),
        (dflash(target_layer_ids=[1.0]), "0 to 3"),
        (dflash(mask_token_id=None), "mask_token_id"),
        (dflash(mask_token_id=320), "mask_token_id is 320.*0 to 319"),
        ({"hidden_size": 256}, "hidden_size is 256, the target has 128"),
        ({"vocab_size": 321}, "vocab_size is 321, the target has 320"),
        ({"num_target_layers": 61}, "num_target_layers is 61, the target has 4"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_key_value_heads": 3}, "4 heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"sliding_window": None}, "sliding_window"),
        (dflash(use_swa=True), "swa_window_size"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (dflash(attention_sink_bias=True), "attention_sink_bias"),
        (dflash(attention_value_scale=2.0), "attention_value_scale"),
        ({"is_neox_style": False}, "is_neox_style"),
        (dflash(projector_type="domino"), "projector_type"),
        (dflash(shift_label=True), "shift_label"),
        ({"markov_rank": 4}, "markov_rank"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"selector_rank": 32}, "selector_rank.*DFlash 2"),
        ({"conv_kernel_size": 3}, "conv_kernel_size.*DFlash 2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"is_causal": "no"}, "is_causal is 'no', not true or false"),
        (dflash(causal=0), "causal is 0, not true or false"),
        (dflash(use_swa="false"), "use_swa is 'false', not true or false"),
        ({"dflash_config": [["block_size", 3]]}, "dflash_config is .*, not an object"),
    ],
)  # fmt: skip
def test_drafter_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        drafter(tmp_path, **changes)


def test_neutral_extras_load(tmp_path: Path) -> None:
    neutral = {
        "input_embedding_scale": 1.0,
        "final_logit_softcapping": None,
        "is_neox_style": True,
        "markov_rank": 0,
    }
    assert drafter(tmp_path, **neutral, **dflash(projector_type="dflash")) == drafter(tmp_path)


def test_window_below_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="drafter.window is 0"):
        drafter(tmp_path, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        ("{", "not JSON"),
        ("[1]", "a JSON list"),
        pytest.param("[" * 100_000, "config.json: not JSON (nested too deeply)", id="deep"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("<!DOCTYPE html><html>", "web page"),
    ],
)
def test_unreadable_config(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_target(tmp_path, None)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_target(tmp_path / "absent", None)
