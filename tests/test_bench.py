"""The benchmarks run, print their tables, and count what they say they count. Speed itself is not asserted."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kimi_fx.bench import BENCHES
from kimi_fx.bench.acceptance import pool
from kimi_fx.bench.cpu import compare
from kimi_fx.bench.device import asked, heat_map, listed, numbers, some_of
from kimi_fx.bench.record import table
from kimi_fx.cli import main
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from oracles.toys import random_pair

PROMPTS = [[1, 2, 3, 4], [5, 6]]
HOW = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random pair, and the overrides that name it and two prompts of ids."""
    folder = tmp_path_factory.mktemp("small")
    loaded = random_pair(folder, V=64, layers=1, block=4)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"ids": ids}) for ids in PROMPTS))
    settings = ["sampling.max_tokens=12", "cache.max_len=64", f"prompts={folder / 'prompts.jsonl'}"]
    return loaded, [f"target={folder / 'target'}", f"drafter={folder / 'drafter'}", *settings]


def cells(out: str) -> dict[str, list[str]]:
    """Rows of a printed table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows}


def test_acceptance(small, capsys):
    """Acceptance counted again: tokens after each prompt's first, over steps."""
    loaded, overrides = small
    assert main(["bench", "acceptance", *overrides, "budgets=[3,7]"]) == 0
    out, _ = capsys.readouterr()
    rows = cells(out)
    assert list(rows)[2:] == ["plain", "chain", "tree of 3 (4 nodes)", "tree of 7 (8 nodes)"]
    engine = Engine(load_config(["cache.max_len=64", "step.give_up=null"]), loaded)
    ways = {"plain": {"mode": "plain"}, "chain": {"mode": "chain"}, "tree of 7 (8 nodes)": {"budget": 7}}
    for name, how in ways.items():
        deltas = list(engine.generate(PROMPTS, stream=True, **HOW, **how))
        steps = len(deltas) - len(PROMPTS)
        tokens = sum(len(d.token_ids) for d in deltas) - len(PROMPTS)
        assert rows[name][0] == f"{tokens / steps:.3f}"
    assert rows["plain"][:3] == ["1.000", "", "1.0"] and rows["tree of 7 (8 nodes)"][2] == "8.0"
    assert "tokens emitted a verify step, bonus included" in out and "float32" in out and "torch" in out
    assert "2 prompts" in out


def test_pooled_statistics(small):
    """Over all steps, not over requests: by depth the share of steps that went so deep."""
    loaded, _ = small
    engine = Engine(load_config(["cache.max_len=128"]), loaded)
    results = engine.generate(PROMPTS, [{"max_tokens": 40}, {"max_tokens": 5}], temperature=0, ignore_eos=True)
    p, stats = pool(results), [r.stats for r in results]
    steps = sum(s.steps for s in stats)
    assert p["acceptance"] == pytest.approx((39 + 4) / steps)
    assert sum(p["by_depth"]) == pytest.approx(p["acceptance"] - 1)
    assert p["nodes"] == pytest.approx((sum(s.drafted for s in stats) + steps) / steps)


def test_cpu(small, capsys):
    """Hugging Face, plain and tree in one run, the same ids from all."""
    _, overrides = small
    assert main(["bench", "cpu", *overrides, "budgets=[7]"]) == 0
    rows = cells(capsys.readouterr().out)
    assert list(rows)[2:] == ["Hugging Face", "plain", "tree of 7"]
    assert rows["Hugging Face"][2] == rows["plain"][3] == "1.00x"


def test_ways_that_differ_are_an_error():
    with pytest.raises(RuntimeError, match="prompt 0: c gave other ids than a"):
        compare({"a": lambda ids: ids, "b": lambda ids: [*ids], "c": lambda ids: ids[1:]}, [[1, 2]])
    assert compare({"a": lambda ids: ids}, [[1]])["a"] >= 0


def test_demo(capsys):
    assert main(["bench", "demo", "sampling.max_tokens=12"]) == 0
    out, _ = capsys.readouterr()
    plain, tree = (part.split("\n[")[0].split("\n", 1)[1] for part in out.split("--- ")[1:])
    assert plain == tree and "tree over plain: " in out


@pytest.mark.parametrize(("there", "said"), [((), "transformers and compressed"), (("transformers",), "needs comp")])
def test_without_the_extra(there, said, monkeypatch, capsys):
    """Known before anything is loaded."""
    monkeypatch.setattr("kimi_fx.bench.huggingface.find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr("kimi_fx.bench.cpu.Engine", None)
    assert main(["bench", "cpu"]) == 2
    assert said in (err := capsys.readouterr().err) and "pip install 'kimi-fx[test]'" in err


def test_table():
    assert table([["", "a"], ["row", "12"]]) == "|     |  a |\n|----:|---:|\n| row | 12 |"


@pytest.mark.parametrize("name", ["draft", "layer", "mla", "moe", "step"])
def test_kernel_benchmarks_say_what_they_need(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", name, f"folder={tmp_path / 'new'}"]) == 2
    assert f"bench {name} needs a CUDA device" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["bench", name, "strange=[3]"]) == 2
    assert f"bench {name} takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mla", "nodes=[0]"], "nodes takes numbers from 1 to 4096, found 0"),
        (["mla", "nodes=[-3]"], "found -3"),
        (["mla", "contexts=[abc]"], "contexts takes numbers from 0 to 262144, found abc"),
        (["mla", "batch=[]"], "batch takes one or more numbers from 1 to 64, found none"),
        (["mla", "heads"], "heads takes one or more"),
        (["mla", "batch=[4]", "nodes=[129]"], "chunk of several requests"),
        (["mla", "batch=[64]", "nodes=[128]"], "batch=64 with nodes=128 is more than 4096 rows"),
        (["moe", "inner=[100]"], "inner takes multiples of 64 from 64 to 2048, found 100"),
        (["moe", "tokens=[1e3]"], "tokens takes numbers from 1 to 4096, found 1e3"),
        (["moe", "routing=[uniform, even]"], "routing takes some of uniform, zipf, found uniform, even"),
        (["moe", "routing=[]"], "routing takes some of uniform, zipf, found none"),
        (["step", "routing=[]"], "routing takes some of uniform, zipf, found none"),
        (["step", "nodes=[]"], "nodes takes some of 1, 8, 16, 32, 64, 128, found none"),
        (["step", "acceptance=[]"], "acceptance is one number from 1 to 8, tokens a round, found none"),
        (["step", "batch=[65]"], "batch takes numbers from 1 to 64, found 65"),
        (["mla", "nodes=[²]"], "nodes takes numbers from 1 to 4096, found ²"),
        (["mla", f"nodes=[{'9' * 5000}]"], "nodes takes numbers from 1 to 4096, found 99"),
        (["mla", "nodes=[8]", "tp=2"], "heads, peers and folder, found tp."),
        (["sums", "tokens=[]"], "tokens takes one or more numbers from 1 to 4096, found none"),
        (["sums", "pass=[٣]"], "pass takes numbers from 1 to 4096, found ٣"),
        (["sums", "layers=[8,9]"], "layers is one number, found 8, 9"),
        (["sums", "layers=[62]"], "layers takes numbers from 1 to 61, found 62"),
        (["sums", "target=kimi_nano"], "takes tokens, pass, layers, mesh.tp and mesh.timeout, found target"),
        (["sums", "step.budget=3", "mesh.tp=2"], "found step.budget."),
        (["sums"], "bench sums needs mesh.tp=2 or more and as many CUDA devices, found mesh.tp=1 and "),
        (["mla", "folder=/dev/null/out"], "cannot make folder=/dev/null/out: Not a directory"),
        (["draft", "batch=[65]"], "batch takes numbers from 1 to 64, found 65"),
        (["layer", "rows=[129]"], "rows takes numbers from 1 to 128, found 129"),
    ],
)
def test_kernel_benchmarks_refuse_first(words, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("step", "one of eight tensor-parallel ranks|Takes `batch=|  routing=[uniform,zipf]"),
        ("sums", "what ranks pay for their sums|`mesh.tp=2`|  pass=[16,64]"),
        ("demo", "one prompt from the shipped pair|keys that `kimi-fx config` prints|  run.threads=1"),
    ],
)
def test_a_benchmark_says_its_keys(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in said.split("|")), out


def test_what_is_given_twice_is_measured_once() -> None:
    assert numbers("batch", ["1", "8", "01", "1"], 1, 64) == [1, 8]
    assert some_of("nodes", ["8", "1", "8"], (1, 8, 16)) == ["8", "1"]
    assert listed("[1, 2,]") == listed("1,2") == ["1", "2"] and listed("[]") == []


UNUSED = {
    "generate budgets=[7] prompt=a": "budgets=[7]: generate makes no use of it, step.budget is that of a request",
    "inspect prompt=a output=json": "prompt=a: inspect makes no use of it, leave it out\noutput=json: ",
    "warmup budgets=[7] limit=3": "budgets=[7]: warmup makes no use of it, leave it out\nlimit=3: ",
    "validate output=json ids=[1]": "output=json: validate makes no use of it, leave it out",
    "bench acceptance ids=[1,2,3]": "ids=[1,2,3]: bench acceptance makes no use of it, give prompts=FILE",
    "bench acceptance step=chain": "step=chain: bench acceptance makes no use of it, leave it out",
    "bench cpu prompt=a": "prompt=a: bench cpu makes no use of it, give prompts=FILE",
    "bench cpu sampling.temperature=0.5": "sampling.temperature=0.5: bench cpu makes no use of it, its texts are",
    "bench demo ids=[1] step.budget=3": "ids=[1]: bench demo makes no use of it, give prompt=\nstep.budget=3: ",
    "generate limit=3 prompt=a": "limit=3 is of a file, and prompt= gives one prompt: leave it out",
}


@pytest.mark.parametrize("words", UNUSED)
def test_settings_without_use_are_refused(words: str, capsys) -> None:
    assert main(words.split()) == 2
    assert UNUSED[words] in capsys.readouterr().err


def test_heat_map():
    """A square and its ratio for each cell, and every row and column named."""
    cells = [
        {"width": w, "tokens": t, "over floor": 1 + t / 10} for w in ("256 uniform", "256 zipf") for t in (1, 1600)
    ]
    root = ElementTree.fromstring(heat_map(cells[:3], "width", "tokens"))
    assert len([e for e in root if e.tag.endswith("rect")]) == 3
    assert sorted(e.text for e in root if e.tag.endswith("text")) == sorted(
        ["1.1", "161.0", "1.1", "1", "1,600", "256 uniform", "256 zipf"]
    )


def test_the_readme_names_no_other_benchmarks() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    assert set(re.findall(r"\bbench ([a-z]+)", text)) <= set(BENCHES)


@pytest.mark.parametrize("path", ["~nouser/x", "/tmp/" + "n" * 300])
def test_a_folder_that_cannot_be(path):
    with pytest.raises(ValueError, match=f"folder={path}: no usable path: "):
        asked("mla", [], [f"folder={path}"])
