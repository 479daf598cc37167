"""A rank that follows: the engine of rank 0, step by step, on this rank's share of the weights. It says nothing."""

from dataclasses import replace
from typing import Any

from .runtime.ranks import Place, Ranks, follow_with


def main(place: dict[str, Any]) -> int:
    """Of a process that rank 0 started."""
    return follow(Place(**place))


def follow(place: Place) -> int:
    """Until rank 0 has no more steps: 0; 1 where any rank has failed."""
    return follow_with(place, serve)


def serve(ranks: Ranks) -> None:
    """Whatever rank 0's engine does, until it ends."""
    config = replace(ranks.config, run=replace(ranks.config.run, trace=None))
    engine = ranks.kind.open(config, progress=False, ranks=ranks)
    while (orders := ranks.follow()) is not None:
        for order in orders:
            engine.obey(order)
        engine.step()
