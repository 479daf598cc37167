"""An engine that may not trace. Ranks take its class from the first, so one of them that does ends all."""

import torch
from torch._dynamo.utils import counters

from kimi_fx.engine import Engine
from kimi_fx.results import Delta


class Strict(Engine):
    def step(self) -> list[Delta]:
        with torch.compiler.set_stance("fail_on_recompile"):
            deltas = super().step()
        assert self.rounds is not None and set(self.rounds.steps) == set(self.rounds.buckets)
        assert not counters["stats"]["unique_graphs"]
        return deltas
