"""Where a request ends: stop ids, stop strings, lengths, in every mode and with every kind of draft. COUNTER counts."""

import pytest

from oracles.toys import ahead, byte_tokenizer, counter, engine_of, following, scripted, story, toy

MODES = [("plain", None), ("chain", None), ("tree", 7), ("tree", 60)]
DRAFTS = {
    "right": ahead(1),
    "wrong": ahead(3),
    "second best": ahead(2),
    "best and second best": ahead(1, 2),
    "token 0": lambda anchor, d: [0],
}
every_mode = pytest.mark.parametrize(("mode", "budget"), MODES)
every_draft = pytest.mark.parametrize("draft", DRAFTS)


@pytest.fixture(scope="module")
def counts():
    return engine_of(toy(counter(), stop_ids=[9]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["stop!", "xyz"])


@pytest.fixture
def tell(tokenizer, monkeypatch):
    """Generate a text whose ids are given, each once, drafted right; the first id is the prompt."""

    def run(ids, *, start=0, stop_ids=(), **how):
        table = story(ids, tokenizer.size)
        scripted(monkeypatch, following(table))
        engine = engine_of(toy(table, stop_ids or [tokenizer.eos], tokenizer))
        return engine.generate(list(ids[: start + 1]), temperature=0, **how)

    return run


@every_draft
@every_mode
def test_counter_stops_at_its_stop_id(counts, monkeypatch, mode, budget, draft):
    scripted(monkeypatch, DRAFTS[draft])
    done = counts.generate([5], temperature=0, mode=mode, budget=budget).outputs[0]
    assert done.token_ids == (6, 7, 8, 9)
    assert (done.finish_reason, done.stop_reason) == ("stop", None)


@every_mode
def test_stop_id_in_a_wrong_draft_does_not_stop(counts, monkeypatch, mode, budget):
    scripted(monkeypatch, lambda anchor, d: [9])
    done = counts.generate([20], temperature=0, max_tokens=10, mode=mode, budget=budget).outputs[0]
    assert done.token_ids == tuple(range(21, 31))
    assert (done.finish_reason, done.stop_reason) == ("length", None)


@pytest.mark.parametrize(("draft", "length"), [("right", 8), ("second best", 1), ("best and second best", 8)])
def test_second_best_is_never_taken(counts, monkeypatch, draft, length):
    """A wide tree holds the second best at every depth; only the best is walked."""
    scripted(monkeypatch, DRAFTS[draft])
    done = counts.generate([10], temperature=0, max_tokens=33, mode="tree", budget=60).outputs[0]
    assert done.token_ids == tuple(range(11, 44))
    assert done.stats.acceptance_length == length


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 9, 16, 17])
@every_mode
def test_max_tokens_is_exact(counts, monkeypatch, mode, budget, tokens):
    scripted(monkeypatch, DRAFTS["right"])
    result = counts.generate([10], temperature=0, max_tokens=tokens, mode=mode, budget=budget)
    done = result.outputs[0]
    assert done.token_ids == tuple(range(11, 11 + tokens))
    assert done.finish_reason == "length" and result.usage.completion_tokens == tokens


@every_mode
def test_longest_request(monkeypatch, mode, budget):
    """60 + 4 tokens fill a context of 64; nothing lands beyond, although the drafter proposes more."""
    scripted(monkeypatch, DRAFTS["right"])
    engine = engine_of(toy(counter(), stop_ids=[47]), "cache.max_len=64", "cache.tokens=128")
    for limit in ({"max_tokens": 4}, {}):
        done = engine.generate([*[0] * 59, 5], temperature=0, mode=mode, budget=budget, **limit).outputs[0]
        assert (done.token_ids, done.finish_reason) == ((6, 7, 8, 9), "length")
    written = engine.pool.target.abs().sum((0, 3)) > 0  # [P, 64]
    assert written.sum() == 63 and not written[0, 63]  # the last token is never read, so never written
    with pytest.raises(ValueError, match="max_tokens=5 after a prompt of 60 tokens .* 64: at most 4 fit"):
        engine.generate([0] * 60, max_tokens=5)
    for n in (64, 65):
        with pytest.raises(ValueError, match=f"prompt has {n} tokens and the context holds 64"):
            engine.generate([0] * n)


def test_unset_max_tokens_is_256_or_what_fits(counts):
    assert len(counts.generate([10], temperature=0, ignore_eos=True).outputs[0].token_ids) == 256
    assert len(counts.generate([10] * 500, temperature=0, ignore_eos=True).outputs[0].token_ids) == 12


@every_mode
def test_stop_ids_of_the_request(counts, monkeypatch, mode, budget):
    scripted(monkeypatch, DRAFTS["right"])
    how = {"temperature": 0, "mode": mode, "budget": budget}
    asked = counts.generate([2], stop_token_ids=[30, 7], **how).outputs[0]
    assert (asked.token_ids, asked.finish_reason, asked.stop_reason) == ((3, 4, 5, 6, 7), "stop", 7)
    own = counts.generate([2], stop_token_ids=[30], **how).outputs[0]
    assert (own.token_ids[-1], own.finish_reason, own.stop_reason) == (9, "stop", None)
    ignored = counts.generate([2], stop_token_ids=[13], ignore_eos=True, **how).outputs[0]
    assert (ignored.token_ids, ignored.stop_reason) == (tuple(range(3, 14)), 13)


@every_mode
def test_no_stop_before_min_tokens(counts, monkeypatch, mode, budget):
    """At 8 the stop id 9 is best; until three tokens are out its place is taken by the second best, 10."""
    scripted(monkeypatch, DRAFTS["right"])
    how = {"temperature": 0, "mode": mode, "budget": budget, "max_tokens": 6}
    early = counts.generate([6], min_tokens=2, **how).outputs[0]
    assert (early.token_ids, early.finish_reason) == ((7, 8, 9), "stop")
    late = counts.generate([6], min_tokens=3, **how).outputs[0]
    assert (late.token_ids, late.finish_reason) == ((7, 8, 10, 11, 12, 13), "length")


def test_too_many_stop_ids(counts):
    with pytest.raises(ValueError, match="9 stop ids were asked for, the model's own included: at most 8"):
        counts.generate([1], stop_token_ids=[*range(10, 18)])


@every_mode
def test_stop_string_over_tokens(tell, mode, budget):
    done = tell(b"abcdefghijklmn", stop="de", mode=mode, budget=budget).outputs[0]
    assert (done.text, bytes(done.token_ids)) == ("bc", b"bcde")
    assert (done.finish_reason, done.stop_reason) == ("stop", "de")
    if mode != "plain":  # one prefill and one step, whose accepted tokens are cut at the stop
        assert (done.stats.steps, done.stats.acceptance_length, done.stats.accepted) == (1, 3, 2)


@every_mode
def test_stop_string_inside_one_token(tell, mode, budget):
    ids = [*b"abc", 256, *b"d"]
    done = tell(ids, stop=["never", "op"], mode=mode, budget=budget).outputs[0]
    assert (done.text, done.token_ids, done.stop_reason) == ("bcst", (*b"bc", 256), "op")
    done = tell(ids, stop=["stop!"], mode=mode, budget=budget).outputs[0]
    assert (done.text, done.token_ids, done.stop_reason) == ("bc", (*b"bc", 256), "stop!")
    kept = tell(ids, stop="top", include_stop_str_in_output=True, mode=mode, budget=budget).outputs[0]
    assert (kept.text, kept.stop_reason) == ("bcstop", "top")


@every_mode
def test_stop_emoji_over_four_tokens(tell, mode, budget):
    ids = "ab🧬cd".encode()
    done = tell(ids, stop="🧬", mode=mode, budget=budget).outputs[0]
    assert (done.text, bytes(done.token_ids), done.stop_reason) == ("b", "b🧬".encode(), "🧬")
    whole = tell(ids, max_tokens=7, mode=mode, budget=budget).outputs[0]
    assert (whole.text, whole.finish_reason) == ("b🧬cd", "length")
    cut = tell(ids, max_tokens=3, mode=mode, budget=budget).outputs[0]
    assert cut.text == "b\ufffd"


@every_mode
def test_stop_id_has_no_text(tell, tokenizer, mode, budget):
    """The end of a turn stays among the ids and out of the text, as does an id asked for as a stop."""
    turn = tokenizer.control_id("<|im_end|>")
    done = tell([*b"abc", turn, *b"de"], stop_ids=[turn], mode=mode, budget=budget).outputs[0]
    assert (done.text, done.token_ids, done.stop_reason) == ("bc", (*b"bc", turn), None)
    done = tell([*b"abcde"], stop_token_ids=[ord("d")], mode=mode, budget=budget).outputs[0]
    assert (done.text, bytes(done.token_ids), done.stop_reason) == ("bc", b"bcd", ord("d"))


@every_mode
def test_stop_string_beside_a_stop_id_and_a_length(tell, mode, budget):
    """Whichever comes first in the text ends it; a text that is complete at the last token still stops."""
    how = {"stop": "de", "mode": mode, "budget": budget}
    done = tell(b"abcdefgh", stop_token_ids=[ord("g")], **how).outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == ("bc", "stop", "de")
    done = tell(b"abcdefgh", stop_token_ids=[ord("c")], **how).outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == ("b", "stop", ord("c"))
    done = tell(b"abcdefgh", max_tokens=4, **how).outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == ("bc", "stop", "de")
    done = tell(b"abcdefgh", max_tokens=3, **how).outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == ("bcd", "length", None)
    done = tell(b"abcdefgh", max_tokens=7, min_tokens=6, **how).outputs[0]
    assert (done.text, done.finish_reason) == ("bcdefgh", "length")


@pytest.mark.parametrize("block", [2, 3, 8])
def test_deltas_join_to_the_text(tokenizer, monkeypatch, block):
    """Characters of several bytes come whole, whatever a step adds; a held stop is never sent."""
    text = "a世🧬é.b"
    table = story([*text.encode(), ord("!")], tokenizer.size)
    scripted(monkeypatch, following(table))
    loaded = toy(table, [tokenizer.eos], tokenizer, block=block)
    deltas = list(engine_of(loaded).generate("a", temperature=0, max_tokens=12, stop=".b", stream=True))
    assert "".join(delta.text for delta in deltas) == "世🧬é" and "\ufffd" not in str(deltas)
    assert b"".join(bytes(delta.token_ids) for delta in deltas) == "世🧬é.b".encode()
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert max(len(delta.token_ids) for delta in deltas) == block
