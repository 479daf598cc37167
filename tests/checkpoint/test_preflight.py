"""The plan against the files: published byte counts, and every mismatch in one message."""

from math import prod
from pathlib import Path

import pytest
import torch

from kimi_fx.checkpoint import CheckpointError, inspect, read_drafter, read_target
from kimi_fx.checkpoint.files import Entry, read_entries
from kimi_fx.checkpoint.preflight import DRAFTER, TARGET, Report, check, needed, plan_bytes
from kimi_fx.graphs.params import Leaf, drafter_plan, target_plan
from kimi_fx.graphs.pytree import tree_leaves
from oracles.write_checkpoint import drafter_config, target_config, write_drafter, write_target

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
MODEL = target_config(n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, MODEL)
    return folder


@pytest.fixture
def entries(folder: Path) -> dict[str, Entry]:
    return read_entries(folder)


def checked(folder: Path, entries: dict[str, Entry]) -> Report:
    return check(target_plan(read_target(folder, None)), entries, TARGET, str(folder))


def refused(folder: Path, entries: dict[str, Entry]) -> str:
    with pytest.raises(CheckpointError) as error:
        checked(folder, entries)
    return str(error.value)


def entry(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Entry:
    return Entry(Path("model.safetensors"), dtype, shape, 0, prod(shape) * dtype.itemsize)


def test_kimi_k2_6_bytes() -> None:
    """Published: 554.27 GiB with 0.94 GB of vision; a rank of eight and one of its layers follow from shapes."""
    plan = target_plan(read_target(CONF / "target" / "kimi_k2_6", None))
    tensors = list(needed(plan))
    assert len(tensors) == len({tensor.name for tensor in tensors}) == 208_215
    assert plan_bytes(plan) == 594_205_904_896
    assert sum(tensor.bytes for tensor in tensors if tensor.name.endswith("weight_shape")) == 552_960

    def rank(part: object) -> int:
        leaves: list[Leaf] = [leaf for leaf in tree_leaves(part) if leaf.sources]
        return sum(prod(leaf.shape) * leaf.stored.itemsize // (8 if "tp" in leaf.axes else 1) for leaf in leaves)

    layer = plan.layers[1]
    assert rank(plan) == 76_182_593_536
    assert rank(layer) == 1_257_408_000
    assert rank(layer.attention) + rank(layer.norm) == 51_806_208
    assert rank(layer.mlp.experts) == 1_189_085_184
    assert rank(layer.mlp.shared) == 11_010_048
    assert rank(plan.layers[0].mlp) == 99_090_432


def test_kimi_k2_6_drafter_parameters() -> None:
    model = read_target(CONF / "target" / "kimi_k2_6", None)
    plan = drafter_plan(read_drafter(CONF / "drafter" / "kimi_k2_6_dflash", model, None, None))
    assert plan_bytes(plan) == 2 * 3_479_277_056
    assert len(list(needed(plan))) == 69


def test_report(folder: Path, entries: dict[str, Entry]) -> None:
    entries["vision_tower.blocks.0.weight"] = entry(2)
    entries["language_model.mm_projector.proj.0.weight"] = entry(2)
    entries["language_model.model.layers.1.self_attn.rotary_emb.inv_freq"] = entry(56)
    report = checked(folder, entries)
    assert report.prefix == "language_model."
    assert report.skipped == {"vision_tower.": 1, "mm_projector.": 1, "rotary_emb.inv_freq": 1}
    assert report.bytes == plan_bytes(target_plan(read_target(folder, None)))


def test_missing_are_grouped(folder: Path, entries: dict[str, Entry]) -> None:
    lost = [name for name in entries if ".experts." in name and "layers.3" in name]
    for name in lost + ["language_model.lm_head.weight"]:
        del entries[name]
    lines = refused(folder, entries).splitlines()
    assert "37 tensors missing" in lines[0] and "1 problems" not in lines[0]
    assert len(lines) == 1 + 9 + 1  # three projections of words, scales and shapes; the head
    assert any("4 x language_model.model.layers.*.mlp.experts.*.up_proj.weight_scale" in line for line in lines)
    assert "language_model.model.layers.3.mlp.experts.0.up_proj.weight_scale" in refused(folder, entries)


def test_everything_wrong_at_once(folder: Path, entries: dict[str, Entry]) -> None:
    root = "language_model.model.layers."
    entries[root + "0.self_attn.o_proj.weight"] = entry(128, 999)
    entries[root + "1.self_attn.q_a_proj.weight"] = entry(7, 128)
    entries[root + "2.self_attn.q_a_proj.weight"] = entry(7, 128)
    entries[root + "2.mlp.gate.e_score_correction_bias"] = entry(4)
    entries[root + "4.input_layernorm.weight"] = entry(128)
    entries["model.norm.weight"] = entry(128)  # without the prefix that all others have
    del entries["language_model.model.norm.weight"]
    message = refused(folder, entries)
    assert "4 problems" in message
    assert "1 tensors missing" in message and "2 tensors unexpected" in message
    assert "3 tensors of another shape than config.json says" in message
    assert "0.self_attn.o_proj.weight: [128, 999] on disk, [128, 384] wanted" in message
    assert "2 x language_model.model.layers.*.self_attn.q_a_proj.weight" in message
    assert "[7, 128] on disk, [64, 128] wanted" in message
    assert "e_score_correction_bias: torch.bfloat16 on disk, torch.float32 wanted" in message


def test_long_lists_are_cut(folder: Path, entries: dict[str, Entry]) -> None:
    for i in range(100):
        entries[f"odd_{i}"] = entry(1)
    message = refused(folder, entries)
    assert "100 tensors unexpected" in message and "70 more lines" in message and len(message.splitlines()) == 32


def test_quantised_attention_is_refused(folder: Path, entries: dict[str, Entry]) -> None:
    name = "language_model.model.layers.0.self_attn.o_proj.weight"
    entries[name + "_scale"] = entry(128, 12)
    entries[name + "_packed"] = entry(128, 48, dtype=torch.int32)
    del entries[name]
    assert "2 tensors unexpected" in refused(folder, entries)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_drafter_prefix_and_unclaimed_tensors(tmp_path: Path, folder: Path, prefix: str) -> None:
    write_drafter(tmp_path, drafter_config(), folder, prefix=prefix)
    plan = drafter_plan(read_drafter(tmp_path, read_target(folder, None), None, None))
    entries = read_entries(tmp_path) | {prefix + "rotary_emb.inv_freq": entry(16)}
    report = check(plan, entries, DRAFTER, str(tmp_path))
    assert report.prefix == prefix and report.skipped == {"rotary_emb.inv_freq": 1}
    for extra in (
        "layers.0.self_attn.q_proj.bias",
        "candidate_selector.successor_codebook",
        "vision_tower.x",
    ):
        with pytest.raises(CheckpointError, match="1 tensors unexpected"):
            check(plan, entries | {prefix + extra: entry(1)}, DRAFTER, str(tmp_path))


def test_inspect() -> None:
    nano = ROOT / "kimi_fx" / "nano"
    text = inspect(nano / "kimi-nano", nano / "kimi-nano-dflash", None, None, None)
    assert "2 files, 1,525 tensors, 22,579,584 bytes, names begin with language_model." in text
    assert "1 files, 36 tensors, 5,116,672 bytes" in text
    sizes = [int(line.split()[-2].replace(",", "")) for line in text.splitlines() if line.endswith(" bytes")]
    assert sum(sizes) == 22_579_584 + 2 * 5_116_672  # the drafter's own total has no prefix after it
    assert "rope.factor=4.0" in text and "taps=(1,2,3)" in text
    assert "drafter" not in inspect(nano / "kimi-nano", None, None, None, None)
