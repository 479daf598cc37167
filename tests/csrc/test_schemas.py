"""Every operator's CUDA side calls the library as its schemas say.

No GPU is needed: operators of the same schemas stand in for the library's, and torch holds a call against its schema
on every device. A schema cannot tell one tensor from another, so each is followed to the argument of its name.
"""

import re
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library, get_kernel, infer_schema

import kimi_fx.ops
from kimi_fx.ops import REFERENCE, peer_sum
from kimi_fx.ops.peer_sum import JOINED, Peers, capacity
from kimi_fx.runtime.build import LIBRARY, library_for
from oracles.calls import calls, experts

CALL, DEFINITION = re.compile(r"\bloaded\.(\w+)\("), re.compile(r'm\.def\(\s*"((?:[^"]|"\s*")*)"\);')
SOURCES = [source.read_text() for source in library_for("sm_90a")[1] if source.suffix == ".cpp"]
DEFINED = [re.sub(r'"\s*"', "", literals) for source in SOURCES for literals in DEFINITION.findall(source)]
SCHEMAS = {schema.partition("(")[0]: schema for schema in DEFINED}
OPTIONAL = re.compile(r"\bTensor\? (\w+)")
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
PEERS = Peers(rank=1, buffers=(torch.zeros(1),) * 3, addresses=torch.zeros(3, dtype=torch.int64))

Reached = list[tuple[str, dict[str, Any]]]  # names and arguments of the stand-ins called so far


def test_the_library_has_every_operator_that_is_called() -> None:
    called = {name for f in Path(kimi_fx.ops.__file__).parent.glob("*.py") for name in CALL.findall(f.read_text())}
    assert called == SCHEMAS.keys()
    assert len(called) == len(DEFINED) == sum(source.count("m.def(") for source in SOURCES) == 14


@pytest.fixture(scope="session")
def stand_ins() -> Iterator[Reached]:
    library, reached = Library("kimi_fx_schemas", "DEF"), []  # undefined again when nothing holds it

    def stand_in(name: str, takes: list[str], results: int) -> None:
        def kernel(*args: Any) -> Any:
            reached.append((name, dict(zip(takes, args, strict=True))))
            empty = tuple(torch.empty(0) for _ in range(results))
            return empty if results > 1 else empty[0] if results else None

        library.impl(name, kernel, "CPU")

    for schema in DEFINED:
        takes, gives = schema.split(" -> ")
        stand_in(library.define(schema), re.findall(r"(\w+)[,)]", takes), gives.count("Tensor"))
    yield reached


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_fits_its_schema(name: str, stand_ins: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, LIBRARY, torch.ops.kimi_fx_schemas)
    monkeypatch.setitem(JOINED, "peers", PEERS)
    every = calls() | {"marlin_moe": experts(packed=True), "peer_sum": (torch.zeros(8), "peers")}
    args = [x.clone() if isinstance(x, Tensor) else x for x in every[name]]  # each tensor its own memory
    stand_ins.clear()
    get_kernel(f"kimi_fx::{name}", "CUDA").call_boxed(CUDA, *args)
    assert [reached for reached, _ in stand_ins] == [name]
    given = signature(reference_of(name)).bind(*args).arguments
    given |= {"buffers": PEERS.addresses, "rank": PEERS.rank, "capacity": capacity(len(PEERS.buffers))}
    misplaced = {n for n, x in stand_ins[0][1].items() if identity(x) != identity(given[n])}
    assert not misplaced


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_its_operators(name: str) -> None:
    """In what torch lets pass: fewer results, and None for any tensor."""
    ours, own = SCHEMAS[name], infer_schema(reference_of(name), mutates_args=())
    assert ours.split(" -> ")[1] == own.split(" -> ")[1]
    optional = [] if name == "marlin_moe" else OPTIONAL.findall(own)  # experts without scales are the reference's
    assert OPTIONAL.findall(ours) == optional


def reference_of(name: str) -> Callable[..., Any]:
    return getattr(REFERENCE, name, peer_sum.reference)


def identity(x: Any) -> Any:
    """Of a tensor where it lies, which a view shares."""
    return x.data_ptr() if isinstance(x, Tensor) else x
