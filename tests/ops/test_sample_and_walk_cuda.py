"""The CUDA sampling and walk against the reference on the CPU, which has oracles of its own.

Ids are equal but where rounding decides: two perturbed scores within 2e-6, or a mass that near to `top_p`. The seeds
here meet no such case, so equality is asked everywhere.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_fx.ops import draw
from kimi_fx.ops.sample_and_walk import reference, sample_and_walk
from kimi_fx.runtime.build import load_kernels

pytestmark = pytest.mark.gpu

V = 163_840  # Kimi K2's
INF = torch.inf
RUNS, STOP, LENGTH, NON_FINITE = range(4)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def arguments(logits: Tensor, token: Any = None, parent: Any = None, rows: int | None = None, **changed: Any) -> list:
    """A call's arguments on the CPU: greedy, without filters, penalties or an end, but for what is `changed`."""
    batch, nodes, vocabulary = logits.shape
    sampling = {
        "position": torch.arange(batch) * 7 + 10,
        "active": torch.ones(batch, dtype=torch.bool),
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
        "sample": torch.arange(batch) % 3,
        "logprobs": torch.full((batch,), 20, dtype=torch.int32),
        "stop_ids": torch.full((batch, 8), -1),
        "remaining": torch.full((batch,), 1000),
        "min_remaining": torch.zeros(batch, dtype=torch.long),
    }
    for name, value in changed.items():
        default = sampling[name]
        sampling[name] = torch.as_tensor(value, dtype=default.dtype).expand_as(default).contiguous()
    tree = [torch.as_tensor([0] * nodes if token is None else token), torch.as_tensor([-1] * nodes)]
    if parent is not None:
        tree[1] = torch.as_tensor(parent)
    tree = [x.expand(batch, nodes).contiguous() for x in tree]
    position, active, *rest = sampling.values()
    return [logits, *tree, position, active, nodes if rows is None else rows, *rest]


def on_device(call: list) -> list[Tensor]:
    """The outputs on the CPU; over poisoned memory, twice and bit-equal."""
    moved = [x.cuda() if isinstance(x, Tensor) else x for x in call]
    runs = []
    for _ in range(2):
        junk = [torch.full((n,), -7, device="cuda") for n in (1 << 20, 1 << 16, 4096, 512, 256, 64, 8)]
        del junk
        runs.append([x.cpu() for x in sample_and_walk(*moved)])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    return runs[0]


def assert_same(call: list) -> list[Tensor]:
    """Ids are the reference's; log-probabilities are those of the raw rows in fp64."""
    ours, theirs = on_device(call), reference(*call)
    for name, i in (("tokens", 0), ("count", 1), ("path", 2), ("finish", 3), ("top_ids", 5)):
        assert torch.equal(ours[i], theirs[i]), (name, ours[i].tolist(), theirs[i].tolist())
    tokens, count, path, _, logprob, ids, logprobs = ours
    assert torch.equal(logprob == 0, theirs[4] == 0) and torch.equal(logprobs == 0, theirs[6] == 0)
    for b, d in ((count > torch.arange(path.shape[1])[:, None]).T & (call[-4] >= 0)[:, None]).nonzero().tolist():
        exact = call[0][b, path[b, d]].double().log_softmax(-1)
        torch.testing.assert_close(logprob[b, d].double(), exact[tokens[b, d]], rtol=1e-6, atol=1e-5)
        held = ids[b, d] >= 0
        torch.testing.assert_close(logprobs[b, d, held].double(), exact[ids[b, d, held]], rtol=1e-6, atol=1e-5)
    return ours


def likely_tree(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Nodes under random earlier ones, often the one before, holding one of the two best tokens of their parent."""
    batch, nodes, vocabulary = logits.shape
    parent = torch.full((batch, nodes), -1)
    token = torch.zeros(batch, nodes, dtype=torch.long)
    for b in range(batch):
        for j in range(1, nodes):
            chain = torch.rand((), generator=generator) < 0.6
            parent[b, j] = j - 1 if chain else int(torch.randint(j, (), generator=generator))
            best = logits[b, parent[b, j]].nan_to_num(-1e30).topk(min(2, vocabulary)).indices
            token[b, j] = best[int(torch.randint(len(best), (), generator=generator))]
    return token, parent


def random_call(batch: int, nodes: int, vocabulary: int, seed: int, rows: int, scale: float, **changed: Any) -> list:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, nodes, vocabulary, generator=generator) * scale
    token, parent = likely_tree(logits, generator)
    return arguments(logits, token, parent, rows, **changed)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 19, 21, 4096, 5001, 8193, V, V + 3])
def test_greedy(vocabulary: int) -> None:
    out = assert_same(random_call(3, 12, vocabulary, seed=vocabulary, rows=8, scale=2.0))
    assert vocabulary < 100 or out[1].max() > 1


def test_lowest_id_on_ties() -> None:
    logits = torch.randn(4, 5, V, generator=torch.Generator().manual_seed(1)).round()
    logits[1] = 0.0
    logits[2] = torch.tensor([-0.0, 0.0] * (V // 2))
    logits[3] = torch.arange(V) // 1000 % 7
    assert_same(arguments(logits))


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 30.0},
    {"temperature": 1e-6},
    {"temperature": 1e-45},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 5.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 3.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 4.0, "top_k": 40, "top_p": 0.3},
    {"presence": 0.7, "frequency": 0.2, "repetition": 1.3},
    {"temperature": 1.0, "presence": 0.7, "frequency": 0.2, "repetition": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "repetition": 0.8},
]


@pytest.mark.parametrize("vocabulary", [5, 4096, V])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items()))
def test_sampled_filtered_and_penalised(settings: dict[str, float], vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = 4 if vocabulary == V else 24
    counts = torch.randint(0, 3, (batch, vocabulary), generator=generator)
    seen = (counts > 0) | (torch.rand(batch, vocabulary, generator=generator) < 0.3)
    bias = torch.randn(batch, vocabulary, generator=generator).round() * 0.5
    bias[::2] = 0
    history = {"counts": counts, "seen": seen, "bias": bias}
    assert_same(random_call(batch, 10, vocabulary, 5, 8, 3.0, **settings, **history))


def test_flat_and_tied_rows_under_filters() -> None:
    """Many ids at the cut: the lowest ids stay."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.stack((torch.zeros(3, V), torch.randint(-2, 1, (3, V), generator=generator).float()))
    for changed in ({"top_k": 500}, {"top_k": 100_000}, {"top_p": 0.501}, {"top_k": 70_001, "top_p": 0.7}):
        assert_same(arguments(logits, temperature=1.0, **changed))


@pytest.mark.parametrize("changed", [{}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}])
def test_many_draws_from_one_row(changed: dict[str, float]) -> None:
    """2,000 requests of five ids: every draw as the reference makes it."""
    logits = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05]).log().expand(2000, 1, 5).contiguous()
    assert_same(arguments(logits, temperature=1.0, position=torch.arange(2000), **changed))


def test_noise_words_are_exact() -> None:
    """Equal logits: the best noise alone decides, at the largest counters too."""
    logits = torch.zeros(3, 1, V)
    seed = torch.tensor([[2**32 - 1, 2**32 - 1], [0, 0], [0xDEADBEEF, 7]])
    position = torch.tensor([2**31 - 5, 0, 2**20])
    out = on_device(arguments(logits, temperature=1.0, seed=seed, position=position, sample=[2**31, 0, 9]))
    noise = draw.gumbel(seed, position + 1, torch.tensor([2**31, 0, 9]), V)
    assert out[0][:, 0].tolist() == noise.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends(temperature: float) -> None:
    """Stops, lengths, minimums and idle slots along one chain, a request each."""
    nodes, batch = 8, 40
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(1, nodes, 5000, generator=generator).mul(8).expand(batch, -1, -1).contiguous()
    chain = [0, *logits[0].argmax(1).tolist()[:-1]]
    stop = torch.full((batch, 8), -1)
    stop[:, 5] = torch.tensor([chain[1 + b % 7] for b in range(batch)])
    stop[::3, 0] = torch.tensor(chain[2])
    limits = {"remaining": torch.arange(batch) % 9 + 1, "min_remaining": torch.arange(batch) % 5}
    active = torch.arange(batch) % 4 > 0
    call = arguments(
        logits, chain, range(-1, nodes - 1), 6, stop_ids=stop, active=active, temperature=temperature, **limits
    )
    out = assert_same(call)
    assert set(out[3].tolist()) == {RUNS, STOP, LENGTH} and not out[1][::4].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, INF])
def test_non_finite_rows_end_their_requests(temperature: float, value: float) -> None:
    logits = torch.full((4, 3, 9000), -INF)
    logits[..., 8000] = 0.0  # the only possible token
    logits[0, 1, 5], logits[1, 2, 5], logits[2, 0, 8999] = value, value, value
    out = assert_same(arguments(logits, [0, 8000, 1], [-1, 0, 0], temperature=temperature, logprobs=-1))
    assert out[1].tolist() == [1, 2, 0, 2] and out[3].tolist() == [NON_FINITE, RUNS, NON_FINITE, RUNS]


def test_nothing_left_to_draw() -> None:
    stop = {"stop_ids": [0, 1, *[-1] * 6], "min_remaining": 1}
    for logits, changed in ((torch.zeros(1, 1, 2), stop), (torch.zeros(1, 1, 9), {"bias": [-INF] * 9})):
        out = assert_same(arguments(logits, **changed))
        assert out[3].item() == NON_FINITE
    for value in (torch.nan, INF):
        assert assert_same(arguments(torch.tensor([[[0.0, value, 0.0]]]), **stop))[3].item() == NON_FINITE


def test_logprobs_of_those_who_ask() -> None:
    out = assert_same(random_call(6, 8, 30_000, 9, 5, 2.0, logprobs=[-1, 0, 5, 20, -1, 3], temperature=1.0))
    assert not out[4][0].any() and not out[5][0].any() and out[4][1, 0] < 0


def test_request_does_not_depend_on_its_batch() -> None:
    call = random_call(40, 8, 20_000, 10, 8, 3.0, temperature=torch.linspace(0, 2, 40), top_p=0.9, presence=0.3)
    together = on_device(call)
    for b in (0, 17, 39):
        alone = on_device([x[b : b + 1] if isinstance(x, Tensor) else x for x in call])
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


def test_bfloat16_rows_mean_their_fp32_values() -> None:
    call = random_call(4, 6, 9000, 11, 4, 2.0, temperature=1.0)
    call[0] = call[0].bfloat16()
    assert all(torch.equal(x, y) for x, y in zip(on_device(call), on_device([call[0].float(), *call[1:]]), strict=True))


def test_what_was_drawn_ahead_is_what_the_walk_draws() -> None:
    """Chains longer and shorter than the nodes drawn from at once, penalties and minimums along them, and padding."""
    for nodes, rows in ((64, 20), (20, 20), (5, 3), (2, 1)):
        for temperature in (0.0, 1.0):
            call = random_call(
                1, nodes, 3000, nodes, rows, 6.0, temperature=temperature, presence=0.5, frequency=0.3, min_remaining=3
            )
            call[2][:, nodes * 3 // 4 :] = -1  # parents: no walk comes here
            call[-3][:, 0] = call[0][0, 0].argmax()  # a stop id that the root would draw
            assert_same(call)


def test_no_request_draws_nothing() -> None:
    call = [x.cuda() if isinstance(x, Tensor) else x for x in arguments(torch.zeros(0, 3, 50), rows=4)]
    assert [len(x) for x in sample_and_walk(*call)] == [0] * 7


@pytest.mark.parametrize(
    ("place", "name"), [(1, "token"), (3, "position"), (13, "bias"), (16, "seed"), (20, "remaining")]
)
def test_shapes_that_disagree_are_refused(place: int, name: str) -> None:
    call = [x.cuda() if isinstance(x, Tensor) else x for x in arguments(torch.zeros(2, 3, 50))]
    call[place] = torch.cat((call[place], call[place]))
    with pytest.raises(ValueError, match=rf"takes {name} of shape .* found \[4"):
        sample_and_walk(*call)


def test_a_captured_graph_follows_its_inputs() -> None:
    held, other = (random_call(2, 8, V, seed, 8, 3.0, temperature=[0.0, 1.0], top_p=0.9) for seed in (12, 13))
    held, other = ([x.cuda() if isinstance(x, Tensor) else x for x in call] for call in (held, other))
    sample_and_walk(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_and_walk(*held)
    for call in (held, other, held):
        call = [x.clone() if isinstance(x, Tensor) else x for x in call]
        for x, y in zip(held, call, strict=True):
            if isinstance(x, Tensor):
                x.copy_(y)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(out, sample_and_walk(*call), strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_opcheck(temperature: float) -> None:
    call = random_call(2, 3, 50, 14, 3, 2.0, temperature=temperature)
    torch.library.opcheck(sample_and_walk, tuple(x.cuda() if isinstance(x, Tensor) else x for x in call))
