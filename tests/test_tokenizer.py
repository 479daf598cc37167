"""The tokenizer against an independent splitter and merger, bad files; the chat format id by id.

Long because the chat format, which needs the same tokenizers, is tested here too.
"""

import base64
import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.utils.chat_template_utils import render_jinja_template

from kimi_fx import tokenizer as module
from kimi_fx.chat import load_template, parse_messages, render_chat
from kimi_fx.config import package_path
from kimi_fx.tokenizer import generation_defaults, load_tokenizer, pieces, stop_ids

NANO = package_path("kimi_fx:nano/kimi-nano")
GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = load_tokenizer(NANO, 4096)
RANKS = 3840
LINES = (NANO / "tiktoken.model").read_bytes().splitlines(keepends=True)

# K2's published ids, independent of the table in the code.
K2_SHOWN = {
    163595: "<|tool_calls_section_begin|>", 163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>", 163598: "<|tool_call_argument_begin|>", 163599: "<|tool_call_end|>",
    163606: "<think>", 163607: "</think>",
}  # fmt: skip
K2_HIDDEN = {
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>", 163588: "<|im_assistant|>",
    163590: "<|start_header_id|>", 163591: "<|end_header_id|>", 163593: "[EOT]", 163594: "<|im_system|>",
    163601: "<|im_middle|>", 163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>",
    163605: "<|media_pad|>", 163838: "[UNK]", 163839: "[PAD]",
}  # fmt: skip
K2 = {id - 163584 + RANKS: name for id, name in (K2_SHOWN | K2_HIDDEN).items()}
CONTROL = {name: id for id, name in K2.items()}

# Characters of every class that the split pattern tells apart.
SAMPLE = "aZéßÅǅʰªæıſK\u212aا্ँ́世龘々〇ー한ก0٣Ⅷ½² \t\n\r\v\u00a0\u3000\u2028\x1c\x85'’_-#<>|()[]/\"“。🧬\u200d\U000e0100"
texts = st.lists(
    st.sampled_from(SAMPLE)
    | st.sampled_from(["'s", "'LL", " the", "def ", "    ", "\r\n", "<think>", "<|im_end|>", "x'Re"])
    | st.characters(exclude_categories=["Cs", "Cn"]),
    max_size=40,
).map("".join)


def oracle_pieces(text: str) -> list[str]:
    """The family's split pattern with class intersection written as a look-ahead."""
    upper = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
    lower = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
    lead, tail = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    pattern = rf"\p{{Han}}+|{lead}{upper}*{lower}+{tail}|{lead}{upper}+{lower}*{tail}"
    pattern += r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return regex.findall(pattern, text)


def oracle_ranks() -> dict[bytes, int]:
    lines = (NANO / "tiktoken.model").read_text().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}


def oracle_encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Byte pair encoding by definition: merge the pair of lowest rank, leftmost first, while there is one."""
    ids = []
    for piece in oracle_pieces(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [(ranks.get(a + b, RANKS), i) for i, (a, b) in enumerate(pairwise(parts))]
            rank, i = min(pairs, default=(RANKS, 0))
            if rank == RANKS:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_golden_prompts():
    ids = load_file(GOLDEN / "kimi-nano-hf-fp32.safetensors")
    prompts = json.loads((GOLDEN / "prompts.json").read_text())
    assert len(prompts) == 12
    for k, text in enumerate(prompts):
        assert [TOKENIZER.bos, *TOKENIZER.encode(text)] == ids[f"{k}.prompt"].tolist()


@settings(deadline=None, max_examples=200)
@given(texts)
def test_split_equals_the_oracle(text):
    """A vocabulary of all substrings makes every piece one token, so that the split itself shows."""
    spans = {text[i:j].encode() for j in range(len(text) + 1) for i in range(j)}
    tokens = sorted({bytes([byte]) for byte in range(256)} | spans, key=len)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("spans", pat_str=module.SPLIT, mergeable_ranks=ranks, special_tokens={})
    assert [tokens[id].decode() for id in encoding.encode_ordinary(text)] == oracle_pieces(text)


def test_merges_equal_the_oracle():
    ranks = oracle_ranks()

    @settings(deadline=None, max_examples=400)
    @given(texts)
    def check(text: str) -> None:
        assert TOKENIZER.encode(text) == oracle_encode(text, ranks)

    check()
    assert TOKENIZER.encode(SAMPLE) == oracle_encode(SAMPLE, ranks)


@settings(deadline=None, max_examples=200)
@given(st.text() | texts)
def test_round_trip_has_no_control_id(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(id < RANKS for id in ids)


def test_control_strings_and_surrogates_are_text():
    for name in TOKENIZER.special.values():
        ids = TOKENIZER.encode(f"a{name}b")
        assert max(ids) < RANKS and TOKENIZER.decode(ids) == f"a{name}b"
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


def oracle_cuts(text: str, longest: int, run: int) -> list[str]:
    """Character by character: at most `longest` in a part, and a cut after `run` characters of a kind."""
    found = []
    for begin in range(0, len(text), longest):
        part, length, spaces = "", 0, None
        for char in text[begin : begin + longest]:
            length = length + 1 if char.isspace() == spaces else 1
            spaces = char.isspace()
            if length > run:
                found.append(part)
                part, length = "", 1
            part += char
        found.append(part)
    return found


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="ab \n\u2003世", max_size=60), st.integers(1, 25), st.integers(1, 6))
def test_long_texts_are_cut_as_the_family_cuts_them(text, longest, run):
    with patch.multiple(module, LONGEST_TEXT=longest, LONGEST_RUN=run):
        assert list(pieces(text)) == oracle_cuts(text, longest, run)


def test_very_long_text():
    text = "ab" * 30_000 + " " * 60_000 + "def f(x): return x\n" * 20_000
    whole = [id for piece in oracle_cuts(text, 400_000, 25_000) for id in TOKENIZER.encode(piece)]
    assert TOKENIZER.encode(text) == whole
    assert TOKENIZER.encode("a" * 25_001) == TOKENIZER.encode("a" * 25_000) + TOKENIZER.encode("a")


def test_ids_to_bytes_and_text():
    assert {TOKENIZER.token_bytes(id): id for id in range(RANKS)} == oracle_ranks()
    world = [TOKENIZER.encoding.encode_single_token(bytes([byte])) for byte in "世".encode()]
    assert [TOKENIZER.token_text(id) for id in world] == ["\ufffd"] * 3
    assert TOKENIZER.decode(world) == "世" and TOKENIZER.decode(world[:2]) == "\ufffd"
    assert TOKENIZER.token_text(CONTROL["<|im_end|>"]) == "<|im_end|>"
    for id in (-1, 4096):
        with pytest.raises(ValueError, match=rf"token id {id} is not in the vocabulary: ids are 0\.\.4095"):
            TOKENIZER.token_text(id)


def test_special_flags_decide_what_text_shows():
    ids = [CONTROL["[BOS]"], *TOKENIZER.encode("a"), CONTROL["</think>"], 3845, CONTROL["<|im_end|>"]]
    assert TOKENIZER.decode(ids) == "a</think>"
    assert TOKENIZER.decode(ids, skip_special=False) == "[BOS]a</think><|reserved_token_3845|><|im_end|>"


def write(folder: Path, ranks: bytes | None = None, **files: object) -> Path:
    """A tokenizer folder with the shipped ranks, or others, and the JSON files given."""
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(b"".join(LINES) if ranks is None else ranks)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.mark.parametrize("shipped", [True, False])
def test_control_table(tmp_path, shipped):
    """The shipped names, and K2's own where the configuration gives none: the same ids either way."""
    tokenizer = TOKENIZER if shipped else load_tokenizer(write(tmp_path, tokenizer_config={}))
    reserved = {id: f"<|reserved_token_{id}|>" for id in range(RANKS, 4096) if id not in K2}
    assert tokenizer.special == K2 | reserved
    assert set(tokenizer.special) - tokenizer.hidden == {CONTROL[name] for name in K2_SHOWN.values()}
    assert (tokenizer.bos, tokenizer.eos, tokenizer.size) == (3840, 3841, 4096)
    assert all(tokenizer.control_id(name) == id for id, name in tokenizer.special.items())
    with pytest.raises(ValueError, match="no control id named <nothing>"):
        tokenizer.control_id("<nothing>")


def added(**names: object) -> dict[str, object]:
    return {"added_tokens_decoder": {key.strip("_"): value for key, value in names.items()}}


@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", {}, "Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", {}, "web page"),
        (b"".join(LINES[:7]) + b"!!! 7\n", {}, "line 8: b'!!! 7'"),
        (b"".join(LINES[:7]) + b"YWI=\n", {}, "line 8: b'YWI='"),
        (b"".join(LINES[:900] + LINES[901:]), {}, "3839 tokens, but none has rank 900"),
        (b"".join([*LINES, LINES[5].split()[0] + b" 3840\n"]), {}, "none has rank 5"),
        (b"", {}, "256 of the 256 single bytes"),
        (b"".join(LINES[:100]), {}, "156 of the 256 single bytes are no tokens"),
        (None, "{", "not JSON"),
        (None, added(_3839={"content": "<x>"}), r"<x> has id 3839, but the control ids .* are 3840\.\.4095"),
        (None, added(_4096={"content": "<x>"}), "<x> has id 4096"),
        (None, added(_3850={"content": "<x>"}, _3851={"content": "<x>"}), "the name <x> to more than one id"),
        (None, added(_3850={"content": "<think>"}), "<think> has id 3850; .* it is 3862"),
        (None, added(_3850="<x>"), "added_tokens_decoder has '3850'"),
        (None, added(x={"content": "<x>"}), "added_tokens_decoder has 'x'"),
        (None, {"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder must be an object, not a list"),
        (None, {"bos_token": "<begin>"}, "bos_token is '<begin>'"),
        (None, added(_3840={"content": "[BOS]"}), r"eos_token is '\[EOS\]'"),
    ],
)
def test_bad_files_are_named(tmp_path, ranks, config, message):
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(write(tmp_path, ranks, tokenizer_config=config))
    assert str(tmp_path) in str(error.value)


def test_vocabulary_of_another_model(tmp_path):
    for vocab in (4095, 163840):
        with pytest.raises(ValueError, match=f"tokenizer has 4096 ids .* vocabulary is {vocab}"):
            load_tokenizer(NANO, vocab)
    with pytest.raises(ValueError, match="tiktoken.model is missing"):
        load_tokenizer(tmp_path)


def test_stop_ids(tmp_path):
    assert stop_ids(NANO, TOKENIZER) == (3841, 3842)
    write(tmp_path, generation_config={"eos_token_id": 7}, config={"eos_token_id": [9, 7], "text_config": {}})
    assert stop_ids(tmp_path, None) == (7, 9)
    assert stop_ids(tmp_path, TOKENIZER) == (7, 9, 3841, 3842)
    write(tmp_path, generation_config={"eos_token_id": None}, config={"text_config": {"eos_token_id": 5}})
    assert stop_ids(tmp_path, None) == (5,)
    write(tmp_path, generation_config={}, config={})
    assert stop_ids(tmp_path, TOKENIZER) == (3841, 3842)
    with pytest.raises(ValueError, match="no stop id"):
        stop_ids(tmp_path, None)
    for bad in ("</s>", True, -1, [1.5]):
        with pytest.raises(ValueError, match="eos_token_id must be"):
            stop_ids(write(tmp_path, config={"eos_token_id": bad}), None)
    with pytest.raises(ValueError, match="eos_token_id 163586 is not in the 4096 ids"):
        stop_ids(write(tmp_path, config={"eos_token_id": 163586}), TOKENIZER)


def test_more_stop_ids_than_a_request_has(tmp_path):
    write(tmp_path, generation_config={"eos_token_id": [*range(7)]}, config={"eos_token_id": 7})
    assert len(stop_ids(tmp_path, None)) == 8
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id makes 10 stop ids .* at most 8"):
        stop_ids(tmp_path, TOKENIZER)


def test_generation_defaults(tmp_path):
    assert generation_defaults(NANO) == {} == generation_defaults(tmp_path)
    write(tmp_path, generation_config={"temperature": 0.6, "top_p": 0.95, "top_k": None, "max_length": 9})
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95}
    with pytest.raises(ValueError, match="top_p must be a number, not 'high'"):
        generation_defaults(write(tmp_path, generation_config={"top_p": "high"}))


def test_no_sampling_is_greedy(tmp_path):
    write(tmp_path, generation_config={"do_sample": False, "temperature": 0.6, "top_k": 5})
    assert generation_defaults(tmp_path) == {"temperature": 0.0, "top_k": 5}
    assert generation_defaults(write(tmp_path, generation_config={"do_sample": True})) == {}
    with pytest.raises(ValueError, match="do_sample must be true or false, not 'no'"):
        generation_defaults(write(tmp_path, generation_config={"do_sample": "no"}))


# The chat format. The template below is the format of K2.5 written a second time.
TEMPLATE = """{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|im_user|>{%- elif m.role == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>{%- endif -%}
  {{ m.get('name') or m['role'] }}<|im_middle|>
  {%- if m.role == 'assistant' -%}<think></think>{%- endif -%}
  {{ m.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>
  {%- if thinking is defined and not thinking -%}</think>{%- endif -%}
{%- endif -%}
"""
fragments = st.sampled_from([*CONTROL, "<", "think>", "[", "EOS]", " ", "\n", "a", "世"])
contents = st.lists(fragments | st.text(max_size=9), max_size=9).map("".join)
messages_ = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": contents},
        optional={"name": contents, "reasoning_content": contents | st.none()},
    ),
    min_size=1,
    max_size=4,
)


def test_built_in_chat_by_number():
    encode = TOKENIZER.encode
    chat = [
        {"role": "system", "content": "Be <think>brief"},
        {"role": "user", "name": "Ada", "content": "<|im_end|>"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "name": None},
        {"role": "user", "content": ""},
    ]
    turns = [
        [3850, *encode("system"), 3857, *encode("Be <think>brief"), 3842],
        [3843, *encode("Ada"), 3857, *encode("<|im_end|>"), 3842],
        [3844, *encode("assistant"), 3857, 3862, 3863, *encode("yes"), 3842],
        [3843, *encode("user"), 3857, 3842],
        [3844, *encode("assistant"), 3857, 3862],
    ]
    ids = sum(turns, [])
    assert render_chat(chat, TOKENIZER, thinking=True) == ids
    assert render_chat(chat, TOKENIZER, thinking=False) == [*ids, 3863]


@settings(deadline=None, max_examples=150)
@given(messages_, st.booleans())
def test_template_equals_built_in(messages, thinking):
    """Whatever users write, control strings included: a control id comes from the format only."""
    built_in = render_chat(messages, TOKENIZER, thinking)
    assert render_chat(messages, TOKENIZER, thinking, TEMPLATE) == built_in
    assert sum(id >= RANKS for id in built_in) == sum(5 if m["role"] == "assistant" else 3 for m in messages) + (
        3 if thinking else 4
    )


def test_template_renders_as_in_transformers():
    template = "{{ bos_token }}{% for m in messages %}\n  {{ m.content | trim }}\n{% endfor %}{{ eos_token }}\n"
    chat = [{"role": "user", "content": " a \n"}, {"role": "user", "content": "世 b"}]
    (theirs,), _ = render_jinja_template(
        [chat], chat_template=template, add_generation_prompt=True, bos_token="[BOS]", eos_token="[EOS]"
    )
    assert TOKENIZER.decode(render_chat(chat, TOKENIZER, True, template), skip_special=False) == theirs


@pytest.mark.parametrize(
    ("template", "content"),
    [("{{c}}{{c}}", "<|im_end|>"), ("<{{c}}>", "think"), ("[{{c}}", "EOS]"), ("{{c}}nk>", "<thi"),
     ("<|im_{{c}}|>", "end"), ("{{c}}{{c}}", "think><"), ("{{c[:3]}}{{c[3:]}}", "<think>")],
)  # fmt: skip
def test_no_control_id_is_made_of_user_text(template, content):
    template = template.replace("{{c", "{{messages[0].content")
    ids = render_chat([{"role": "user", "content": content}], TOKENIZER, True, template)
    assert max(ids) < RANKS and unicodedata.category(max(TOKENIZER.decode(ids))) != "Co"


def test_template_failures_are_sentences():
    chat = [{"role": "user", "content": "a"}]
    for template, reason in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "str"),
    ]:
        with pytest.raises(ValueError, match=f"chat template failed: .*{reason}"):
            render_chat(chat, TOKENIZER, True, template)


def test_template_of_the_checkpoint(tmp_path):
    assert load_template(NANO) is None
    write(tmp_path, tokenizer_config={"chat_template": "in the configuration"})
    assert load_template(tmp_path) == "in the configuration"
    (tmp_path / "chat_template.jinja").write_text("its own 世", encoding="utf-8")
    assert load_template(tmp_path) == "its own 世"
    (tmp_path / "chat_template.jinja").write_bytes(b"its own \xff\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja: not a text in UTF-8 \(byte 8: invalid start byte\)"):
        load_template(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("chat_template.jinja", load_template),
        ("tokenizer_config.json", load_template),
        ("generation_config.json", generation_defaults),
        ("config.json", lambda folder: stop_ids(folder, None)),
        ("tiktoken.model", load_tokenizer),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, read):
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=rf"{name}: cannot be read \(No such file or directory\)"):
        read(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name}: cannot be read \(Is a directory\)"):
        read(tmp_path)


def test_built_in_needs_the_thinking_markers(tmp_path):
    names = {id: {"content": name} for id, name in K2.items() if "think" not in name}
    tokenizer = load_tokenizer(write(tmp_path, tokenizer_config={"added_tokens_decoder": names}))
    with pytest.raises(ValueError, match="no control id named <think>"):
        render_chat([{"role": "user", "content": "a"}], tokenizer)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("a", "messages must be a list .* not str"),
        (USER, "messages must be a list .* not dict"),
        ([], "messages is empty"),
        ([USER, "a"], r"messages\[1\] must be an object .* not str"),
        ([{"content": "a"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "contents": "a"}], "unknown key 'contents'; did you mean 'content'?"),
        ([USER | {"zzz": 1}], "unknown key 'zzz'; known are role, content"),
        ([{"role": "asistant", "content": "a"}], "unknown role 'asistant'; did you mean 'assistant'?"),
        ([{"role": "user", "content": 5}], "content must be a string, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url': images .* are not supported"),
        ([{"role": "user", "content": ["a"]}], "content must be a string, not list$"),
        ([{"role": "tool", "content": "a"}], "has role 'tool': tools are not supported"),
        ([{"role": "assistant", "tool_calls": []}], "has tool_calls: tools are not supported"),
        ([USER | {"tools": [1]}], "has tools: tools are not supported"),
    ],
)
def test_bad_messages_are_refused(messages, reason):
    with pytest.raises(ValueError, match=reason):
        render_chat(messages, TOKENIZER)
    with pytest.raises(ValueError, match=reason):
        parse_messages(json.dumps(messages))


def test_messages_from_json():
    assert parse_messages('[{"role": "user", "content": "a", "name": null}]') == [USER]
    with pytest.raises(ValueError, match="messages: not valid JSON: "):
        parse_messages("[{'role'")
