"""Loaded leaves against the tensors on disk, compressed-tensors, and Hugging Face."""

import io
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from kimi_fx.bench.huggingface import huggingface
from kimi_fx.checkpoint import (
    CheckpointError,
    load,
    load_drafter,
    load_target,
    random_params,
    read_drafter,
    read_target,
)
from kimi_fx.graphs.params import Experts, TargetParams, drafter_plan, target_plan
from kimi_fx.graphs.pytree import tree_leaves, tree_map
from kimi_fx.ops.marlin import marlin_unpack, marlin_unpack_scales
from oracles.write_checkpoint import drafter_config, target_config, write_drafter, write_shards, write_target

NANO = Path(__file__).parents[2] / "kimi_fx" / "nano"
SMALL = target_config(n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=32)


def target(folder: Path, dtype: torch.dtype = torch.float32, progress: bool = False) -> TargetParams:
    return load_target(folder, read_target(folder, None), "cpu", dtype, progress)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("target")
    return folder, write_target(folder, SMALL)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(x is y is None or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in pairs)


def decompressed(tensors: dict[str, Tensor], name: str) -> Tensor:
    """compressed-tensors' own meaning of one packed matrix, [out, in] bf16."""
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    parts = {part: tensors[f"{name}.weight_{part}"] for part in ("packed", "scale", "shape")}
    state = {f"weight_{part}": tensor for part, tensor in parts.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"]


def test_every_leaf_equals_what_was_written(written: tuple[Path, dict[str, Tensor]]) -> None:
    folder, named = written
    on_disk = {name.removeprefix("language_model."): tensor for name, tensor in named.items()}
    params = target(folder, torch.bfloat16)
    assert torch.equal(params.embed, on_disk["model.embed_tokens.weight"])
    assert torch.equal(params.lm_head, on_disk["lm_head.weight"])
    assert torch.equal(params.norm, on_disk["model.norm.weight"])
    for i, layer in enumerate(params.layers):
        own = {n.removeprefix(f"model.layers.{i}."): t for n, t in on_disk.items() if f"layers.{i}." in n}
        a, attention = layer.attention, "self_attn."
        assert torch.equal(layer.attention.norm, own["input_layernorm.weight"])
        assert torch.equal(layer.norm, own["post_attention_layernorm.weight"])
        assert torch.equal(a.qkv_a[:64], own[attention + "q_a_proj.weight"])
        assert torch.equal(a.qkv_a[64:], own[attention + "kv_a_proj_with_mqa.weight"])
        assert torch.equal(a.q_a_norm, own[attention + "q_a_layernorm.weight"])
        assert torch.equal(a.kv_a_norm, own[attention + "kv_a_layernorm.weight"])
        assert torch.equal(a.q_b.reshape(-1, 64), own[attention + "q_b_proj.weight"])
        assert torch.equal(a.o.reshape(128, -1), own[attention + "o_proj.weight"])
        heads = own[attention + "kv_b_proj.weight"].split(48 + 24)  # keys then values, head by head
        assert torch.equal(a.w_uk, torch.stack([head[:48] for head in heads]))
        assert torch.equal(a.w_uv, torch.stack([head[48:] for head in heads]))
        mlp, at = (layer.mlp, "mlp.") if i < 2 else (layer.mlp.shared, "mlp.shared_experts.")
        assert torch.equal(mlp.gate_up[0], own[at + "gate_proj.weight"])
        assert torch.equal(mlp.gate_up[1], own[at + "up_proj.weight"])
        assert torch.equal(mlp.down, own[at + "down_proj.weight"])
        if i >= 2:
            assert torch.equal(layer.mlp.router, own["mlp.gate.weight"])
            assert torch.equal(layer.mlp.bias, own["mlp.gate.e_score_correction_bias"])
            for e in range(4):
                gate, up, down = (decompressed(own, f"mlp.experts.{e}.{n}_proj") for n in ("gate", "up", "down"))
                assert torch.equal(layer.mlp.experts.w13[e], torch.cat((gate, up)).T)
                assert torch.equal(layer.mlp.experts.w2[e], down.T)


def test_dtypes_and_storage(written: tuple[Path, dict[str, Tensor]]) -> None:
    params, half = target(written[0]), target(written[0], torch.bfloat16)
    for leaf in tree_leaves(params) + tree_leaves(half):
        if leaf is not None:
            assert leaf.is_contiguous() and leaf.untyped_storage().nbytes() == leaf.nbytes
    for layer in params.layers + half.layers:
        if hasattr(layer.mlp, "router"):
            assert layer.mlp.bias.dtype == torch.float32
    assert half.inv_freq.dtype == torch.float32 and half.embed.dtype == torch.bfloat16
    wide = tree_map(lambda t: t.float() if t is not None and t.is_floating_point() else t, half)
    assert equal(wide, params)  # one rounding, that of bf16


def test_leaves_do_not_follow_the_file(tmp_path: Path, written: tuple[Path, dict[str, Tensor]]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written[0], folder)
    params = target(folder)
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.write(bytes(file.stat().st_size))
    assert equal(params, target(written[0]))


def test_unwrapped_equals_wrapped(tmp_path: Path, written: tuple[Path, dict[str, Tensor]]) -> None:
    write_target(tmp_path, SMALL, wrapped=False, files=1)
    assert equal(target(tmp_path), target(written[0]))


def test_weight_shape(tmp_path: Path, written: tuple[Path, dict[str, Tensor]]) -> None:
    shutil.copy(written[0] / "config.json", tmp_path)
    tensors = {n: t.long() if n.endswith("weight_shape") else t for n, t in written[1].items()}
    write_shards(tmp_path, tensors, 1)
    assert equal(target(tmp_path), target(written[0]))  # int64, as compressed-tensors itself writes
    for e in (1, 3):
        tensors[f"language_model.model.layers.2.mlp.experts.{e}.up_proj.weight_shape"] = torch.tensor([64, 120])
    write_shards(tmp_path, tensors, 1)
    with pytest.raises(CheckpointError, match=r"2 weight_shape.*experts\.1\.up.*\[64, 120\] in place of \[64, 128\]"):
        target(tmp_path)


def test_int4_on_the_shipped_checkpoint() -> None:
    params = target(NANO / "kimi-nano")
    index = json.loads((NANO / "kimi-nano" / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in set(index.values()):
        tensors |= load.safe_open(NANO / "kimi-nano" / file, "pt").__enter__().get_tensors()
    for i in range(1, 6):
        for e in (0, 13, 31):
            at = f"language_model.model.layers.{i}.mlp.experts.{e}."
            gate, up, down = (decompressed(tensors, f"{at}{name}_proj").float() for name in ("gate", "up", "down"))
            assert torch.equal(params.layers[i].mlp.experts.w13[e], torch.cat((gate, up)).T)
            assert torch.equal(params.layers[i].mlp.experts.w2[e], down.T)


def test_hugging_face_reads_the_same_weights(tmp_path: Path) -> None:
    write_target(tmp_path, target_config())
    params, model = target(tmp_path), huggingface(tmp_path)
    for ours, theirs in zip(params.layers, model.model.layers, strict=True):
        a, b = ours.attention, theirs.self_attn
        assert torch.equal(a.qkv_a, torch.cat((b.q_a_proj.weight, b.kv_a_proj_with_mqa.weight)))
        assert torch.equal(torch.cat((a.w_uk, a.w_uv), 1).flatten(0, 1), b.kv_b_proj.weight)
        assert torch.equal(a.q_b.flatten(0, 1), b.q_b_proj.weight)
        assert torch.equal(a.o.flatten(1), b.o_proj.weight)
        assert torch.equal(a.q_a_norm, b.q_a_layernorm.weight) and torch.equal(a.kv_a_norm, b.kv_a_layernorm.weight)
        assert b.kv_a_layernorm.variance_epsilon == b.q_a_layernorm.variance_epsilon == 1e-5
    for ours, theirs in zip(params.layers[2:], model.model.layers[2:], strict=True):
        assert torch.equal(ours.mlp.experts.w13.transpose(1, 2), theirs.mlp.experts.gate_up_proj)
        assert torch.equal(ours.mlp.experts.w2.transpose(1, 2), theirs.mlp.experts.down_proj)
        assert torch.equal(ours.mlp.router, theirs.mlp.gate.weight)
        assert torch.equal(ours.mlp.bias, theirs.mlp.gate.e_score_correction_bias)
    assert torch.equal(params.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_drafter_leaves(tmp_path: Path, written: tuple[Path, dict[str, Tensor]], prefix: str) -> None:
    named = write_drafter(tmp_path, drafter_config(), written[0], prefix=prefix)
    on_disk = {name.removeprefix(prefix): tensor.float() for name, tensor in named.items()}
    model = read_drafter(tmp_path, read_target(written[0], None), None, None)
    params = load_drafter(tmp_path, model, "cpu", torch.float32, False)
    assert torch.equal(params.fc, on_disk["fc.weight"]) and torch.equal(params.norm, on_disk["norm.weight"])
    assert torch.equal(params.feature_norm, on_disk["hidden_norm.weight"])
    for i, layer in enumerate(params.layers):
        own = {name.removeprefix(f"layers.{i}."): t for name, t in on_disk.items() if f"layers.{i}." in name}
        assert torch.equal(params.kv[i, 0].flatten(0, 1), own["self_attn.k_proj.weight"])
        assert torch.equal(params.kv[i, 1].flatten(0, 1), own["self_attn.v_proj.weight"])
        assert torch.equal(params.k_norm[i], own["self_attn.k_norm.weight"])
        assert torch.equal(layer.q.flatten(0, 1), own["self_attn.q_proj.weight"])
        assert torch.equal(layer.o.flatten(1), own["self_attn.o_proj.weight"])
        assert torch.equal(layer.q_norm, own["self_attn.q_norm.weight"])
        assert torch.equal(layer.attention_norm, own["input_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, own["post_attention_layernorm.weight"])
        assert torch.equal(layer.mlp.gate_up[1], own["mlp.up_proj.weight"])
        assert torch.equal(layer.mlp.down, own["mlp.down_proj.weight"])


def test_a_faulty_folder_is_refused_before_loading(tmp_path: Path, written: tuple[Path, dict[str, Tensor]]) -> None:
    shutil.copy(written[0] / "config.json", tmp_path)
    tensors = dict(written[1])
    del tensors["language_model.model.layers.3.mlp.experts.2.down_proj.weight_packed"]
    write_shards(tmp_path, tensors, 2)
    with pytest.raises(CheckpointError, match=r"1 tensors missing:\s+language_model\.model\.layers\.3\.mlp\.exp"):
        target(tmp_path)


def test_packed_shapes_away_from_the_cpu() -> None:
    E, D, inner = 40, 128, 64
    words, scales = (torch.zeros(E, 2, inner, D // n, dtype=d) for n, d in ((8, torch.int32), (32, torch.bfloat16)))
    down, down_scales = torch.zeros(E, D, inner // 8, dtype=torch.int32), torch.zeros(E, D, inner // 32)
    packed = load.pack_experts(Experts(words, scales, down, down_scales), torch.bfloat16, "meta")
    assert packed.w13.shape == (E, D // 16, 4 * inner) and packed.s13.shape == (E, D // 32, 2 * inner)
    assert packed.w2.shape == (E, inner // 16, 2 * D) and packed.s2.shape == (E, inner // 32, D)
    assert packed.w13.device.type == "meta"


@pytest.mark.gpu
def test_packed_on_cuda(written: tuple[Path, dict[str, Tensor]]) -> None:
    folder, named = written
    params = load_target(folder, read_target(folder, None), "cuda", torch.bfloat16, False)
    at = "language_model.model.layers.3.mlp.experts."
    experts = params.layers[3].mlp.experts
    for e in range(4):
        gate, up, down = (
            [named[f"{at}{e}.{name}_proj.weight_{part}"] for part in ("packed", "scale")]
            for name in ("gate", "up", "down")
        )
        assert torch.equal(marlin_unpack(experts.w13.cpu())[e], torch.cat((gate[0], up[0])))
        assert torch.equal(marlin_unpack_scales(experts.s13.cpu())[e], torch.cat((gate[1], up[1])))
        assert torch.equal(marlin_unpack(experts.w2.cpu())[e], down[0])
        assert torch.equal(marlin_unpack_scales(experts.s2.cpu())[e], down[1])


def test_random_params(written: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    model = read_target(written[0], None)
    plan = target_plan(model)
    loaded = target(written[0])
    one, again, other = (random_params(plan, seed, "cpu", torch.float32) for seed in (1, 1, 2))
    assert equal(one, again) and not equal(one.embed, other.embed)
    assert not equal(one.layers[2].mlp.experts, other.layers[2].mlp.experts)
    for x, y in zip(tree_leaves(one), tree_leaves(loaded), strict=True):
        assert x is y is None or (x.shape == y.shape and x.dtype == y.dtype and x.isfinite().all())
    assert torch.equal(one.inv_freq, loaded.inv_freq)
    assert 0.015 < one.layers[3].mlp.experts.w13.std() < 0.025
    write_drafter(tmp_path, drafter_config(), written[0])
    drafter = read_drafter(tmp_path, model, None, None)
    tree = random_params(drafter_plan(drafter), 0, "cpu", torch.bfloat16)
    assert tree.kv.shape == (2, 2, 2, 32, 128) and tree.kv.dtype == torch.bfloat16


def test_progress_goes_to_stderr(
    written: tuple[Path, dict[str, Tensor]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target(written[0])
    assert capsys.readouterr() == ("", "")
    target(written[0], progress=True)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "loaded 0.00 GB in" in err and "GB/s" in err
    monkeypatch.setattr(load, "LINE_SECONDS", 0.0)
    target(written[0], progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 10 and all("s left, model-0000" in line for line in lines[:-1])


def test_progress_on_a_terminal(written: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(load, "tqdm", partial(load.tqdm, mininterval=0.0, ncols=120))
    target(written[0], progress=True)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "/2.44MB [" in shown and "B/s], model-00002-of-000002.safetensors" in shown
    assert shown.count("\n") == 1 and "loaded 0.00 GB in" in shown


def test_each_file_is_opened_once(written: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = load.safe_open
    monkeypatch.setattr(load, "safe_open", lambda file, **kind: opened.append(file.name) or real(file, **kind))
    target(written[0])
    assert sorted(opened) == sorted(file.name for file in written[0].glob("*.safetensors"))
