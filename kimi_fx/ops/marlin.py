"""INT4 experts on disk and in the layout the kernels read, bit-exact both ways, on any device.

On disk (compressed-tensors): words [E, N, K/8] int32, out-major, nibble i of word j (lowest first) the code
q + 8 of input 8j + i; scales [E, N, K/32] bf16. Packed (Marlin): tiles of 16 inputs x 64 outputs whose words
are the fragments of tensor-core instructions. Both mean bf16(q * scale), rounded once. Nothing here slices
over ranks; that comes first. Working memory is some 3 bytes a weight: call with as many experts as fit.
"""

import torch
from torch import Tensor

from .shapes import agree, require

GROUP = 32  # inputs that share a scale
TILE_IN, TILE_OUT = 16, 64  # what a tile covers


def unpack_words(
    words: Tensor,  # [..., K/8] int32, compressed-tensors order
) -> Tensor:
    """The integers q in -8..7 of every word, [..., K] int8."""
    return _codes(words).view(torch.int8) - 8


def dequantise(
    words: Tensor,  # [..., N, K/8] int32, compressed-tensors order
    scales: Tensor,  # [..., N, K/32] bf16
) -> Tensor:
    """What the format means: bf16(q * scale), [..., N, K] bf16."""
    q = unpack_words(words).unflatten(-1, (-1, GROUP))
    return (q * scales.unsqueeze(-1)).flatten(-2)


def marlin_pack(
    words: Tensor,  # [E, N, K/8] int32, compressed-tensors order
) -> Tensor:
    """The same codes as Marlin words, [E, K/16, 2N] int32: tiles k-major, 128 words a tile.

    Word 4t + g of a tile belongs to thread t = 4c + j and column group g. Its 8 codes are those with
    k = 8 hi + 2j + lo and n = 16g + 8 half + c, nibble 4 lo + 2 half + hi: the mask 0x000f000f then picks
    the pair (lo = 0, 1) that one 32-bit register of an m16n8k16 operand holds.

    ValueError for another shape or dtype, or unless K is a multiple of 32 and N of 64.
    """
    E, N, octets = agree("marlin_pack", {"words": (words, "E N K/8", torch.int32)}).values()
    K = 8 * octets
    _check(K, N)
    codes = _codes(words).view(E, N // TILE_OUT, 4, 2, 8, K // TILE_IN, 2, 4, 2)  # E n g half c k hi j lo
    return _words(codes.permute(0, 5, 1, 4, 7, 2, 8, 3, 6).reshape(E, K // TILE_IN, TILE_IN * N))


def marlin_unpack(
    packed: Tensor,  # [E, K/16, 2N] int32
) -> Tensor:
    """Inverse of `marlin_pack`: [E, N, K/8] int32 in compressed-tensors order."""
    E, tiles, columns = agree("marlin_unpack", {"packed": (packed, "E K/16 2N", torch.int32)}).values()
    require("marlin_unpack", columns % 2 == 0, "an even number of columns", columns)
    K, N = TILE_IN * tiles, columns // 2
    _check(K, N)
    codes = _codes(packed).view(E, K // TILE_IN, N // TILE_OUT, 8, 4, 4, 2, 2, 2)  # E k n c j g lo half hi
    return _words(codes.permute(0, 2, 5, 7, 3, 1, 8, 4, 6).reshape(E, N, K))


def marlin_pack_scales(
    scales: Tensor,  # [E, N, K/32] any dtype
) -> Tensor:
    """[E, K/32, N], every 64 columns transposed as 8 x 8, so that a thread's 8 scales are one vector.

    The order is the same where K is a single group. ValueError unless N is a multiple of 64.
    """
    _, N, groups = agree("marlin_pack_scales", {"scales": (scales, "E N K/32", None)}).values()
    _check(GROUP * groups, N)
    return _transpose_columns(scales.transpose(1, 2))


def marlin_unpack_scales(
    packed: Tensor,  # [E, K/32, N] any dtype
) -> Tensor:
    """Inverse of `marlin_pack_scales`: [E, N, K/32]."""
    _, groups, N = agree("marlin_unpack_scales", {"packed": (packed, "E K/32 N", None)}).values()
    _check(GROUP * groups, N)
    return _transpose_columns(packed).transpose(1, 2).contiguous()


def _codes(words: Tensor) -> Tensor:
    """[..., W] int32 -> [..., 8W] uint8 in 0..15, lowest nibble first (little-endian hosts and devices)."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def _words(codes: Tensor) -> Tensor:
    """Inverse of `_codes`."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int32)


def _transpose_columns(scales: Tensor) -> Tensor:
    return scales.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3)


def _check(K: int, N: int) -> None:
    if K % GROUP or N % TILE_OUT or not K or not N:
        raise ValueError(
            f"Marlin packing takes inputs in multiples of {GROUP} and outputs in multiples of {TILE_OUT}; "
            f"this matrix has {K} inputs and {N} outputs, and the nearest that works has "
            f"{_near(K, GROUP)} inputs and {_near(N, TILE_OUT)} outputs."
        )


def _near(width: int, step: int) -> str:
    """The usable widths on either side of `width`, or itself."""
    low, high = width // step * step, -(-width // step) * step
    return " or ".join(str(w) for w in sorted({low, high} - {0})) or str(step)
