"""A debug check that all ranks hold the same bits of what they decided."""

import hashlib
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from ..graphs.state import Emitted, Tree


def agree(tree: Tree, emitted: Emitted) -> None:
    """Raise RuntimeError, on every rank, with the first field of the round that is not the same on all ranks."""
    parts = [(f"the tree's {field.name}", getattr(tree, field.name)) for field in fields(Tree)]
    parts += [(f"the drawn {field.name}", getattr(emitted, field.name)) for field in fields(Emitted)]
    own = torch.tensor([digest(value) for _, value in parts])
    held = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(held, own)
    every = torch.stack(held)
    differs = (every != every[0]).any(0).tolist()
    if any(differs):
        place = differs.index(True)
        ranks = [rank for rank, same in enumerate((every[:, place] == every[0, place]).tolist()) if not same]
        raise RuntimeError(f"ranks {', '.join(map(str, ranks))} have another value of {parts[place][0]} than rank 0.")


def digest(value: Tensor) -> int:
    """63 bits of a hash of the tensor's bytes."""
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
