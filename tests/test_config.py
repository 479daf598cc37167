"""Overrides, presets, sampling parameters and the table of keys, against rules written down a second time.

Long because every kind of value is tried both as a key and as a sampling parameter.
"""

import ast
import dataclasses
import json
import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_fx import config as config_module
from kimi_fx.compose import ConfigError, conf_folder, format_config, load_config, resolve, sampling_from
from kimi_fx.config import Config, SamplingParams, Step, package_path
from kimi_fx.rules import nearest

ROOT = Path(__file__).parents[1]
PRESETS = sorted(file.relative_to(conf_folder()).with_suffix("") for file in conf_folder().glob("*/*.yaml"))


def dataclass_keys() -> dict[str, tuple[type, dataclasses.Field, object]]:
    """Dotted key -> (dataclass, field, default)."""
    found = {}
    for top in fields(Config):
        value = getattr(Config(), top.name)
        if is_dataclass(value):
            for leaf in fields(value):
                found[f"{top.name}.{leaf.name}"] = (type(value), leaf, getattr(value, leaf.name))
        else:
            found[top.name] = (Config, top, value)
    return found


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value).splitlines()


# Composing


def test_defaults_and_groups() -> None:
    config = load_config([])
    assert config.step == Step() and config.sampling == SamplingParams()
    assert config.target.path == "kimi_fx:nano/kimi-nano"
    assert config.drafter.path == "kimi_fx:nano/kimi-nano-dflash"
    for path in (config.target.path, config.drafter.path):
        assert (package_path(path) / "config.json").is_file()


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_each_preset_composes(preset: Path) -> None:
    group, name = preset.parts
    values = yaml.safe_load((conf_folder() / f"{preset}.yaml").read_text())
    composed = getattr(load_config([f"{group}={name}"]), group)
    for key, value in values.items():
        assert getattr(composed, key) == value
    untouched = {f.name for f in fields(composed)} - set(values)
    assert all(getattr(composed, name) == getattr(type(composed)(), name) for name in untouched)


def test_presets_are_those_promised() -> None:
    assert {str(preset) for preset in PRESETS} == {
        "target/kimi_nano", "target/kimi_k2_6", "step/plain", "step/chain", "step/tree",
        "drafter/kimi_nano_dflash", "drafter/kimi_k2_6_dflash", "drafter/none",
    }  # fmt: skip
    assert load_config(["drafter=kimi_k2_6_dflash"]).drafter.window == 4096
    assert load_config(["drafter=none"]).drafter.path is None


def test_values_are_yaml_in_the_type_of_the_field() -> None:
    config = load_config([
        "run.batch=0x10", "target.lora_norm_eps=1e-6", "chat.thinking=false", "ids=[1, 2]", "budgets=[]",
        "sampling.temperature=0", "sampling.logit_bias={5: 1, 6: -2.5}", "sampling.seed=null",
    ])  # fmt: skip
    assert config.run.batch == 16 and config.target.lora_norm_eps == 1e-6 and config.chat.thinking is False
    assert config.ids == (1, 2) and config.budgets == ()
    assert type(config.sampling.temperature) is float and config.sampling.seed is None
    assert config.sampling.logit_bias == {5: 1.0, 6: -2.5}


def test_frozen_dataclasses_all_the_way_down() -> None:
    config = load_config(["step.budget=3"])
    assert type(config) is Config and type(config.step) is Step and config == load_config(["step.budget=3"])
    for instance, name in ((config, "dtype"), (config.step, "budget"), (config.sampling, "n")):
        with pytest.raises(FrozenInstanceError):
            setattr(instance, name, None)


def test_later_overrides_win_and_presets_come_first() -> None:
    assert load_config(["step.budget=3", "step.budget=5"]).step.budget == 5
    assert load_config(["step=plain", "step=chain"]).step.mode == "chain"
    assert load_config(["drafter.window=7", "drafter=kimi_k2_6_dflash"]).drafter.window == 7


def test_a_folder_in_place_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in ("/no/such/folder", "./x", "~/x", "a/b", "kimi_fx:nano/kimi-nano", "checkpoint"):
        config = load_config([f"target={folder}", f"drafter={folder}"])
        assert config.target.path == config.drafter.path == folder
    assert problems("step=./x") == ["step=./x: no such preset; choose chain, plain, tree"]


@settings(deadline=None, max_examples=60)
@given(st.text())
@example("def f(x=1): # hi\n    return {x: 'y'}")
@example("123")
@example("[1,2]")
@example("${step.budget}")
@example("???")
@example("")
def test_strings_are_taken_as_they_stand(text: str) -> None:
    config = load_config([f"prompt={text}", f"sampling.stop=<{text}", f"messages={text}"])
    assert config.prompt == config.messages == (None if text == "null" else text)
    assert config.sampling.stop == (f"<{text}",)


def test_stop_strings_as_a_list() -> None:
    assert load_config(['sampling.stop=["a: b", "\\n", "${x}"]']).sampling.stop == ("a: b", "\n", "${x}")


def test_origins() -> None:
    rows = {row.key: row for row in resolve(["step=tree", "step.budget=63", "target=./here", "drafter=none"])}
    assert list(rows) == list(dataclass_keys())
    assert rows["step.mode"][1:] == ("tree", "plain, chain or tree", "conf/step/tree.yaml")
    assert rows["step.budget"][1:] == (63, "int or null, 0..127", "command line")
    assert rows["step.block"].origin == "default"
    assert rows["target.path"][1::2] == ("./here", "command line")
    assert rows["drafter.path"].origin == "conf/drafter/none.yaml"


@pytest.mark.parametrize(
    ("overrides", "drafter", "mode"),
    [
        ([], "kimi_fx:nano/kimi-nano-dflash", "tree"),
        (["target=kimi_nano"], "kimi_fx:nano/kimi-nano-dflash", "tree"),
        (["target=./here"], None, "plain"),
        (["target.path=./here"], None, "plain"),
        (["target=./here", "step=chain"], None, "chain"),
        (["target=./here", "drafter=./there"], "./there", "tree"),
        (["target=./here", "drafter.path=./there"], "./there", "tree"),
        (["drafter=none"], None, "plain"),
        (["drafter=none", "step.mode=tree"], None, "tree"),
    ],
)
def test_a_drafter_serves_the_target_it_was_trained_for(overrides, drafter, mode) -> None:
    config = load_config(overrides)
    assert (config.drafter.path, config.step.mode) == (drafter, mode)


def test_format_config_aligns_its_columns() -> None:
    lines = format_config(["step.budget=63", "prompt=a\nb", "ids=[1,2]"]).splitlines()
    assert len(lines) == 1 + len(dataclass_keys())
    starts = [lines[0].index(head) for head in ("value", "type", "origin")]
    for line in lines[1:]:
        assert all(line[start - 2 : start] == "  " and line[start] != " " for start in starts), line
    budget = next(line for line in lines if line.startswith("step.budget "))
    assert budget.split() == "step.budget 63 int or null, 0..127 command line (default: null)".split()


# What is wrong with overrides


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("step.bugdet=3", "step.bugdet=3: no such key; did you mean step.budget?"),
        ("budget=3", "budget=3: no such key; did you mean step.budget?"),
        ("temprature=0", "temprature=0: no such key; did you mean sampling.temperature?"),
        ("zzz=1", "zzz=1: no such key"),
        ("step.budget.x=1", "step.budget.x=1: no such key; did you mean step.budget?"),
        ("+step.budget=1", "+step.budget=1: no such key; did you mean step.budget?"),
        ("run=4", "run is a group of keys and takes no value such as '4': set its keys, such as run.batch=4"),
        (
            "run={batch: 2}",
            "run is a group of keys and takes no value such as '{batch: 2}': set its keys, such as run.batch=4",
        ),
        ("step=tre", "step=tre: no such preset; choose chain, plain, tree; did you mean tree?"),
        (
            "target=kimi_nan",
            "target=kimi_nan: no such preset; choose kimi_k2_6, kimi_nano or a checkpoint folder; "
            "did you mean kimi_nano?",
        ),
        ("step.budget", "step.budget: wanted key=value"),
        ("=3", "=3: wanted key=value"),
        ("", "'': wanted key=value"),
        ("step.budget=128", "step.budget=128: wanted int or null, 0..127"),
        ("step.budget=-1", "step.budget=-1: wanted int or null, 0..127"),
        ("step.budget=abc", "step.budget=abc: wanted int or null, 0..127"),
        ("step.budget=1.5", "step.budget=1.5: wanted int or null, 0..127"),
        ("step.budget=true", "step.budget=true: wanted int or null, 0..127"),
        ("step.budget='7'", "step.budget='7': wanted int or null, 0..127"),
        ("step.budget=${run.batch}", "step.budget=${run.batch}: wanted int or null, 0..127"),
        ("step.block=0", "step.block=0: wanted int or null, >= 1"),
        ("drafter.window=0", "drafter.window=0: wanted int or null, >= 1"),
        ("drafter.rope_amplitude=0", "drafter.rope_amplitude=0: wanted finite float or null, > 0"),
        ("target.lora_norm_eps=0.0", "target.lora_norm_eps=0.0: wanted finite float or null, > 0"),
        ("cache.max_len=0", "cache.max_len=0: wanted int or null, >= 1"),
        ("cache.tokens=-3", "cache.tokens=-3: wanted int or null, 1..1000000000000"),
        ("run.batch=65", "run.batch=65: wanted int, 1..64"),
        ("run.batch=null", "run.batch=null: wanted int, 1..64"),
        ("run.chunk=4097", "run.chunk=4097: wanted int, 1..4096"),
        ("run.threads=0", "run.threads=0: wanted int or null, 1..1024"),
        ("chat.thinking=1", "chat.thinking=1: wanted bool"),
        ("budgets=[7,128]", "budgets=[7,128]: wanted list of int, 0..127"),
        ("budgets=7", "budgets=7: wanted list of int, 0..127"),
        ("ids=[1,-2]", "ids=[1,-2]: wanted list of int or null, >= 0"),
        ("ids=[1,", "ids=[1,: wanted list of int or null, >= 0"),
        ("dtype=float16", "dtype=float16: wanted auto, float32 or bfloat16"),
        ("step.mode=on", "step.mode=on: wanted plain, chain or tree"),
        ("device=null", "device=null: wanted str"),
        ("sampling.top_p=0", "sampling.top_p=0: wanted finite float or null, 1e-06..1"),
        ("sampling.temperature=.nan", "sampling.temperature=.nan: wanted finite float or null, >= 0"),
        ("sampling.grammar=x", "sampling.grammar=x: not supported, leave it out"),
        ("sampling.stop=", "sampling.stop=('',): an empty string would end every text at once"),
        ("sampling.min_tokens=300", "sampling.min_tokens=300: more than max_tokens, which is 256"),
    ],
)
def test_one_problem(override: str, line: str) -> None:
    assert problems(override) == [line]


def test_settings_in_conflict() -> None:
    assert problems("step=plain", "step.budget=3") == [
        "step.budget=3: step.mode=plain drafts nothing; choose step=tree or chain"
    ]
    assert load_config(["step=plain", "step.budget=0"]).step.budget == 0
    assert problems("sampling.max_tokens=3", "sampling.max_new_tokens=4") == [
        "sampling.max_tokens=3 and max_new_tokens=4: names of one parameter with different values, give one"
    ]
    assert len(problems("sampling.no_stop_trim=true", "sampling.include_stop_str_in_output=false")) == 1


def test_all_problems_at_once() -> None:
    bad = ["step.bugdet=1", "step=tre", "run.batch=abc", "nothing", "step.budget=128", "sampling.n=0",
           "sampling.max_tokens=1", "sampling.min_tokens=2", "step.mode=plain", "line\nbreak=1"]  # fmt: skip
    found = problems(*bad)
    for start in ("step.bugdet=1", "step=tre", "run.batch=abc", "nothing", "step.budget=128", "sampling.n=0",
                  "sampling.min_tokens=2", "'line\\nbreak'=1"):  # fmt: skip
        assert sum(line.startswith(f"{start}: ") for line in found) == 1, start
    assert len(found) == 8


def test_a_single_string_is_no_list_of_overrides() -> None:
    with pytest.raises(ConfigError, match="wanted a list"):
        load_config("step.budget=3")


def test_nearest_name() -> None:
    assert nearest("temperatur", ["top_p", "temperature"]) == "temperature"
    assert nearest("qqq", ["top_p", "temperature"]) is None


# Sampling parameters: what each may be, said a second time


def whole(low: float, high: float = math.inf):
    return lambda v: type(v) is int and low <= v <= high


def real(low: float, high: float, above: bool = False):
    """A number of this range that float32 can hold."""
    biggest = (2 - 2**-23) * 2.0**127
    return lambda v: type(v) in (int, float) and low <= v <= min(high, biggest) and not (above and v == low)


def null_or(rule):
    return lambda v: v is None or rule(v)


RULES = {
    "max_tokens": null_or(whole(0)),
    "max_new_tokens": null_or(whole(0)),
    "max_completion_tokens": null_or(whole(0)),
    "min_tokens": null_or(whole(0, 256)),  # above: more than the default max_tokens
    "min_new_tokens": null_or(whole(0, 256)),
    "temperature": null_or(real(0, math.inf)),
    "top_p": null_or(real(1e-6, 1)),
    "top_k": null_or(whole(-1)),
    "min_p": real(0, 1),
    "seed": null_or(whole(-(2**63), 2**64 - 1)),
    "n": whole(1, 1024),
    "stop": lambda v: isinstance(v, str) and v != "",
    "stop_token_ids": lambda v: v == "never one of these",
    "ignore_eos": lambda v: type(v) is bool,
    "include_stop_str_in_output": lambda v: type(v) is bool,
    "no_stop_trim": lambda v: type(v) is bool,
    "skip_special_tokens": lambda v: type(v) is bool,
    "logprobs": null_or(whole(0, 20)),
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "repetition_penalty": real(0.01, 100),
    "logit_bias": lambda v: v is None,
    "grammar": lambda v: v is None,
    "prompt_logprobs": lambda v: v is None,
    "tools": lambda v: v is None,
}
VALUES = (
    None, True, False, 0, 1, 2, -1, -2, 20, 21, 257, 2**63, -(2**63), 2**64, -(2**63) - 1, 10**400,
    1.0, 2.0, 1.5, -2.5, 1e-9, 1e39, math.nan, math.inf, -math.inf, "", "2", "hot", b"x", object, 1j,
)  # fmt: skip


def test_every_parameter_has_a_rule() -> None:
    assert set(RULES) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("build", ["direct", "keywords"])
def test_sampling_values(name: str, build: str) -> None:
    for value in VALUES:
        try:
            if build == "direct":
                SamplingParams(**{name: value})
            else:
                sampling_from({name: value}, SamplingParams(temperature=0.5))
            taken = True
        except ValueError as error:
            taken = False
            plain = "min_tokens" if name == "min_new_tokens" else name  # the name used in conflicts
            assert str(error).startswith((f"{name}={value!r}: ", f"{plain}={value!r}: more than")), error
        assert taken == RULES[name](value), (name, value)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(RULES)), st.one_of(st.integers(), st.floats(), st.booleans()))
def test_any_number_for_any_parameter(name: str, value: object) -> None:
    try:
        SamplingParams(**{name: value})
        taken = True
    except ValueError:
        taken = False
    assert taken == RULES[name](value)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("stop", ["a", ["a", "b"], ("a",), (), []], [[""], ["a", ""], [1], [None], {"a"}, ["a", ["b"]]]),
        ("stop_token_ids", [(), [1, 2], (0,)], [[-1], [1.0], ["1"], [True], 3, "3", None, {1}]),
        (
            "logit_bias",
            [{}, {5: 1}, {0: -1e9}, {1: 1e9}],
            [{5: math.nan}, {5: math.inf}, {5: -math.inf}, {5: 1.1e9}, {5: "1"}, {5: None}, {5: True},
             {"5": 1.0}, {5.0: 1.0}, {-1: 1.0}, [5], [(5, 1.0)]],
        ),
    ],
)  # fmt: skip
def test_sampling_lists_and_maps(name: str, good: list, bad: list) -> None:
    for value in good:
        held = getattr(SamplingParams(**{name: value}), name)
        assert held == ((value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name}[=:]"):
            SamplingParams(**{name: value})


def test_sampling_errors_name_field_value_and_range() -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(temperature="hot", top_k=1.5, n="2", logprobs=21)
    assert str(caught.value).splitlines() == [
        "temperature='hot': wanted finite float or null, >= 0",
        "top_k=1.5: wanted int or null, >= -1",
        "n='2': wanted int, 1..1024",
        "logprobs=21: wanted int or null, 0..20",
    ]


def test_synonyms_read_as_one() -> None:
    assert SamplingParams().limit is None and SamplingParams().least == 0
    for name in ("max_tokens", "max_new_tokens", "max_completion_tokens"):
        assert SamplingParams(**{name: 0}).limit == 0
        assert SamplingParams(**{name: 7}).limit == 7
    assert SamplingParams(max_tokens=3, max_completion_tokens=3).limit == 3
    assert SamplingParams(min_tokens=2).least == SamplingParams(min_new_tokens=2).least == 2
    assert SamplingParams(min_tokens=0, min_new_tokens=0).least == 0
    assert SamplingParams(no_stop_trim=True).keep_stop and not SamplingParams().keep_stop
    assert SamplingParams(include_stop_str_in_output=True).keep_stop
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    for first, second in (
        ("max_tokens", "max_new_tokens"),
        ("max_new_tokens", "max_completion_tokens"),
        ("min_tokens", "min_new_tokens"),
    ):
        with pytest.raises(ValueError, match=f"{first}=0 and {second}=1"):
            SamplingParams(**{first: 0, second: 1})


def test_more_minimum_than_maximum() -> None:
    assert SamplingParams(min_tokens=300, max_new_tokens=300).least == 300
    with pytest.raises(ValueError, match="^min_tokens=4: more than max_tokens, which is 3$"):
        SamplingParams(max_completion_tokens=3, min_new_tokens=4)


def test_keywords_override_the_base() -> None:
    base = SamplingParams(max_tokens=5, min_new_tokens=1, include_stop_str_in_output=True, temperature=0.5)
    assert sampling_from({}, base) == base
    changed = sampling_from({"max_new_tokens": 9, "no_stop_trim": False, "min_tokens": 2, "top_k": 3}, base)
    assert (changed.limit, changed.least, changed.keep_stop) == (9, 2, False)
    assert (changed.top_k, changed.temperature) == (3, 0.5)
    assert sampling_from({"max_completion_tokens": None}, base).limit is None
    assert sampling_from({"max_tokens": 9, "max_new_tokens": None}, base).limit == 9
    with pytest.raises(ValueError, match="^min_tokens=6: more than max_tokens, which is 5$"):
        sampling_from({"min_tokens": 6}, base)


def test_keyword_problems_all_at_once() -> None:
    kwargs = {"temprature": 1, "qqq": 2, "top_p": 2.0, "max_tokens": 1, "max_new_tokens": 2,
              "include_stop_str_in_output": True, "no_stop_trim": False, "tools": [{}]}  # fmt: skip
    with pytest.raises(ValueError) as caught:
        sampling_from(kwargs, SamplingParams())
    conflict = "names of one parameter with different values, give one"
    assert set(str(caught.value).splitlines()) == {
        "temprature: no such sampling parameter; did you mean temperature?",
        "qqq: no such sampling parameter",
        "top_p=2.0: wanted finite float or null, 1e-06..1",
        f"max_tokens=1 and max_new_tokens=2: {conflict}",
        f"include_stop_str_in_output=True and no_stop_trim=False: {conflict}",
        "tools=[{}]: not supported, leave it out",
    }


# The table of keys, and what the presets say of the published models


def test_table_of_keys_is_the_dataclasses() -> None:
    rows = {}
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        if match := re.match(r"\| `([\w.]+)` \| (.*?) \| `(.*)` \| (.*?) ?\| (.*) \|$", line):
            assert match[1] not in rows
            rows[match[1]] = match.groups()[1:]
    keys = dataclass_keys()
    assert list(rows) == list(keys)
    types = {
        "str | None": "str or null", "float | None": "finite float or null", "int | None": "int or null",
        "<class 'float'>": "finite float", "<class 'int'>": "int",
        "<class 'bool'>": "bool", "bool | None": "bool or null", "<class 'str'>": "str",
        "tuple[str, ...]": "list of str", "tuple[int, ...]": "list of int",
        "tuple[int, ...] | None": "list of int or null",
        "dict[int, float] | None": "map of int to finite float or null",
        "typing.Literal['plain', 'chain', 'tree']": "plain, chain or tree",
        "typing.Literal['auto', 'float32', 'bfloat16']": "auto, float32 or bfloat16",
        "typing.Literal['auto', 'reference']": "auto or reference",
        "typing.Literal['text', 'json']": "text or json",
        "typing.Literal['inductor', 'tensorrt']": "inductor or tensorrt",
    }  # fmt: skip
    for row in resolve([]):
        kind, default, limit, _ = rows[row.key]
        _, field, value = keys[row.key]
        assert kind == types[str(field.type)], row.key
        stated = yaml.safe_load(default)
        assert (tuple(stated) if isinstance(stated, list) else stated) == value, row.key
        assert row.type == (f"{kind}, {limit}" if limit else kind), row.key


def test_table_of_keys_says_what_the_fields_say() -> None:
    tree = ast.parse(Path(config_module.__file__).read_text())
    said = {}
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                said[node.name, statement.target.id] = " ".join(text.value.value.split())
    table = (ROOT / "docs" / "config.md").read_text()
    for key, (owner, field, _) in dataclass_keys().items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{key}` |"))
        assert row.endswith(f" | {said[owner.__name__, field.name]} |"), key


def test_geometry_of_kimi_k2_6_counts_its_parameters() -> None:
    c = json.loads((conf_folder() / "target/kimi_k2_6/config.json").read_text())["text_config"]
    D, H, V, L, Q = (c[f"{key}"] for key in (
        "hidden_size", "num_attention_heads", "vocab_size", "kv_lora_rank", "q_lora_rank"))  # fmt: skip
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    attention = Q * D + Q + H * (nope + rope) * Q + (L + rope) * D + L  # down to queries and latent
    attention += H * (nope + value) * L + D * H * value
    expert, E = 3 * D * c["moe_intermediate_size"], c["n_routed_experts"]
    dense, layers = c["first_k_dense_replace"], c["num_hidden_layers"]
    total = 2 * V * D + D + layers * (attention + 2 * D) + dense * 3 * D * c["intermediate_size"]
    total += (layers - dense) * ((E + c["n_shared_experts"]) * expert + E * D + E)
    assert total == 1_026_408_232_448


def test_geometry_of_the_kimi_drafter_counts_its_parameters() -> None:
    c = json.loads((conf_folder() / "drafter/kimi_k2_6_dflash/config.json").read_text())
    D, inner, head, taps = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["dflash_config"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    layer = 2 * D * heads * head + 2 * D * kv * head + 3 * D * inner + 2 * head + 2 * D
    assert c["num_hidden_layers"] * layer + len(taps["target_layer_ids"]) * D * D + 2 * D == 3_479_277_056
    assert taps["mask_token_id"] == c["vocab_size"] - 2 and c["block_size"] == 8


def test_settings_need_neither_torch_nor_omegaconf() -> None:
    code = f"""
import sys, types
package = types.ModuleType("kimi_fx")
package.__path__ = [{str(Path(config_module.__file__).parent)!r}]
sys.modules["kimi_fx"] = package
import kimi_fx.config
assert not {{"torch", "omegaconf", "yaml", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
