"""`bench step`: bytes and floors against hand-computed ones of Kimi K2.6's TP8 rank, and the whole flow on a CPU.

In the flow a tiny pair is traced but not compiled, and a clock and a trace stand in for the card's. Long because the
counts, the routing and the flow share that pair.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import kimi_fx.runtime.rounds
from kimi_fx.bench import mla, moe, rank, step, trace, work
from kimi_fx.bench.device import Rates
from kimi_fx.bench.routing import chances, expected_hits, router_bias
from kimi_fx.bench.trace import Kernel, shares
from kimi_fx.checkpoint.load import random_params
from kimi_fx.cli import main
from kimi_fx.compose import load_config
from kimi_fx.config import DrafterModel, Rope, TargetModel
from kimi_fx.graphs.params import drafter_plan
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.graphs.state import Model, Shape
from kimi_fx.graphs.step import ddtree_step
from kimi_fx.ops import KERNELS
from kimi_fx.runtime.compiled import signature

CARD = Rates(copy=4.3e12, read=4.3e12, matmul=790e12)
TINY = TargetModel(
    layers=2, dense_layers=1, D=64, H=2, V=80, nope=8, R=8, value=8, q_lora=16, L=16, dense=32, E=16, K=2, I=32,
    shared=1, routed_scale=1.5, norm_eps=1e-5, lora_norm_eps=1e-5, rope=Rope(1e4), max_position=512,
)  # fmt: skip
TINY_DRAFTER = DrafterModel(
    layers=2, D=64, H=2, KV=1, head=8, inner=32, norm_eps=1e-5, rope=Rope(1e4), block=4, mask_id=79, taps=(0,),
    windows=(0, 8), causal=(False, False), max_position=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def k26() -> Model:
    return step.geometry()[1]


def shape(nodes: int, batch: int = 1) -> Shape:
    return Shape(batch, nodes, 8, nodes - 1) if nodes > 1 else Shape(batch, 1, 1, 1)


def test_a_rank_of_eight(k26: Model) -> None:
    t, d = k26.target, k26.drafter
    assert (t.H, t.I, t.dense, t.V, t.D, t.E, t.layers) == (8, 256, 2304, 20480, 7168, 384, 61)
    assert (d.H, d.KV, d.inner, d.mask_id, len(d.taps)) == (8, 1, 2304, 20479, 1)
    assert rank.device_bytes(replace(k26, drafter=None), rank.Room(1, 1, 0)) == pytest.approx(76.2e9, rel=0.001)
    layers = 6 * (2 * 1024 + 256 + 3 * 2304) * 7168 * 2
    fc = 7168 * 7168 * 2  # of one tapped layer; an eighth of six is three quarters of it
    assert sum(map(work.leaf_bytes, tree_leaves(drafter_plan(d)))) == pytest.approx(layers + fc, rel=0.001)
    assert layers + 0.75 * fc == pytest.approx(0.87e9, rel=0.001)


def test_experts_cut_inside_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot share .*the expert width"):
        rank.share_of_target(TINY, 8)


def test_bytes_of_an_expert(k26: Model) -> None:
    assert work.expert_bytes(k26.target) == 1_835_008 + 229_376 + 917_504 + 114_688 == 3_096_576
    assert work.expert_bytes(k26.target) == moe.Shape(16, 256, "uniform").expert_bytes


@pytest.mark.parametrize(
    ("tokens", "hits", "floor_ms"),
    [(1, 8.0, 0.35), (8, 59.5, 2.6), (16, 109.8, 4.7), (32, 188.2, 8.1), (64, 284.2, 12.3)],
)
def test_floor_of_the_experts(k26: Model, tokens: int, hits: float, floor_ms: float) -> None:
    """60 layers, evenly routed: hits, and milliseconds at 4.3 TB/s."""
    assert expected_hits(chances("uniform", 384, 8), tokens) == pytest.approx(hits, abs=0.05)
    assert work.experts(k26.target, tokens, hits).floor(CARD) * 1e3 == pytest.approx(floor_ms, abs=0.05)
    assert work.experts(k26.target, tokens, hits).operations == 60 * moe.Shape(tokens, 256, "uniform").operations


@pytest.mark.parametrize(
    ("context", "nodes", "megabytes", "us"),
    [
        (1000, 16, 1.45, 0.4), (1000, 64, 2.34, 1.5), (5500, 1, 6.35, 1.5), (5500, 16, 6.63, 1.9),
        (5500, 32, 6.93, 3.9), (5500, 64, 7.52, 7.9), (32_000, 8, 37.0, 8.6), (32_000, 64, 38.1, 45.2),
        (200_000, 1, 230, 53.6), (200_000, 16, 231, 70.5), (200_000, 64, 232, 282),
    ],
)  # fmt: skip
def test_floor_of_attention(k26: Model, context: int, nodes: int, megabytes: float, us: float) -> None:
    """Of a layer; the larger of bytes at 4.3 TB/s and products at 790 TFLOP/s."""
    found = work.attention(k26.target, shape(nodes), context)
    assert found.bytes / 61e6 == pytest.approx(megabytes, rel=0.004)
    assert found.floor(CARD) / 61 * 1e6 == pytest.approx(us, abs=0.06, rel=0.002)
    peer = mla.Shape(1, context, nodes, 8)
    assert (found.bytes, found.operations) == (61 * peer.bytes, 61 * peer.operations)


def test_floor_of_the_rest(k26: Model) -> None:
    """Each matrix by hand, with one dense layer and the head's part of the vocabulary."""
    D, bf16 = 7168, 2
    attention = (2112 * D + 1536 * 1536 + 2 * 8 * 128 * 512 + D * 1024) * bf16
    layer = attention + 384 * D * bf16 + 3 * 256 * D * bf16
    whole = 60 * layer + attention + 3 * 2304 * D * bf16 + 20480 * D * bf16
    found = work.products(work.rest(k26.target), 17)
    assert found.bytes == pytest.approx(whole, rel=0.001) and whole == pytest.approx(4.54e9, rel=0.001)
    assert found.floor(CARD) * 1e3 == pytest.approx(1.06, abs=0.01)


def test_a_whole_round(k26: Model) -> None:
    """16 nodes over 5,500 tokens: 6.2 ms; plain decoding has no drafter to read."""
    parts = work.round_work(k26, shape(16), 5500, 109.8)
    assert tuple(parts) == work.PARTS
    head, window = 20480 * 7168 * 2, 6 * 4096 * 2 * 128 * 2
    assert parts["draft"].bytes == pytest.approx(0.793e9 + head + window, rel=0.001)
    assert parts["tree"].bytes == 7 * 20480 * 4 and parts["sample"].bytes == 20480 * 4
    assert parts["commit"].bytes == pytest.approx((7168 * 7168 + 6 * 2 * 128 * 7168) * 2, rel=0.001)
    assert sum(w.floor(CARD) for w in parts.values()) * 1e3 == pytest.approx(6.20, abs=0.01)
    eight = work.round_work(k26, shape(16, batch=8), 5500, 109.8)
    assert eight["attention"].bytes == 8 * parts["attention"].bytes and eight["rest"].bytes == parts["rest"].bytes
    plain = work.round_work(k26, shape(1), 5500, 8.0)
    assert [part for part in work.PARTS if plain[part].bytes] == ["attention", "experts", "rest", "sample"]


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_router_bias_gives_the_chances(kind: str) -> None:
    """Against random logits sent through the router's rule."""
    chance, generator = chances(kind, 384, 8), torch.Generator().manual_seed(0)
    assert float(chance.sum()) == pytest.approx(8) and chance.max() < 1
    logits = 1.7 * torch.randn(40, 64, 384, generator=generator)
    visited = torch.zeros_like(logits).scatter_(2, (logits.sigmoid() + router_bias(chance, 1.7)).topk(8).indices, 1.0)
    often = visited.mean((0, 1)).double()
    assert (often - chance).abs().max() < (0.02 if kind == "uniform" else 0.05)
    for tokens in (16, 64):
        hits = float((visited[:, :tokens].sum(1) > 0).sum(1).double().mean())
        assert hits == pytest.approx(expected_hits(chance, tokens), rel=0.03)


@pytest.mark.parametrize(("batch", "nodes"), [(1, 64), (4, 16)])
def test_a_round_reads_as_many_experts_as_its_routing_says(batch: int, nodes: int) -> None:
    """Nodes and requests hold different tokens, and hidden states are as independent as they are in every layer."""
    t = replace(TINY, layers=8, D=512, E=384, K=8, V=8192, H=4, L=64, q_lora=64)
    model = Model(t, replace(TINY_DRAFTER, D=512, mask_id=8191), KERNELS)
    with torch.no_grad():
        room, device = rank.Room(batch, 18, 18 * batch), torch.device("cpu")
        one = rank.make_rank(load_config([f"run.nodes=[{nodes}]"]), model, room, device, torch.float32)
        rank.seat_all(one.state, batch, 1000, nodes, torch.arange(room.pages).int())
        for kind in ("uniform", "zipf"):
            chance = chances(kind, t.E, t.K)
            rank.set_router_bias(one.params, router_bias(chance, rank.INIT * t.D**0.5))
            found = step.experts_hit(one, shape(nodes, batch))
            assert found == pytest.approx(expected_hits(chance, batch * nodes), rel=0.06)


def test_random_experts_average_to_nothing() -> None:
    """What an expert adds to every token alike would grow with the layers until all tokens take the same experts."""
    experts = random_params(work.plan_of(TINY), 0, torch.device("cpu"), torch.float32).layers[1].mlp.experts
    for weights in (experts.w13, experts.w2):
        assert weights.mean().abs() < 0.03 * weights.std()


def test_zipf_chances() -> None:
    """Drawn without return, by hand: of three experts with chances 6, 3, 2 of 11, two chosen, the first is left out
    with 3/11 * 2/8 + 2/11 * 3/9; the race gives nearly that. Fewer distinct experts than evenly."""
    first = 1 - (3 / 11 * 2 / 8 + 2 / 11 * 3 / 9)
    assert float(chances("zipf", 3, 2)[0]) == pytest.approx(first, abs=0.03)
    assert expected_hits(chances("zipf", 384, 8), 16) == pytest.approx(73.7, abs=0.1)


REPLAY = [
    Kernel("nvjet_tst", 0.0, 2.0),
    Kernel("void kimi_fx::round::(anonymous namespace)::draft_kernel<128>(kimi_fx::round::DraftParams)", 1.5, 3.0),
    Kernel("kimi_fx::round::(anonymous namespace)::summarise_kernel(kimi_fx::round::TreeParams)", 3.0, 3.5),
    Kernel("kimi_fx::round::(anonymous namespace)::build_kernel(kimi_fx::round::TreeParams, int)", 3.5, 4.0),
    Kernel("kimi_fx::mla::(anonymous namespace)::schedule_kernel(int const*, int*, kimi_fx::mla::Shape)", 4.0, 4.5),
    Kernel("triton_red_fused_add_3", 5.0, 6.0),
    Kernel("void kimi_fx::moe::(anonymous namespace)::experts_kernel<1>(kimi_fx::moe::Params)", 6.0, 9.0),
    Kernel("triton_poi_fused_4", 9.0, 9.5),
    Kernel("kimi_fx::round::(anonymous namespace)::walk_kernel(kimi_fx::round::WalkParams)", 9.5, 9.8),
    Kernel("kimi_fx::round::(anonymous namespace)::logprobs_kernel(kimi_fx::round::WalkParams, int)", 9.8, 9.9),
    Kernel("nvjet_tst", 9.9, 9.95),
    Kernel("void kimi_fx::round::(anonymous namespace)::copy_kernel(kimi_fx::round::CommitParams)", 9.95, 10.0),
]


def test_a_trace_in_parts() -> None:
    """By hand: each kernel to the start of the next, 10 in all."""
    assert {part: 10 * share for part, share in shares(REPLAY).items()} == pytest.approx(
        {"draft": 3.0, "tree": 1.0, "attention": 1.0, "experts": 3.0, "rest": 1.5, "sample": 0.4, "commit": 0.1}
    )
    with pytest.raises(RuntimeError, match="trace of 2 kernels has none that builds the tree"):
        shares(REPLAY[:2])


def test_kernels_are_named_as_in_their_sources() -> None:
    sources = "".join(f.read_text() for f in (Path(step.__file__).parents[2] / "csrc").glob("*/*.cu"))
    kernels = re.findall(r"__global__ void [^;{]*?(\w+_kernel)\(", sources)
    for piece in trace.OWN:
        assert f"namespace {piece} {{" in sources if "::" in piece else kernels.count(piece) == 1, piece


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"nodes": ["17"]}, "nodes takes some of 1, 8, 16, 32, 64, 128, found 17"),
        ({"batch": ["0"]}, "batch takes numbers from 1 to 64, found 0"),
        ({"context": ["5.5k"]}, "context takes numbers from 1 to 262144, found 5.5k"),
        ({"routing": ["real"]}, "routing takes some of uniform, zipf, found real"),
        ({"acceptance": ["3", "4"]}, "acceptance is one number from 1 to 8, tokens a round, found 3, 4"),
        *(({"acceptance": [a]}, f"tokens a round, found {a}.") for a in ("nan", "inf", "-5", "0", "1e9", "8.1", "x")),
        ({"nodes": ["1"], "acceptance": ["2"]}, "acceptance is one number from 1 to 1, tokens a round, found 2"),
        ({"batch": ["8"], "context": ["200000"]}, "holds 262,144 tokens, no batch x context is that small"),
    ],
)
def test_refusals(words: dict[str, list[str]], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        step.chosen(words, 8)


def test_too_small_a_card(k26: Model) -> None:
    needed = rank.device_bytes(k26, step.room_for(step.chosen({}, 8)[0]))
    step.check_fits(needed, 139 * 2**30)
    with pytest.raises(ValueError, match="needs 102 GB on the device .* and 80 GB are free: ask for a smaller batch"):
        step.check_fits(needed, 80e9)


def test_without_a_card(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, says in (((), "bench step needs a CUDA device"), (("layers=[3]",), "bench step takes batch, nodes, ")):
        assert main(["bench", "step", *words]) == 2
        assert says in capsys.readouterr().err


def test_cells() -> None:
    """Those of one compiled round stand together; eight requests of 200,000 tokens are not among them."""
    cells, acceptance = step.chosen({}, 8)
    assert len(cells) == len(set(cells)) == 5 * 7 * 2 and acceptance == 4
    rounds = [(c.batch, c.nodes) for c in cells]
    assert sum(a != b for a, b in zip(rounds, rounds[1:], strict=False)) == 9
    assert {c.context for c in cells if c.batch == 8} == {1000, 5500, 32_000}


def test_cells_that_are_left_out_are_named(capsys: Any) -> None:
    cells, _ = step.chosen({"batch": ["1", "8", "1"], "nodes": ["8"], "context": ["200000"]}, 8)
    assert [(c.batch, c.routing) for c in cells] == [(1, "uniform"), (1, "zipf")]
    assert capsys.readouterr().err == "left out, as bench step holds 262,144 tokens: batch x context of 8 x 200,000\n"
    assert step.chosen({"nodes": ["1"]}, 8)[1] == 1


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Cells of the tiny pair; what is called for a replay is the traced function, each taking 0.1 ms."""
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "cache"))

    def compile_step(_: Any, idle: Any, __: Path) -> tuple[bytes, dict[str, Any]]:
        return b"code", {"seconds": 1.0, "arguments": signature(idle)}

    monkeypatch.setattr(kimi_fx.runtime.rounds, "compile_step", compile_step)
    monkeypatch.setattr(kimi_fx.runtime.rounds, "load_step", lambda *_: ddtree_step)

    def median(replay: Callable[[], object]) -> float:
        replay()
        return step.ROUNDS * 1e-4

    def traced(replay: Callable[[], object]) -> tuple[list[Kernel], float]:
        replay()
        return REPLAY, 1.5e-5

    monkeypatch.setattr(step, "median", median)
    monkeypatch.setattr(step, "traced", traced)
    monkeypatch.setattr(step, "copied", lambda flight: flight)

    def measured(target: TargetModel = TINY, **words: list[str]) -> list[dict[str, Any]]:
        cells, acceptance = step.chosen(words, TINY_DRAFTER.block)
        model = Model(target, TINY_DRAFTER, KERNELS)
        with torch.no_grad():
            return list(step.measure(cells, load_config([]), model, CARD, acceptance, torch.device("cpu")))

    return measured


def test_the_whole_flow(flow: Callable[..., list[dict[str, Any]]], capsys: Any) -> None:
    words = {"batch": ["1", "3"], "nodes": ["8", "1"], "context": ["70", "150"], "acceptance": ["2.5"]}
    found = flow(**words, routing=["uniform", "zipf"])
    assert len(found) == 16
    said = capsys.readouterr().err
    assert said.count("2 rounds loaded and captured in") == 2
    assert said.count("compiling round-") == 4  # one for each batch and nodes, whatever the context and the routing
    for cell in found:
        assert cell["us"] == pytest.approx(100) and cell["idle us"] == pytest.approx(15)
        assert cell["over floor"] == pytest.approx(100 / cell["floor us"])
        assert sum(cell[f"{part} us"] for part in work.PARTS) == pytest.approx(100)
        assert sum(cell[f"{part} floor us"] for part in work.PARTS) == pytest.approx(cell["floor us"])
        assert cell["tokens/s"] == pytest.approx(cell["batch"] * (2.5 if cell["nodes"] > 1 else 1) * 1e4)
        visits = cell["batch"] * cell["nodes"] * TINY.K
        assert TINY.K <= cell["experts"] <= min(TINY.E, visits) and TINY.K <= cell["expected"] + 1e-6 < TINY.E
        bytes_ = cell["experts"] * work.expert_bytes(TINY)
        assert cell["experts MB"] == pytest.approx(bytes_ / 1e6)
    assert not any(cell["draft MB"] for cell in found if cell["nodes"] == 1)


def test_rounds_that_stop_are_no_result(flow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seat_all = step.seat_all

    def ill(state: Any, *rest: Any) -> None:
        seat_all(state, *rest)
        state.sampling.bias.fill_(torch.nan)

    monkeypatch.setattr(step, "seat_all", ill)
    with pytest.raises(RuntimeError, match="batch 1, 8 nodes, 70 tokens, uniform: a request ended"):
        flow(batch=["1"], nodes=["8"], context=["70"], routing=["uniform"])


def test_lines_and_picture(flow: Callable[..., list[dict[str, Any]]], capsys: Any) -> None:
    """A line is there before the next cell is measured; the picture has seven parts and as many floors a cell."""
    lines: list[str] = []
    cells = flow(batch=["1"], nodes=["8", "1"], context=["70"], routing=["zipf"])
    each = step.each_line(iter(cells), lines.append)
    assert next(each) == json.loads(lines[0]) and len(lines) == 1
    assert [json.loads(line) for line in [lines[0], *map(json.dumps, each)]] == cells
    assert "batch 1, 8 nodes, 70 tokens, zipf: 0.10 ms" in (said := capsys.readouterr().err) and "15.0 us idle" in said
    root = ElementTree.fromstring(step.picture(cells))
    assert len([e for e in root if e.tag.endswith("rect")]) == 2 * 2 * 7
    texts = [e.text for e in root if e.tag.endswith("text")]
    assert texts[:7] == list(work.PARTS) and "1 x 70, 8 nodes, zipf" in texts


def test_a_plan_is_that_of_the_loader() -> None:
    """All tokens read the whole plan but embedding, experts, frequencies, rank and last norm."""
    every = {id(leaf) for leaf in tree_leaves(work.plan_of(TINY))}
    counted = {id(leaf) for leaf in work.rest(TINY)}
    assert counted < every and len(every) - len(counted) == 3 + 5
