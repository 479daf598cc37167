"""One bucket, one function: compiled whole and ahead of time, written as bytes, loaded without tracing.

`ddtree_step` and `prefill_step` are traced as they stand, with the number of pages and the width of the page table left
open. A loaded function has their signature and checks nothing when called: `signature` is compared once. All runs under
`no_grad`; a compiled function refuses tensors of `inference_mode`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..config import with_environment
from ..graphs import step
from ..graphs.params import Params
from ..graphs.pytree import tree_leaves
from ..graphs.state import Model, empty_pool, empty_state
from .buckets import Bucket, Chunk
from .tensorrt import load_engines

Step = Callable[..., Any]  # of the signature of `ddtree_step` or `prefill_step`
Arguments = tuple[Any, ...]  # params, pool, state, and the rest of what a step takes
PAGES, TABLE = 5, 3  # of an example: a size is only left open if it is neither 0 nor 1 nor equal to another


def compile_step(bucket: Bucket, arguments: Arguments, kernels: Path) -> tuple[bytes, dict[str, Any]]:
    """The bucket's function, traced with these arguments, and what the store should note of it: seconds it took, and
    what it relies on. Its kernels go into the folder."""
    from torch._inductor.utils import clear_caches

    start = time.monotonic()
    traced = step.prefill_step if isinstance(bucket, Chunk) else step.ddtree_step
    options: Any = {"guard_filter_fn": no_guards, "cpp.dynamic_threads": True}
    with building_in(kernels), torch._dynamo.config.patch(enable_aot_compile=True), short_messages():
        compiled: Any = torch.compile(traced, fullgraph=True, dynamic=False, options=options)
        clear_caches()  # a kernel that is only in memory would be missing in the folder
        for leaf in opened(arguments):
            torch._dynamo.mark_dynamic(leaf, 1)
        function = compiled.aot_compile((arguments, {}))
        code = type(function).serialize(function).serialized_data
        load_engines(arguments, kernels)
    return code, {"seconds": round(time.monotonic() - start, 1), "arguments": signature(arguments)}


def load_step(file: Path, arguments: Arguments, kernels: Path) -> Step:
    """The function in a file, tried on idle arguments: nothing is left to be done at its first real call."""
    with building_in(kernels), file.open("rb") as data:
        with torch._inductor.config.patch(compile_threads=1):  # nothing to compile: start no workers
            try:
                function: Any = torch.compiler.load_compiled_function(data, f_globals=vars(step))
            except (EOFError, UnpicklingError) as error:
                raise RuntimeError(f"{file} holds no compiled function ({error}): delete it.") from None
        function.disable_guard_check()
        load_engines(arguments, kernels)
        function(*arguments)
    return function


def example(bucket: Bucket, params: Params, model: Model) -> Arguments:
    """Arguments of the bucket's function, over an idle state and a small pool of their own."""
    embed = params.target.embed
    pool = empty_pool(model, PAGES, embed.dtype, embed.device)
    if not isinstance(bucket, Chunk):
        return params, pool, empty_state(bucket.batch, TABLE, model.target.V, embed.device), bucket, model
    tokens = torch.zeros(1, bucket.tokens, dtype=torch.int64, device=embed.device)
    count = tokens.new_ones(1)
    return params, pool, empty_state(1, TABLE, model.target.V, embed.device), tokens, count, count == 0, model


def opened(arguments: Arguments) -> list[Tensor]:
    """Tensors whose second dimension may have any size."""
    return [*tree_leaves(arguments[1]), arguments[2].page_table]


def signature(arguments: Arguments) -> list[str]:
    """What the code relies on, of each tensor of params, pool and state."""
    free = {id(leaf) for leaf in opened(arguments)}
    return [kind(leaf, id(leaf) in free) for leaf in tree_leaves(arguments[:3])]


def kind(tensor: Tensor, free: bool) -> str:
    sizes = ["any" if free and dim == 1 else str(size) for dim, size in enumerate(tensor.shape)]
    order = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} [{', '.join(sizes)}] on {tensor.device}{order}"


def no_guards(entries: Any) -> list[bool]:
    return [False] * len(entries)


@contextmanager
def short_messages() -> Iterator[None]:
    """Up to torch 2.11 Inductor writes out all that an operator depends on for a message that is not shown: time and
    length double with every operator in a row."""
    from torch._inductor.exc import OperatorIssue

    with patch.object(OperatorIssue, "operator_str", staticmethod(lambda target, args, kwargs: str(target))):
        yield


@contextmanager
def building_in(kernels: Path) -> Iterator[None]:
    """Inductor and Triton keep their files in the folder, and gradients are off as they are when a round runs."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(kernels),
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TRITON_CACHE_MANAGER": "kimi_fx.runtime.movable:Movable",
    }
    with with_environment(variables), torch.inference_mode(False), torch.no_grad():
        yield
