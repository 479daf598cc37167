"""CUDA graphs: a call recorded once and replayed with one launch, over the buffers it was recorded with."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Graphs:
    """What the graphs of one engine share: a stream, and the memory that their intermediate results lie in.

    They must not run at the same time, and a result is overwritten by the next replay of its own graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm(self, call: Callable[[], object]) -> None:
        """Call twice on the shared stream, so that handles, workspaces and kernels are there before recording."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            call()
            call()
        current.wait_stream(self.stream)

    def capture(self, call: Callable[[], T]) -> Callable[[], T]:
        """The call as a replay; recording runs nothing. RuntimeError where the call waits for the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = call()
        except RuntimeError as error:
            raise RuntimeError(
                f"a step cannot be recorded as a CUDA graph ({error}): some operator has no kernel for these widths, "
                "use run.compile=false."
            ) from error

        def replay() -> T:
            with torch.cuda.device(self.stream.device):
                graph.replay()
            return result

        return replay
