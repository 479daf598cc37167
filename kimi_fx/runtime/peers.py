"""The memory that ranks share for small sums: each has a buffer that the others' devices store into."""

import ctypes
import pickle
from itertools import permutations

import torch
from torch import Tensor
from torch.distributed import Store
from torch.multiprocessing.reductions import reduce_tensor

from ..ops.peer_sum import JOINED, Peers, buffer_size

NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: of NVLink, not of PCIe


def first_gap(devices: int) -> tuple[int, int] | None:
    """Two of the first devices that no NVLink joins, directly or through a switch."""
    return next((pair for pair in permutations(range(devices), 2) if not linked(*pair)), None)


def linked(first: int, second: int) -> bool:
    """Whether stores and atomics of one device reach the memory of the other."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, first, second)
    return not failed and bool(found.value)


def share(group: str, store: Store, rank: int, ranks: int, device: torch.device) -> None:
    """Map every rank's buffer; all ranks call it together."""
    own = torch.zeros(buffer_size(ranks), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # zero before another rank stores into it
    store.set(f"buffer{rank}", pickle.dumps(reduce_tensor(own)).hex())
    buffers = tuple(own if other == rank else mapped(store, other) for other in range(ranks))
    JOINED[group] = Peers(rank, buffers, torch.tensor([buffer.data_ptr() for buffer in buffers], device=device))


def mapped(store: Store, rank: int) -> Tensor:
    """Another rank's buffer."""
    rebuild, arguments = pickle.loads(bytes.fromhex(store.get(f"buffer{rank}").decode()))
    return rebuild(*arguments)


def part(group: str) -> None:
    """Forget the buffers, once no graph is left that stores into them."""
    JOINED.pop(group, None)
