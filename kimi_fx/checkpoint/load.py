"""A plan filled with tensors: from a checkpoint, or at random.

Leaves are read one by one in the plan's order, as views of the mapped files, joined into tensors of their
own, cast and moved. On a mesh a rank reads its own slices alone, and gets DTensors in logical shape. A layer's INT4
experts are packed as soon as they are there, by each rank for itself. Checks first (`preflight.py`), so that nothing is
missing or unexpected once data is read.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from ..config import DrafterModel, TargetModel
from ..graphs.params import DrafterParams, Experts, Leaf, TargetParams, drafter_plan, target_plan
from ..graphs.pytree import tree_leaves, tree_map
from ..ops.marlin import dequantise, marlin_pack, marlin_pack_scales
from .files import CheckpointError, first_few, read_entries, refuse
from .preflight import DRAFTER, TARGET, Layout, check, shape_name
from .shards import distribute, local, local_leaf, share

P = TypeVar("P")
PACKED_AT_ONCE = 32  # experts
LINE_SECONDS = 10.0  # between progress lines where there is no terminal


def load_target(
    folder: Path,
    model: TargetModel,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool = True,
    mesh: DeviceMesh | None = None,
) -> TargetParams:
    """Weights of a Kimi K2.x text model, floating leaves in `dtype`, the router's bias in fp32.

    On a mesh: DTensors, but for the experts, which are this rank's own and packed. Raises CheckpointError with
    everything that is wrong with the folder.
    """
    return _load(target_plan(model, ranks(mesh)), folder, TARGET, device, dtype, progress, mesh)


def load_drafter(
    folder: Path,
    model: DrafterModel,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool = True,
    mesh: DeviceMesh | None = None,
) -> DrafterParams:
    """Weights of a DFlash drafter in `dtype`; mesh and errors as in `load_target`."""
    return _load(drafter_plan(model, ranks(mesh)), folder, DRAFTER, device, dtype, progress, mesh)


def ranks(mesh: DeviceMesh | None) -> int:
    """Ranks of the axis `tp`."""
    return mesh["tp"].size() if mesh is not None else 1


def random_params(
    plan: P, seed: int, device: torch.device | str, dtype: torch.dtype, mesh: DeviceMesh | None = None
) -> P:
    """Weights of the plan's shapes: normal of deviation 0.02, norms 1, experts of about that size.

    The same seed gives the same weights on the same kind of device. On a mesh each rank draws its own part alone.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(leaf: Leaf) -> Tensor:
        leaf = local_leaf(leaf, ranks(mesh))
        if leaf.init == "ones":
            return torch.ones(leaf.shape, device=device)
        if leaf.init == "words":
            low, high = -(2**31), 2**31
            return torch.randint(low, high, leaf.shape, generator=generator, dtype=leaf.stored, device=device)
        if leaf.init == "scales":  # codes deviate by 4.6 from -0.5: of either sign, or that mean would add up in layers
            spread = torch.rand(leaf.shape, generator=generator, device=device) * 2 - 1
            return (0.004 * (spread + spread.sign() / 2)).to(leaf.stored)
        return torch.randn(leaf.shape, generator=generator, device=device) * 0.02

    return _fill(plan, draw, device, dtype, mesh)


def pack_experts(experts: Experts, dtype: torch.dtype, device: torch.device | str) -> Experts:
    """Experts as `marlin_moe` takes them, from the logical form described at `Experts`.

    On a CPU the weights bf16(q * scale), cast to `dtype`: w13 [E, D, 2I], w2 [E, I, D], scales None.
    Elsewhere Marlin words and scales: w13 [E, D/16, 4I] i32, s13 [E, D/group, 2I], w2 [E, I/16, 2D] i32,
    s2 [E, I/group, D].
    """
    w13, s13 = experts.w13.flatten(1, 2), experts.s13.flatten(1, 2)
    if torch.device(device).type == "cpu":

        def unpack(words: Tensor, scales: Tensor) -> Tensor:
            return dequantise(words, scales).transpose(1, 2).to(dtype).contiguous()

        return Experts(unpack(w13, s13), None, unpack(experts.w2, experts.s2), None)

    def pack(words: Tensor) -> Tensor:  # some experts at a time: a code passes through a byte
        return torch.cat([marlin_pack(some.to(device)) for some in words.split(PACKED_AT_ONCE)])

    s13, s2 = (marlin_pack_scales(scales.to(device)) for scales in (s13, experts.s2))
    return Experts(pack(w13), s13, pack(experts.w2), s2)


def _load(
    plan: P,
    folder: Path,
    layout: Layout,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool,
    mesh: DeviceMesh | None,
) -> P:
    entries = read_entries(folder)
    prefix = check(plan, entries, layout, str(folder)).prefix
    total = sum(_bytes(leaf, mesh) for leaf in tree_leaves(plan))
    with ExitStack() as stack, _meter(total, folder.name, progress) as advance:

        @cache
        def opened(file: Path) -> Any:
            try:
                return stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{file}: not a sound safetensors file ({error}): fetch it again.") from None

        def tensor(name: str) -> Tensor:  # a view of the mapped file
            return opened(entries[prefix + name].file).get_tensor(prefix + name)

        def read(leaf: Leaf) -> Tensor:
            if leaf.init == "words":
                _check_shapes(leaf, tensor, str(folder))
            value = _assemble(leaf, tensor, mesh)
            advance(_bytes(leaf, mesh), entries[prefix + leaf.sources[-1].name].file.name)
            return value

        return _fill(plan, read, device, dtype, mesh)


def _fill(
    plan: P,
    value: Callable[[Leaf], Tensor],  # this rank's part
    device: torch.device | str,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> P:
    """The plan with `value(leaf)` in place of each leaf that is not made, experts packed."""

    def own(leaf: Leaf) -> Tensor:
        return share(leaf, leaf.make(), mesh) if leaf.make else value(leaf)

    def placed(leaf: Leaf, part: Tensor) -> Tensor:
        return part if mesh is None else distribute(leaf, part, mesh)

    def node(part: Leaf | Experts) -> Tensor | Experts:
        if isinstance(part, Experts):
            logical = tree_map(lambda leaf: placed(leaf, value(leaf)), part)
            return pack_experts(local(logical), dtype, device)
        return placed(part, own(part).to(device, part.dtype or dtype))

    return tree_map(node, plan, is_leaf=lambda part: isinstance(part, Experts))


def _assemble(leaf: Leaf, tensor: Callable[[str], Tensor], mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of the leaf's sources joined, in memory of its own: `cat` copies even a single one out of the
    file, whose other pages are not read."""
    shape = local_leaf(leaf, ranks(mesh)).shape
    parts = []
    for source in leaf.sources:
        part = tensor(source.name)
        if source.view:
            part = part.view(source.view)
        if source.part:
            part = part.narrow(*source.part)
        if mesh is not None and any(leaf.axes):
            first = next(dim for dim in range(len(shape)) if prod(leaf.stored_shape[dim:]) == part.numel())
            part = share(leaf, part.view(leaf.stored_shape[first:]), mesh, first)
        parts.append(part)
    return torch.cat(parts).view(shape)


def _check_shapes(leaf: Leaf, tensor: Callable[[str], Tensor], where: str) -> None:
    """Refuse INT4 words whose `weight_shape` states another unpacked shape."""
    companions = [str(shape_name(source)) for source in leaf.sources]
    stated = torch.stack([tensor(name) for name in companions])
    wanted = torch.tensor([(rows, 8 * words) for rows, words in (source.shape for source in leaf.sources)])
    wrong = (stated != wanted).any(1).nonzero().flatten().tolist()
    which = first_few(f"{companions[i]} {stated[i].tolist()} in place of {wanted[i].tolist()}" for i in wrong)
    refuse(where, [f"{len(wrong):,} weight_shape tensors contradict their words: {which}"] if wrong else [])


def _bytes(leaf: Leaf, mesh: DeviceMesh | None) -> int:
    return prod(local_leaf(leaf, ranks(mesh)).shape) * leaf.stored.itemsize if leaf.sources else 0


@contextmanager
def _meter(total: int, what: str, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Shows `advance(bytes, file)` on stderr: a bar on a terminal, else a line now and then; the total last."""
    live = show and sys.stderr.isatty()
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B [{elapsed}<{remaining}, {rate_noinv_fmt}]{postfix}"
    start = said = time.monotonic()
    done = 0
    bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, bar_format=form, leave=False, disable=not live)

    def advance(size: int, file: str) -> None:
        nonlocal done, said
        done += size
        bar.set_postfix_str(file, refresh=False)
        bar.update(size)
        now = time.monotonic()
        if show and not live and now - said >= LINE_SECONDS:
            said = now
            left = f"{total / 1e9:.2f} GB, {(total - done) * (now - start) / done:.0f} s left, {file}"
            print(f"{what}: {pace(done, now - start)} of {left}", file=sys.stderr)

    with bar:
        yield advance
    if show:
        print(f"{what}: loaded {pace(total, time.monotonic() - start)}", file=sys.stderr)


def pace(size: int, seconds: float) -> str:
    return f"{size / 1e9:.2f} GB in {seconds:.1f} s ({size / 1e9 / max(seconds, 1e-9):.2f} GB/s)"
