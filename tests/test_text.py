"""Incremental decoding and stop strings against one computation over the whole byte string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_fx.config import package_path
from kimi_fx.text import TextStream
from kimi_fx.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(package_path("kimi_fx:nano/kimi-nano"))
BYTES = [TOKENIZER.encoding.encode_single_token(bytes([byte])) for byte in range(256)]
EOS, THINK, END = 3841, 3862, 3842


def spell(text: str | bytes) -> list[int]:
    """One id a byte."""
    return [BYTES[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def token(text: str) -> int:
    """The one id of a text that is a token."""
    return TOKENIZER.encoding.encode_single_token(text)


def oracle(ids, stops, keep_stop, skip_special, min_tokens):
    """(text, kept, stop_reason): try every byte as the end of a stop string, in order."""
    shown = [b"" if skip_special and id in TOKENIZER.hidden else TOKENIZER.token_bytes(id) for id in ids]
    data = b"".join(shown)
    owner = [index for index, part in enumerate(shown) for _ in part]  # which id each byte belongs to
    for end in range(1, len(data) + 1):
        whole = [stop for stop in stops if data[:end].endswith(stop.encode())]
        if whole and owner[end - 1] >= min_tokens:
            stop = max(whole, key=lambda stop: len(stop.encode()))
            start = end - len(stop.encode())
            return data[: end if keep_stop else start].decode(errors="replace"), owner[end - 1] + 1, stop
    return data.decode(errors="replace"), len(ids), None


def run(ids, cuts, *options):
    """The stream fed in groups that end at `cuts`: (text, kept, stop_reason); checks the deltas."""
    stream = TextStream(TOKENIZER, *options)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = []
    for begin, end in zip(edges, edges[1:], strict=False):
        deltas.append(stream.push(ids[begin:end]))
        assert stream.text == "".join(deltas)
    deltas.append(stream.flush())
    assert stream.text == "".join(deltas) and stream.flush() == ""
    assert stream.ended == (stream.stop_reason is not None)
    return stream.text, stream.kept, stream.stop_reason


# Few letters, so that stop strings overlap; bytes of characters, valid and not; longer tokens; control ids.
ids_ = st.lists(
    st.sampled_from([*spell("abab"), token("def"), token("de"), token("in"), EOS, END, THINK, 3845])
    | st.sampled_from(spell(bytes.fromhex("e4b896f09fa7acc3a9eda0f480c0ff"))),
    max_size=24,
)
stops_ = st.lists(
    st.text("ab", min_size=1, max_size=4)
    | st.sampled_from(["世", "🧬", "é", "a世", "</think>", "nk>a", "[EOS]", "fd", "e"]),
    max_size=3,
)
cuts_ = st.lists(st.integers(0, 24), max_size=10)


@settings(deadline=None, max_examples=1000)
@given(ids_, cuts_, stops_, st.booleans(), st.booleans(), st.integers(0, 6))
def test_any_grouping_equals_the_oracle(ids, cuts, stops, keep_stop, skip_special, min_tokens):
    options = (stops, keep_stop, skip_special, min_tokens)
    assert run(ids, cuts, *options) == run(ids, [], *options) == oracle(ids, *options)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 4095), max_size=60), cuts_, st.booleans())
def test_without_stops_it_is_decode(ids, cuts, skip_special):
    text, kept, reason = run(ids, cuts, (), False, skip_special)
    assert (text, kept, reason) == (TOKENIZER.decode(ids, skip_special), len(ids), None)


@settings(deadline=None, max_examples=300)
@given(st.text("ab世🧬é"), stops_)
def test_no_more_is_held_than_undecided(text, stops):
    """What is not released begins a stop string, or is an incomplete character: nothing else is kept back."""
    stream, data = TextStream(TOKENIZER, stops), text.encode()
    for count, id in enumerate(spell(text), 1):
        stream.push([id])
        if stream.ended:
            break
        ends = [data[at:count] for at in range(count)]
        begins = [end for end in ends if any(stop.encode().startswith(end) for stop in stops)]
        sure = data[: count - max(map(len, begins), default=0)]
        assert stream.text == sure.decode(errors="ignore")


@pytest.mark.parametrize("group", [1, 2, 3, 9])
def test_characters_over_several_tokens(group):
    ids = spell("世🧬é")
    stream = TextStream(TOKENIZER)
    deltas = [stream.push(ids[at : at + group]) for at in range(0, 9, group)]
    assert "".join(deltas) == "世🧬é" and stream.flush() == ""


@pytest.mark.parametrize("text", ["世", "🧬"])
def test_cut_inside_a_character(text):
    stream = TextStream(TOKENIZER)
    assert stream.push(spell("x") + spell(text)[:2]) == "x"
    assert stream.flush() == "\ufffd" and stream.text == "x\ufffd"


@pytest.mark.parametrize("data", [b"\xff", b"\xc0", b"\xed\xa0", b"\xf4\x90", b"\xe4(", b"\x96"])
def test_what_can_never_be_valid_is_not_held(data):
    stream = TextStream(TOKENIZER)
    stream.push(spell(data + b"x"))
    assert stream.text == (data + b"x").decode(errors="replace") and stream.flush() == ""


def test_stop_over_tokens():
    stream = TextStream(TOKENIZER, ["de"])
    assert [stream.push([id]) for id in spell("bcdef")] == ["b", "c", "", "", ""]
    assert (stream.text, stream.kept, stream.stop_reason, stream.flush()) == ("bc", 4, "de", "")
    assert run(spell("bcdxdef"), [], ["de"]) == ("bcdx", 6, "de")


def test_stop_inside_one_token():
    ids = [token("def"), token(" import"), EOS]
    assert run(ids, [1], ["po"]) == ("def im", 2, "po")
    assert run(ids, [1], ["po"], True) == ("def impo", 2, "po")


def test_stop_emoji_over_four_tokens():
    stream = TextStream(TOKENIZER, ["🧬"])
    assert [stream.push([id]) for id in spell("a🧬b")] == ["a", "", "", "", "", ""]
    assert (stream.kept, stream.stop_reason) == (5, "🧬")
    assert run(spell("a🧀b"), range(9), ["🧬"])[0] == "a🧀b"
    assert run(spell("a?b"), [], ["\ud800"]) == ("a?b", 3, None)  # no text has a lone surrogate


def test_first_complete_stop_wins_then_the_longest():
    assert run(spell("abcd"), [], ["abcd", "bc"]) == ("a", 3, "bc")
    assert run(spell("abcd"), [], ["bc", "abc"]) == ("", 3, "abc")
    assert run([token("def")], [], ["def", "e"]) == ("d", 1, "e")


def test_min_tokens_ignores_an_early_stop():
    stream = TextStream(TOKENIZER, ["aa"], min_tokens=2)
    assert [stream.push([id]) for id in spell("aaa")] == ["", "a", ""]
    assert (stream.text, stream.kept, stream.stop_reason) == ("a", 3, "aa")
    assert run(spell("abc"), [1, 2], ["ab", "abb"], False, True, 2) == ("abc", 3, None)
    assert run(spell("aabaac"), [], ["aa"], False, True, 5) == ("aabaac", 6, None)


def test_control_ids_have_no_text():
    ids = [*spell("a"), THINK, *spell("b"), END, EOS]
    assert run(ids, [], ()) == ("a<think>b", 5, None)
    assert run(ids, [], (), False, False) == ("a<think>b<|im_end|>[EOS]", 5, None)
    assert run(ids, [2], ["k>b"]) == ("a<thin", 3, "k>b")
