"""Draws against exact distributions, filters against fp64, Philox against big integers, walks by example.

Long because one operator holds penalties, filters, draw, walk and report, each with its own oracle.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from kimi_fx.ops import draw
from kimi_fx.ops import sample_and_walk as module

INF = torch.inf
RUNS, STOP, LENGTH, NON_FINITE = 0, 1, 2, 3
DRAWS = 20_000


class Emitted(NamedTuple):
    tokens: Tensor
    count: Tensor
    path: Tensor
    finish: Tensor
    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def arguments(logits, token=None, parent=None, position=None, active=None, rows=None, **changed) -> tuple:
    """A call's arguments: greedy, without filters, penalties or an end, but for what is `changed`.

    Without a tree there is the root alone; one [N] list of tokens or parents serves the whole batch.
    """
    batch, nodes, vocabulary = logits.shape
    parent = [-1] * nodes if parent is None else parent
    token = [0] * nodes if token is None else token
    position = 10 if position is None else position
    active = True if active is None else active
    sampling = {
        "temperature": torch.zeros(batch),
        "top_k": torch.full((batch,), vocabulary),
        "top_p": torch.ones(batch),
        "min_p": torch.zeros(batch),
        "presence": torch.zeros(batch),
        "frequency": torch.zeros(batch),
        "repetition": torch.ones(batch),
        "bias": torch.zeros(batch, vocabulary),
        "counts": torch.zeros(batch, vocabulary, dtype=torch.int32),
        "seen": torch.zeros(batch, vocabulary, dtype=torch.bool),
        "seed": torch.stack((torch.arange(batch) * 2654435761 % 2**32, torch.arange(batch)), 1),
        "sample": torch.zeros(batch, dtype=torch.long),
        "logprobs": torch.full((batch,), -1, dtype=torch.int32),
        "stop_ids": torch.full((batch, 8), -1),
        "remaining": torch.full((batch,), 1000),
        "min_remaining": torch.zeros(batch, dtype=torch.long),
    }
    for name, value in changed.items():
        default = sampling[name]
        sampling[name] = torch.as_tensor(value, dtype=default.dtype).expand_as(default).contiguous()
    return (
        logits,
        torch.as_tensor(token).expand(batch, nodes).contiguous(),
        torch.as_tensor(parent).expand(batch, nodes).contiguous(),
        torch.as_tensor(position).expand(batch).contiguous(),
        torch.as_tensor(active).expand(batch).contiguous(),
        nodes if rows is None else rows,
        *sampling.values(),
    )


def emit(logits, *args, **kwargs) -> Emitted:
    return Emitted(*module.reference(*arguments(logits, *args, **kwargs)))


def one(logits, *args, **kwargs) -> tuple[list[int], list[int], int]:
    """(tokens, path, finish) of a batch of one; the padding past `count` is checked here."""
    out = emit(torch.as_tensor(logits)[None], *args, **kwargs)
    n = int(out.count)
    assert set(out.tokens[0, n:].tolist()) <= {-1} and set(out.path[0, n:].tolist()) <= {0}
    return out.tokens[0, :n].tolist(), out.path[0, :n].tolist(), int(out.finish)


def rows_for(probabilities, batch: int, nodes: int = 1) -> Tensor:
    return torch.tensor(probabilities).log().expand(batch, nodes, -1).contiguous()


def ranking(row) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def assert_drawn_from(tokens: Tensor, probabilities) -> None:
    """Chi-square over the outcomes with mass; none without."""
    expected = np.asarray(probabilities, dtype=np.float64)
    observed = np.bincount(tokens.numpy(), minlength=len(expected))
    mass = expected > 0
    assert len(observed) == len(expected) and observed[mass].sum() == len(tokens)
    if mass.sum() > 1:
        assert chisquare(observed[mass], expected[mass] / expected.sum() * len(tokens)).pvalue > 1e-3


# ---- noise


def philox_by_integers(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """Published by Random123."""
    assert draw.philox(torch.tensor(counter), torch.tensor(key)).tolist() == words
    assert philox_by_integers(counter, key) == words


def test_philox_equals_big_integers():
    generator = torch.Generator().manual_seed(0)
    counter, key = (torch.randint(0, 2**32, (n, 500), generator=generator) for n in (4, 2))
    words = draw.philox(counter, key)
    for i in range(500):
        assert words[:, i].tolist() == philox_by_integers(counter[:, i].tolist(), key[:, i].tolist())


def test_uniform_is_exact_and_open_at_both_ends():
    words = [0, 1, 2, 2**24 + 1, 2**24 + 3, 2**31 - 1, 2**32 - 200, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    words += torch.randint(0, 2**32, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    v = draw.uniform(torch.tensor(words))
    assert v.tolist() == [min(float(np.float32(w | 1)) / 2**32, 1 - 2**-24) for w in words]
    assert v.min() > 0 and v.max() < 1


def test_gumbel_by_its_definition():
    """Word id & 3 of counter (id >> 2, index, sample, 0), then -log(-log1p(-v)) within 1e-6 of fp64."""
    seed = torch.tensor([[0xDEADBEEF, 0xFFFFFFFF], [3, 0]])
    index, sample = torch.tensor([0xFFFFFFFF, 77]), torch.tensor([0, 5])
    noise = draw.gumbel(seed, index, sample, 1003)
    assert noise.shape == (2, 1003) and noise.dtype == torch.float32
    for b in range(2):
        for i in range(1003):
            counter = [i >> 2, int(index[b]), int(sample[b]), 0]
            word = philox_by_integers(counter, seed[b].tolist())[i & 3]
            v = min(np.float32(word | 1) * np.float32(2**-32), np.float32(1 - 2**-24))
            assert noise[b, i].item() == pytest.approx(-math.log(-math.log1p(-float(v))), abs=1e-6, rel=1e-7)


def test_noise_is_gumbel_down_to_rare_values():
    """2 M values: the counts beyond thresholds down to 1e-5 of the mass, in both tails, within five sigma."""
    noise = draw.gumbel(torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([0]), 2_000_000).double()
    for g in (-2.2, -1.5, 0.0, 1.0, 4.0, 8.0, 11.5):
        above = -math.expm1(-math.exp(-g))
        sigma = math.sqrt(2e6 * above * (1 - above))
        assert abs((noise > g).sum().item() - 2e6 * above) < 5 * sigma


# ---- distributions


def test_output_does_not_depend_on_the_draft():
    """Target (.5, .3, .2), draft always token 0: tokens (.5, .3, .2), accepted half the time, then afresh."""
    out = emit(rows_for([0.5, 0.3, 0.2], DRAWS, 2), [9, 0], [-1, 0], temperature=1.0)
    assert_drawn_from(out.tokens[:, 0], [0.5, 0.3, 0.2])
    accepted = out.tokens[:, 0] == 0
    assert torch.equal(out.count, accepted + 1) and torch.equal(out.path[:, 1], accepted.long())
    assert_drawn_from(out.tokens[accepted, 1], [0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"top_p": 0.75}, [0.625, 0.375, 0, 0]), ({"temperature": 0.5}, [0.25, 0.09, 0.0225, 0.0025])],
)
def test_distribution(changed, expected):
    out = emit(rows_for([0.5, 0.3, 0.15, 0.05], DRAWS), **{"temperature": 1.0, **changed})
    assert_drawn_from(out.tokens[:, 0], expected)


@pytest.mark.parametrize(
    ("probabilities", "changed", "expected"),
    [
        ([0.05, 0.15, 0.5, 0.3], {"top_k": 3}, [0, 0.15, 0.5, 0.3]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 3}, [1, 1, 1, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"min_p": 0.25}, [0.5, 0.3, 0.15, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # .5 / .8 is already over .6
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 1e-6}, [1, 0, 0, 0]),
        ([0.5, 0.3, 0.2], {"bias": [0.0, -INF, math.log(2)]}, [0.5, 0, 0.4]),
        ([0.5, 0.3, 0.2], {"stop_ids": [1, 0, *[-1] * 6], "min_remaining": 1}, [0, 0, 1]),
    ],
)
def test_distribution_after_filters(probabilities, changed, expected):
    out = emit(rows_for(probabilities, 3000), temperature=1.0, **changed)
    assert (out.count == 1).all()
    assert_drawn_from(out.tokens[:, 0], expected)


def test_filters_equal_fp64():
    """On 600 rows, ties included, `keep` leaves the ids that the definitions leave, logits untouched."""
    rng = np.random.default_rng(1)
    checked = 0
    for case in range(600):
        vocabulary = int(rng.integers(1, 30))
        x = rng.normal(0, 2, vocabulary).astype(np.float32)
        x = x.round() if case % 3 == 0 else x
        x[rng.random(vocabulary) < 0.1] = -np.inf
        x[rng.integers(vocabulary)] = 0.0
        top_k = int(rng.integers(1, vocabulary + 3))
        top_p = rng.choice([rng.random(), 1.0])
        min_p = rng.choice([rng.random(), 0.0])
        order = np.array(ranking(x)[:top_k])
        p = np.exp(x[order].astype(np.float64))
        p /= p.sum()
        before = np.cumsum(p) - p
        near_p = top_p < 1 and np.abs(before - top_p).min() < 1e-6
        if near_p or (min_p > 0 and np.abs(p - min_p * p[0]).min() < 1e-6):
            continue  # rounding decides
        stays = order[((before < top_p) | (top_p == 1)) & (p >= min_p * p[0])]
        expected = np.full(vocabulary, -np.inf, dtype=np.float32)
        expected[stays] = x[stays]
        assert draw.keep(torch.from_numpy(x), top_k, top_p, min_p).tolist() == expected.tolist()
        checked += 1
    assert checked > 500


def test_best_is_ordered_and_exact():
    x = torch.tensor([1.0, -0.0, 3.0, 0.0, -INF, 3.0, -2.5, 1e-40, -1e-40, INF])
    values, ids = draw.best(x, 10)
    assert ids.tolist() == [9, 2, 5, 0, 7, 1, 3, 8, 6, 4] and torch.equal(values, x[ids])
    x = torch.randn(50, 200, generator=torch.Generator().manual_seed(2)).mul(3).round()
    order = x.sort(dim=1, descending=True, stable=True).indices
    for k in (1, 7, 200):
        assert torch.equal(draw.best(x, k)[1], order[:, :k])


# ---- one target, every way of drafting


def generate(table: Tensor, trees: list, length: int, position: int = 10, **sampling) -> Tensor:
    """[B, length] tokens of a target whose logits depend on all that was emitted, in rounds over given trees.

    `table` [codes, V] has a row for each prefix; a prefix's code is its tokens in base V + 1. Round i drafts
    trees[i % len(trees)], a pair (tokens, parents). Committed counts feed the penalties of later rounds.
    """
    batch, vocabulary = len(sampling["temperature"]), table.shape[1]
    out, count, code = torch.full((batch, length), -1), torch.zeros(batch).long(), torch.zeros(batch).long()
    counts = torch.zeros(batch, vocabulary, dtype=torch.int32)
    i = 0
    while (count < length).any():
        tokens, parents = trees[i % len(trees)]
        codes = [code]
        for node in range(1, len(tokens)):
            codes.append(codes[parents[node]] * (vocabulary + 1) + tokens[node] + 1)
        logits = table[torch.stack(codes, 1) % len(table)]
        history = {"counts": counts, "seen": counts > 0, "remaining": length - count}
        step = emit(logits, tokens, parents, position + count, count < length, **history, **sampling)
        for d in range(len(tokens)):
            b = (step.count > d).nonzero()[:, 0]
            token = step.tokens[b, d]
            out[b, count[b] + d] = token
            counts[b, token] += 1
            code[b] = code[b] * (vocabulary + 1) + token + 1
        count = count + step.count
        i += 1
    return out


PLAIN = [([9], [-1])]
CHAINS = [([9, 0, 1, 2], [-1, 0, 1, 2]), ([9, 3, 3], [-1, 0, 1])]
TREES = [([9, 0, 1, 2, 3, 0, 1], [-1, 0, 0, 1, 1, 2, 5]), ([9, 2, 1, 0, 0], [-1, 0, 0, 2, 3])]


@pytest.mark.parametrize("penalised", [False, True])
def test_same_tokens_in_every_mode(penalised):
    """With one seed a plain run, chains and trees give the same tokens, whatever the settings."""
    table = torch.randn(5**6, 4, generator=torch.Generator().manual_seed(3)) * 1.5
    sampling = {"temperature": torch.linspace(0, 2, 300), "top_p": 0.9}
    if penalised:
        sampling |= {"presence": 0.5, "frequency": 0.3, "repetition": 1.2}
        sampling |= {"stop_ids": [0, *[-1] * 7], "min_remaining": 9}
    plain, chain, tree = (generate(table, trees, 6, **sampling) for trees in (PLAIN, CHAINS, TREES))
    assert torch.equal(plain, chain) and torch.equal(plain, tree)
    assert len(set(map(tuple, plain.tolist()))) > 50


def test_joint_distribution_of_three_tokens():
    table = torch.randn(4**3, 3, generator=torch.Generator().manual_seed(4))
    tokens = generate(table, [([9, 0, 2, 1, 0], [-1, 0, 0, 1, 2])], 3, temperature=torch.ones(DRAWS))
    p = table.double().softmax(-1)
    outcomes = itertools.product(range(3), repeat=3)
    joint = [(p[0, a] * p[a + 1, b] * p[(a + 1) * 4 + b + 1, c]).item() for a, b, c in outcomes]
    assert_drawn_from(tokens @ torch.tensor([9, 3, 1]), joint)


def test_key_of_the_noise():
    """Another seed word, sample or place in the sequence gives other tokens; nothing else does."""
    logits = torch.zeros(1, 1, 1000)
    base = {"temperature": 1.0, "seed": [5, 6], "sample": 2, "position": 10}
    token = emit(logits, **base).tokens
    assert token == draw.gumbel(torch.tensor([[5, 6]]), torch.tensor([11]), torch.tensor([2]), 1000).argmax()
    for changed in ({"seed": [4, 6]}, {"seed": [5, 7]}, {"sample": 3}, {"position": 11}):
        assert not torch.equal(emit(logits, **{**base, **changed}).tokens, token)
    below = emit(torch.zeros(1, 2, 1000), [0, int(token)], [-1, 0], **base)
    assert below.tokens[0].tolist() == [int(token), int(emit(logits, **{**base, "position": 11}).tokens)]
    assert torch.equal(emit(logits.expand(3, 1, 1000), **base).tokens, token.expand(3, 1))


# ---- greedy and the walk


def peaks(tokens, vocabulary: int = 10) -> Tensor:
    """Rows whose best token is the given one and whose second best is the next."""
    rows = torch.zeros(len(tokens), vocabulary)
    for row, token in zip(rows, tokens, strict=True):
        row[token], row[(token + 1) % vocabulary] = 5, 4
    return rows


def test_walk_follows_scattered_nodes():
    """Root to 2 to 4 to 5; node 3 holds the right token under the wrong parent."""
    logits = peaks([7, 0, 8, 0, 9, 1])
    assert one(logits, [3, 6, 7, 8, 8, 9], [-1, 0, 0, 1, 2, 4]) == ([7, 8, 9, 1], [0, 2, 4, 5], RUNS)


def test_second_best_is_never_taken():
    logits = peaks([7, 8, 9, 8, 9, 9])
    assert one(logits, [3, 8, 8, 9, 9, 0], [-1, 0, 1, 1, 2, 4]) == ([7], [0], RUNS)


def test_padding_is_nobodys_child():
    assert one(peaks([0, 1, 1]), [3, 0, 0], [-1, -1, -1]) == ([0], [0], RUNS)


def test_at_most_rows_tokens():
    assert one(peaks([1, 2, 3]), [0, 1, 2], [-1, 0, 1], rows=2) == ([1, 2], [0, 1], RUNS)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-45])
def test_greedy_and_next_to_greedy(temperature):
    """A tiny temperature takes the best id and never overflows; of equal ids greedy takes the lowest."""
    row = torch.tensor([[1.0, 3.0, 2.999, -3e38, -INF]])
    assert one(row, temperature=temperature) == ([1], [0], RUNS)
    assert one(row.clamp(min=-1) * 1e38, temperature=temperature) == ([1], [0], RUNS)
    ties = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -1e30]])
    assert temperature or one(ties) == ([1], [0], RUNS) == one(ties.flip(1))


def test_equal_scores_draw_the_lowest_id():
    assert draw.draw(torch.zeros(5), torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0]), 5, 1.0, 0.0) == 1


CHAIN = (peaks([1, 2, 3, 4]), [0, 1, 2, 3], [-1, 0, 1, 2])


def test_ends():
    assert one(*CHAIN) == ([1, 2, 3, 4], [0, 1, 2, 3], RUNS)
    assert one(*CHAIN, stop_ids=[9, 2, *[-1] * 6]) == ([1, 2], [0, 1], STOP)
    assert one(*CHAIN, stop_ids=[1, *[-1] * 7]) == ([1], [0], STOP)
    assert one(*CHAIN, remaining=3) == ([1, 2, 3], [0, 1, 2], LENGTH)
    assert one(*CHAIN, remaining=1) == ([1], [0], LENGTH)
    assert one(*CHAIN, remaining=2, stop_ids=[2, *[-1] * 7]) == ([1, 2], [0, 1], STOP)


def test_stop_id_in_a_wrong_draft_does_not_stop():
    assert one(peaks([1, 2]), [0, 7], [-1, 0], stop_ids=[7, *[-1] * 7]) == ([1], [0], RUNS)


def test_minimum_counts_down_along_the_path():
    """Token 2 may not stop the request before three tokens are out: the second row gives its next best."""
    logits, stop = peaks([1, 2, 2, 2, 2]), [2, *[-1] * 7]
    tree = ([0, 1, 3, 3, 3], [-1, 0, 1, 2, 3])
    assert one(logits, *tree, stop_ids=stop, min_remaining=3) == ([1, 3, 3, 2], [0, 1, 2, 3], STOP)
    assert one(logits, *tree, stop_ids=stop, min_remaining=1) == ([1, 2], [0, 1], STOP)


# ---- penalties


def test_presence_penalty_example():
    """Logits a 10, b 9.5, presence 1: a, b, a, a, a, in one walk or five."""
    row = torch.tensor([[10.0, 9.5]])
    tree = ([0, 0, 1, 1, 0, 0], [-1, 0, 0, 1, 3, 4])
    assert one(row.expand(6, 2), *tree, presence=1.0) == ([0, 1, 0, 0, 0], [0, 1, 3, 4, 5], RUNS)
    assert generate(row, PLAIN, 5, temperature=torch.zeros(1), presence=1.0).tolist() == [[0, 1, 0, 0, 0]]


def test_penalties_by_their_definition():
    """Along a drafted path, by a loop over ids: repetition first, then presence and frequency, then bias."""
    rng = np.random.default_rng(5)
    for _ in range(100):
        vocabulary, nodes = 8, 5
        logits = rng.normal(0, 2, (nodes, vocabulary)).astype(np.float32)
        counts, bias = rng.integers(0, 3, vocabulary), rng.normal(0, 1, vocabulary).astype(np.float32)
        seen = (counts > 0) | (rng.random(vocabulary) < 0.3)
        presence, frequency, repetition = (float(v) for v in rng.choice([0.0, 0.5, 1.25], 3) + np.r_[0, 0, 1])
        settings = {"counts": counts, "seen": seen, "bias": bias, "presence": presence}
        settings |= {"frequency": frequency, "repetition": repetition}
        expected: list[int] = []
        own, known = counts.copy(), seen.copy()
        for row in logits.astype(np.float64):
            for i in range(vocabulary):
                if known[i]:
                    row[i] = row[i] / repetition if row[i] > 0 else row[i] * repetition
                row[i] += bias[i] - presence * (own[i] > 0) - frequency * own[i]
            expected.append(int(row.argmax()))
            own[expected[-1]] += 1
            known[expected[-1]] = True
        tree = ([0, *expected[:-1]], list(range(-1, nodes - 1)))
        assert one(logits, *tree, **settings)[0] == expected


# ---- non-finite logits, batches, log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[1.0, torch.nan, 0.0], [1.0, INF, 0.0], [-INF] * 3, [torch.nan] * 3])
def test_non_finite_row_ends_its_own_request(temperature, row):
    """Met at the second node: the first token stays; at the root: nothing; elsewhere in the tree: no harm."""
    good = [0.0, -INF, -INF]  # only token 0 is possible
    logits = torch.tensor([[good, row, good], [good, good, row], [row, good, good], [good, good, good]])
    out = emit(logits, [0, 0, 1], [-1, 0, 0], temperature=temperature)
    assert out.count.tolist() == [1, 2, 0, 2]
    assert out.finish.tolist() == [NON_FINITE, RUNS, NON_FINITE, RUNS]
    assert out.tokens.tolist() == [[0, -1, -1], [0, 0, -1], [-1, -1, -1], [0, 0, -1]]


def test_nothing_left_to_draw():
    """All ids biased or masked away; a NaN or +inf that the minimum's mask would cover still counts."""
    assert one(torch.zeros(1, 2), bias=[-INF, -INF]) == ([], [], NON_FINITE)
    stop = {"stop_ids": [0, 1, *[-1] * 6], "min_remaining": 1}
    assert one(torch.zeros(1, 2), **stop) == ([], [], NON_FINITE)
    assert one(torch.zeros(1, 3), **stop) == ([2], [0], RUNS)
    for value in (torch.nan, INF):
        assert one(torch.tensor([[0.0, value, 0.0]]), **stop) == ([], [], NON_FINITE)


def test_request_does_not_depend_on_its_batch():
    """Greedy and sampled, filtered and penalised, ended and inactive requests side by side."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(6, 7, 12, generator=generator)
    logits[4, 0, 3] = torch.nan
    token = torch.randint(0, 12, (6, 7), generator=generator)
    token[0, 1] = logits[0, 0].argmax()
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, -1])
    active = torch.tensor([True, True, True, False, True, True])
    settings = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.0, 1.0, 0.0]),
        "top_p": torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        "presence": torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0, 1.0]),
        "logprobs": torch.tensor([5, -1, 0, 3, 2, 20]),
        "remaining": torch.tensor([9, 9, 9, 9, 9, 1]),
        "seed": torch.randint(0, 2**32, (6, 2), generator=generator),
    }
    position = torch.arange(6) * 7
    together = emit(logits, token, parent, position, active, 4, **settings)
    assert (together.count[3], together.finish[3]) == (0, RUNS) and (together.tokens[3] == -1).all()
    assert together.finish.tolist()[4:] == [NON_FINITE, LENGTH] and together.count[0] > 1
    for b in range(6):
        s = slice(b, b + 1)
        own = {name: value[s] for name, value in settings.items()}
        alone = emit(logits[s], token[s], parent, position[s], active[s], 4, **own)
        assert all(torch.equal(x[s], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("vocabulary", [7, 50])
def test_logprobs_are_those_of_the_raw_rows(vocabulary):
    """In fp64, whatever the temperature and the filters; nothing for a request that asks for none."""
    logits = torch.randn(3, 3, vocabulary, generator=torch.Generator().manual_seed(7)).mul(2).round()
    best = int(emit(logits[:1, :1]).tokens)
    settings = {"logprobs": [0, -1, 20], "temperature": [0.0, 1.0, 3.0], "top_p": 0.9}
    out = emit(logits, [0, best - 1, best], [-1, 0, 0], **settings)
    assert out.path[0, :2].tolist() == [0, 2]
    k = min(20, vocabulary)
    for b, d in ((0, 0), (0, 1), (2, 0)):
        row = logits[b, out.path[b, d]].double()
        row = row - row.exp().sum().log()
        assert out.logprob[b, d].item() == pytest.approx(row[out.tokens[b, d]].item(), abs=1e-5)
        order = ranking(row.tolist())[:k]
        assert out.top_ids[b, d].tolist() == order + [-1] * (20 - k)
        assert out.top_logprobs[b, d, :k].tolist() == pytest.approx(row[order].tolist(), abs=1e-5)
    assert not out.logprob[1].any() and not out.top_ids[1].any() and not out.top_logprobs[1].any()


def test_bfloat16_rows_mean_their_fp32_values():
    logits = torch.randn(40, 3, 30, generator=torch.Generator().manual_seed(8)).bfloat16()
    settings = {"temperature": torch.linspace(0, 2, 40), "logprobs": 3}
    pair = (emit(x, [0, 1, 2], [-1, 0, 0], **settings) for x in (logits, logits.float()))
    assert all(torch.equal(x, y) for x, y in zip(*pair, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_opcheck(temperature):
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(9))
    call = arguments(logits, [0, 1, 2], [-1, 0, 1], temperature=temperature, logprobs=[-1, 4])
    torch.library.opcheck(module.sample_and_walk, call)
