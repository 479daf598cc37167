"""The command line: results on stdout, all else on stderr, exit codes, and no traceback for a user's mistake.

Long because every kind of mistake is made once: words, files of prompts, their lines, paths, signals.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kimi_fx
from kimi_fx import bench
from kimi_fx.cli import main
from kimi_fx.graphs import step
from oracles.toys import random_pair

TEXT = "def add(a, b):"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """Overrides for a random pair of 64 ids that loads at once and has no tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    random_pair(folder, V=64, layers=2, block=4)
    settings = ["step=tree", "cache.max_len=128", "sampling.temperature=0", "sampling.max_tokens=9"]
    return [f"target={folder / 'target'}", f"drafter={folder / 'drafter'}", *settings]


@pytest.fixture
def call(capsys):
    """Run a command; exit code, stdout and stderr."""

    def run(*argv) -> tuple[int, str, str]:
        code = main([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(call):
    """Run a command that must end with exit code 2; what it says."""

    def run(*argv) -> str:
        code, out, err = call(*argv)
        assert (code, out) == (2, "") and "Traceback" not in err
        return err[err.index("kimi-fx: ") :]

    return run


# ---- generate


def test_a_drafter_whose_logits_are_not_finite(call, small):
    """It is said once, and drafting is given up."""
    asked = [*small, "ids=[3,1,4]", "drafter.rope_amplitude=3e38", "sampling.ignore_eos=true", "step.give_up=4"]
    code, out, err = call("generate", *asked)
    expected = call("generate", "ids=[3,1,4]", *small, "sampling.ignore_eos=true")[1]
    assert (code, out) == (0, expected)
    assert (
        err.count("nothing drafted in 4 of 8 steps: the drafter's logits were not finite, no drafts after step 4") == 1
    )


def test_text_of_one_prompt(call, make_engine):
    code, out, err = call("generate", f"prompt={TEXT}", "sampling.max_tokens=12", "sampling.temperature=0")
    expected = make_engine().generate(TEXT, max_tokens=12, temperature=0).outputs[0].text
    assert (code, out) == (0, expected + "\n")
    assert "[length: 12 tokens, " in err and "tree of 15, acceptance length" in err
    assert "temperature 0 (as set), top_p 1 (default)" in err and "stop ids 3841, 3842" in err


def test_api_in_one_call(make_engine):
    how = {"max_tokens": 12, "temperature": 0}
    expected = make_engine().generate(TEXT, **how).outputs[0]
    assert kimi_fx.generate(TEXT, **how).outputs[0].token_ids == expected.token_ids
    overrides = ["sampling.max_tokens=12", "step=chain"]
    *_, last = kimi_fx.generate(TEXT, overrides=overrides, temperature=0, stream=True)
    assert last.stats.mode == "chain" and last.usage.completion_tokens == 12
    with pytest.raises(AttributeError, match="no attribute 'Enginee'; it offers .*Engine"):
        kimi_fx.Enginee  # noqa: B018


def test_json_of_ids(call, small):
    code, out, err = call("generate", "ids=[3,1,4]", "output=json", "sampling.n=2", *small)
    (line,) = out.splitlines()
    result = json.loads(line)
    assert code == 0 and "Traceback" not in err
    assert result["prompt_token_ids"] == [3, 1, 4]
    assert result["usage"] == {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21}
    assert [len(output["token_ids"]) for output in result["outputs"]] == [9, 9]
    assert result["stats"]["mode"] == "tree" and result["outputs"][1]["finish_reason"] == "length"


def test_prompts_of_a_file(call, small, tmp_path):
    """Every line its own sampling fields; results in the file's order, as if each were alone."""
    lines = [{"ids": [1, 2], "max_tokens": 3}, {"ids": [3], "temperature": 1.0, "seed": 4, "n": 2}, {"ids": [5, 6]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    _, out, _ = call("generate", f"prompts={file}", "output=json", *small)
    together = [json.loads(line) for line in out.splitlines()]
    assert [len(result["outputs"]) for result in together] == [1, 2, 1]
    assert [len(result["outputs"][0]["token_ids"]) for result in together] == [3, 9, 9]
    for line, result in zip(lines, together, strict=True):
        file.write_text(json.dumps(line))
        _, out, _ = call("generate", f"prompts={file}", "output=json", *small)
        alone = json.loads(out)
        assert [o["token_ids"] for o in alone["outputs"]] == [o["token_ids"] for o in result["outputs"]]
    save_file({"prompts": torch.tensor([[1, 2], [5, 6]], dtype=torch.int32)}, tmp_path / "prompts.safetensors")
    _, out, _ = call("generate", f"prompts={tmp_path}/prompts.safetensors", "output=json", *small)
    matrix = [json.loads(line)["outputs"][0]["token_ids"] for line in out.splitlines()]
    assert (
        matrix[0][:3] == together[0]["outputs"][0]["token_ids"] and matrix[1] == together[2]["outputs"][0]["token_ids"]
    )


def test_several_texts(call, tmp_path):
    """Each under a heading, as it is alone."""
    settings = ["sampling.max_tokens=3", "sampling.temperature=0", "step=plain"]
    chat = json.dumps([{"role": "user", "content": "hello"}])
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{json.dumps(TEXT)}\n{{"messages": {chat}}}\n{{"prompt": "{TEXT}", "max_tokens": 0}}')
    code, out, err = call("generate", f"prompts={file}", *settings)
    assert code == 0 and err.count("tokens/s, plain]") == 3
    alone = [call("generate", prompt, *settings)[1] for prompt in (f"prompt={TEXT}", f"messages={chat}")]
    texts = {f"--- prompt {i}, sample 0\n{text}" for i, text in enumerate([*alone, "\n"])}
    assert all(text in out for text in texts) and len(out) == sum(map(len, texts))


@pytest.fixture
def process():
    """`python -m kimi_fx` at work on a long text, its first character read."""
    long = ["generate", f"prompt={TEXT}", "drafter=none", "sampling.max_tokens=4000", "sampling.ignore_eos=true"]
    command = [sys.executable, "-m", "kimi_fx", *long, "run.threads=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # even if the tests run in the background
    with subprocess.Popen(command, preexec_fn=interruptible, **pipes) as process:
        assert len(process.stdout.read(1)) == 1
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("numbers", "code", "word"),
    [
        ([signal.SIGINT], 130, "interrupted"),
        ([signal.SIGINT] * 4, 130, "interrupted"),
        ([signal.SIGTERM], 143, "terminated"),
        ([signal.SIGTERM, signal.SIGINT], 143, "terminated"),
    ],
)
def test_signals(process, numbers, code, word):
    """Once or more often: the first one's code, a word on stderr, no traceback."""
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.15)
    assert process.wait(60) == code
    loaded, settings, *rest = process.stderr.read().decode().splitlines()
    assert "loaded" in loaded and "temperature" in settings and rest == [f"kimi-fx: {word}"]


def test_a_reader_that_leaves(process):
    """The code that a shell expects, and no word."""
    process.stdout.close()
    assert process.wait(60) == 141
    assert len(process.stderr.read().splitlines()) == 2  # as it loaded


@pytest.mark.parametrize("word", ["config", "--help"])
def test_a_reader_that_never_was(word):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "kimi_fx", word], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


EARLY = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "kimi_fx.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from kimi_fx.__main__ import main
sys.exit(main(["config"]))
"""


def test_a_signal_while_modules_are_imported():
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, preexec_fn=interruptible)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kimi-fx: interrupted\n")


@pytest.mark.parametrize("output", ["text", "json"])
def test_an_encoding_without_the_texts_characters(output, tmp_path):
    """What cannot be written is escaped; JSON stays JSON."""
    word = "sampling.logit_bias={196: 1000, 167: 500}"  # bytes of é, and whatever follows
    command = [
        sys.executable,
        "-m",
        "kimi_fx",
        "generate",
        "prompt=é",
        f"output={output}",
        "sampling.max_tokens=3",
        word,
    ]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "sampling.temperature=0"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    if output == "json":
        assert not json.loads(text)["outputs"][0]["text"].isascii()
    else:
        assert "\\x" in text or "\\u" in text


def test_import_is_quick_and_without_torch():
    code = (
        "import sys, time; begun = time.perf_counter(); import kimi_fx; kimi_fx.SamplingParams(n=2);"
        "print(time.perf_counter() - begun, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(out[0]) < 2 and out[1] == "False"


# ---- the other commands


def test_validate(call, small, tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1, 2, 3]}\n{"ids": [7], "max_tokens": 20}')
    code, out, err = call("validate", f"prompts={file}", *small)
    assert code == 0 and "4 of 4 comparisons good" in err
    assert "the kernels are not compared with the reference: there are none for this device" in err
    assert re.search(r"temperature 0, whatever sampling.temperature is; sampling.seed=\d+\n", err)
    lines = [line.split() for line in out.splitlines()]
    assert [line[:4] for line in lines] == [["prompt", str(i), m, "equal,"] for i in "01" for m in ("chain", "tree")]

    sound = step.verify

    def one_off(params, pool, state, model, tokens, positions, valid, ancestors):
        wrong = positions + (ancestors is not None and positions.shape[1] > 1)  # of a drafted tree only
        return sound(params, pool, state, model, tokens, wrong, valid, ancestors)

    monkeypatch.setattr(step, "verify", one_off)
    code, out, err = call("validate", f"prompts={file}", "sampling.seed=7", *small)
    assert "sampling.seed=7\n" in err
    assert code == 1 and "DIFFERENT after" in out and "4 of 4" not in err


def test_validate_without_a_drafter(call, small):
    target, *_ = small
    code, out, err = call("validate", "ids=[1]", target, "sampling.max_tokens=2")
    assert (code, out) == (2, "") and "validate needs a drafter" in err


def test_inspect(call, refused, tmp_path):
    code, out, _ = call("inspect")
    assert code == 0 and "1,525 tensors, 22,579,584 bytes" in out and "stop ids: 3841, 3842" in out
    assert f"{tmp_path}/absent: no such folder" in refused("inspect", f"target={tmp_path}/absent")


def test_config(call):
    code, out, _ = call("config", "step.budget=63", "target=kimi_nano")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and "63" in lines["step.budget"] and "command line" in lines["step.budget"]
    assert "conf/target/kimi_nano.yaml" in lines["target.path"] and "default" in lines["run.batch"]


def test_usage(call):
    assert call("--help")[0] == 0 and call("--help")[1].startswith("usage: kimi-fx")
    assert call("generate", "--help")[1] == call("help")[1] != ""
    assert call()[0] == 2


# ---- mistakes


MISTAKES = {
    "no such command": (["genrate"], "no command 'genrate': did you mean generate?"),
    "no such key": (["config", "step.bugdet=7"], "step.bugdet=7: no such key; did you mean step.budget?"),
    "wrong type": (["config", "run.batch=many"], "run.batch=many: wanted int"),
    "no prompt": (["generate"], "Give one of prompt=, prompts=, ids= or messages=; found none"),
    "two prompts": (["generate", "prompt=a", "ids=[1]"], "found prompt, ids"),
    "no file": (["generate", "prompts=/absent.jsonl"], "prompts=/absent.jsonl: there is no such file"),
    "no target": (["generate", "ids=[1]", "target=kimi_k2_6"], "target.path is not set"),
    "no folder": (["generate", "ids=[1]", "target=/absent"], "/absent"),
    "no device": (["generate", "ids=[1]", "device=cuda:99"], "device='cuda:99' was asked for, but"),
    "an index of the CPU": (["generate", "ids=[1]", "device=cpu:5"], "device='cpu:5' is not a device: use auto, cpu"),
    "an index too large": (["generate", "ids=[1]", "device=cuda:256"], "device='cuda:256' is not a device"),
    "nodes of no round": (["generate", "ids=[1]", "device=cpu", "run.nodes=[8]"], "run.nodes is of compiled steps"),
    "empty nodes": (
        ["generate", "ids=[1]", "device=cpu", "run.compile=true", "run.nodes=[]"],
        "run.nodes=[] compiles no round",
    ),
    "checks of one rank": (["generate", "ids=[1]", "mesh.check=true"], "mesh.check=true, but there is one rank: leave"),
    "timeout of one rank": (["generate", "ids=[1]", "mesh.timeout=5"], "mesh.timeout=5.0, but there is one rank"),
    "one device for two": (["generate", "ids=[1]", "device=cuda:0", "mesh.tp=2"], "names one device and mesh.tp=2"),
    "no drafter": (["generate", "ids=[1]", "drafter=none", "step=tree"], "mode=tree needs a drafter"),
    "no id": (["generate", "ids=[5000]"], "5000, which is no token id: ids are 0 to 4095"),
    "no messages": (["generate", "messages={"], "messages: not valid JSON: "),
    "deep messages": (["generate", f"messages={'[' * 3000}"], "kimi-fx: messages: n"),  # too deeply nested, or no JSON
    "no bench": (["bench", "acceptence"], "did you mean acceptance?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_sentences(refused, mistake):
    argv, message = MISTAKES[mistake]
    assert message in refused(*argv)


@pytest.mark.parametrize("setting", ["step.block=9", "cache.max_len=513", "step.mode=chain step.budget=4"])
def test_settings_are_checked_before_loading(call, small, setting):
    code, _, err = call("generate", "ids=[1]", *small, *setting.split())
    assert code == 2 and "loaded" not in err


def test_all_mistakes_at_once(refused):
    err = refused("generate", "prompt=a", "sampling.top_p=2", "stepp=tree", "step.mode=forest")
    assert all(word in err for word in ("sampling.top_p=2", "stepp=tree", "step.mode=forest"))


LINES = {
    "{": "not valid JSON: Expecting",
    "[" * 100_000: "nested too deeply",
    '{"ids": [1], "logit_bias": {"１": 2}}': "logit_bias",
    '{"prompt": "a", "prompt": "b"}': "the key 'prompt' is given twice",
    '{"ids": [1], "seed": ' + "1" * 5000 + "}": "111111111… is a number of 5000 digits",
    "[1]": "a line is an object with one of prompt, ids or messages",
    '{"ids": [1], "prompt": "a"}': "an object with one of prompt, ids or messages",
    '{"prompt": 5}': "prompt=5: wanted str",
    '{"ids": {"a": 1}}': "ids={'a': 1}: wanted list of int",
    '{"ids": [true]}': "ids=[True]: wanted list of int",
    '{"ids": []}': "The prompt is empty",
    '{"ids": null}': "a line is an object with one of",
    '{"ids": [64]}': "The prompt holds 64, which is no token id",
    '{"ids": [1], "max_tokens": 999}': "max_tokens=999 after a prompt of 1 tokens is more than the context of 128",
    '{"ids": [1], "logit_bias": {"4096": 1}}': "logit_bias names id 4096",
    '{"ids": [1], "logit_bias": {"5": 1, "05": 2}}': "logit_bias: the key 5 is given twice",
    '{"ids": [1], "logit_bias": {"' + "5" * 5000 + '": 1}}': "logit_bias: 555555555… is a number of 5000 digits",
    '"a text"': "The checkpoint has no tiktoken.model",
    '{"ids": [1], "temprature": 1}': "temprature: no such sampling parameter; did you mean temperature",
    '{"messages": [5]}': "messages[0] must be an object",
    '{"messages": [{"role": "user"}]}': "messages[0] has no content",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_bad_lines_of_a_file(refused, small, tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\n' + line)
    err = refused("generate", f"prompts={file}", *small)
    assert LINES[line] in err.partition(f"kimi-fx: {file}, line 2: ")[2]


def test_all_that_is_wrong_with_a_line_says_where_it_is(refused, small, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1], "n": 0, "top_p": 2}')
    named = refused("generate", f"prompts={file}", *small).removeprefix("kimi-fx: ").splitlines()
    assert len(named) == 2 and all(line.startswith(f"{file}, line 1: ") for line in named)


def test_all_bad_lines_of_a_file_are_named(refused, small, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(['{"ids": [1]}', *["[]", "{}"] * 11]))
    named = refused("generate", f"prompts={file}", *small).splitlines()
    assert [line.count(f"{file}, line {n}: ") for n, line in enumerate(named[:20], 2)] == [1] * 20
    assert named[20:] == ["and 2 more."]


def test_bad_files(refused, small, tmp_path):
    empty, matrix = tmp_path / "empty.jsonl", tmp_path / "other.safetensors"
    empty.write_text("\n")
    assert "holds no prompt" in refused("generate", f"prompts={empty}", *small)
    for wrong in (torch.tensor(1), torch.zeros(3).int(), torch.zeros(1, 1, 1).int(), torch.zeros(0, 4).int()):
        save_file({"prompts": wrong}, matrix)
        err = refused("generate", f"prompts={matrix}", *small)
        assert f"prompts={matrix}: `prompts` is {list(wrong.shape)} in {wrong.dtype}, wanted a matrix of ids" in err
    save_file({"prompts": torch.zeros(1, 2)}, matrix)
    assert "`prompts` is [1, 2] in torch.float32, wanted" in refused("generate", f"prompts={matrix}", *small)
    save_file({"prompts": torch.tensor([[1, 2], [3, 64]])}, matrix)
    assert f"{matrix}, prompts[1]: The prompt holds 64" in refused("generate", f"prompts={matrix}", *small)
    save_file({"ids": torch.zeros(1, 1)}, matrix)
    assert "no tensor `prompts`; it holds ids" in refused("generate", f"prompts={matrix}", *small)
    matrix.write_bytes(b"<html>")
    assert "is not a safetensors file" in refused("generate", f"prompts={matrix}", *small)


@pytest.mark.parametrize("key", ["prompts", "target", "target.path", "drafter", "drafter.path", "run.trace"])
@pytest.mark.parametrize(("path", "said"), [("n" * 300, "name too long"), ("~nouser/x", "home directory")])
def test_paths_that_cannot_be(refused, key, path, said):
    err = refused("generate", f"{key}={path}", *(["ids=[1]"] if key != "prompts" else []))
    assert f"kimi-fx: {key}={path[:50]}" in err
    assert said in err or (key in ("target", "drafter") and "no such preset" in err)


def test_a_pool_that_does_not_fit(call, small):
    code, out, err = call("generate", "ids=[1]", *small, "cache.tokens=1000000000000")
    assert (code, out) == (1, "") and "lower cache.tokens, cache.max_len or run.batch" in err
    assert "Traceback" not in err


def test_failure_while_running(call, small, monkeypatch):
    def draw(*args):
        raise RuntimeError("device lost")

    monkeypatch.setattr(step, "walk", draw)
    code, out, err = call("generate", "ids=[1]", *small)
    assert code == 1 and err.endswith("kimi-fx: RuntimeError: device lost\n")


def test_readme_and_usage_name_every_command():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    from kimi_fx.cli import COMMANDS, USAGE

    for command in COMMANDS:
        assert f"\n  {command} " in USAGE and f"kimi-fx {command}" in readme


def test_usage_names_every_bench(call):
    (line,) = (line for line in call("help")[1].splitlines() if line.startswith("  bench "))
    files = {
        file.stem for file in Path(bench.__file__).parent.glob("*.py") if "\ndef run(overrides" in file.read_text()
    }
    assert set(re.findall(r"\w+", line.split("bench", 1)[1].split("each")[0])) == files == set(bench.BENCHES)


def test_help_loads_no_torch():
    code = "import sys; from kimi_fx.cli import main; main(['help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
