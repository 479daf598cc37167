"""INT4 words and scales: their meaning against compressed-tensors, Marlin's layout element by element."""

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops.marlin import (
    dequantise,
    marlin_pack,
    marlin_pack_scales,
    marlin_unpack,
    marlin_unpack_scales,
    unpack_words,
)

INT4 = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)

seeds = st.integers(0, 2**32 - 1)
experts = st.integers(1, 3)
inputs = st.integers(1, 5).map(lambda n: 32 * n)
outputs = st.integers(1, 3).map(lambda n: 64 * n)


def random_words(seed: int, *shape: int) -> Tensor:
    """Every code from -8 to 7 is as likely."""
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed)).int()


def random_scales(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_words_of_known_values() -> None:
    words = torch.tensor([1985229328, -19088744, 9], dtype=torch.int32)
    expected = [*range(-8, 0), *range(8), 1, *[-8] * 7]
    assert unpack_words(words).tolist() == expected


@settings(deadline=None, max_examples=25)
@given(seeds, st.integers(1, 9), inputs)
def test_unpacking_equals_compressed_tensors(seed: int, rows: int, width: int) -> None:
    words = random_words(seed, rows, width // 8)
    q = unpack_words(words)
    assert q.dtype == torch.int8
    assert torch.equal(q, unpack_from_int32(words, 4, torch.Size((rows, width)), packed_dim=1))
    assert torch.equal(pack_to_int32(q, num_bits=4, packed_dim=1), words)


@settings(deadline=None, max_examples=25)
@given(seeds, st.integers(1, 9), inputs)
def test_dequantising_equals_compressed_tensors(seed: int, rows: int, width: int) -> None:
    words, scales = random_words(seed, rows, width // 8), random_scales(seed, rows, width // 32)
    ours = dequantise(words, scales)
    q = unpack_from_int32(words, 4, torch.Size((rows, width)), packed_dim=1)
    assert same_bits(ours, dequantize(q, scales, None, INT4))
    on_disk = {
        "weight_packed": words,
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, width], dtype=torch.int32),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=INT4)
    assert same_bits(ours, PackedQuantizationCompressor.decompress(on_disk, scheme)["weight"])


def test_dequantising_rounds_the_exact_product_once() -> None:
    words, scales = random_words(0, 2, 64, 12), random_scales(1, 2, 64, 3)
    exact = unpack_words(words).double() * scales.double().repeat_interleave(32, dim=-1)
    assert torch.equal(dequantise(words, scales), exact.bfloat16())


@pytest.mark.parametrize(("width_in", "width_out"), [(32, 64), (64, 128), (96, 192)])
def test_packed_words_element_by_element(width_in: int, width_out: int) -> None:
    words = random_words(2, 2, width_out, width_in // 8)
    values = (unpack_words(words).int() + 8).tolist()  # [E][n][k]
    packed = marlin_pack(words)
    assert packed.shape == (2, width_in // 16, 2 * width_out) and packed.dtype == torch.int32
    for e, expert in enumerate(packed.tolist()):
        for k_tile, row in enumerate(expert):
            for place, word in enumerate(row):
                n_tile, in_tile = divmod(place, 128)
                thread, group = divmod(in_tile, 4)
                column = 64 * n_tile + 16 * group + thread // 4
                first = 16 * k_tile + 2 * (thread % 4)
                rows = (first, first + 1, first + 8, first + 9)
                v = [values[e][n][k] for n in (column, column + 8) for k in rows]
                nibbles = [(word >> 4 * p) & 15 for p in range(8)]
                assert nibbles == [v[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]


@pytest.mark.parametrize(("width_in", "width_out"), [(32, 64), (96, 192)])
def test_packed_scales_element_by_element(width_in: int, width_out: int) -> None:
    scales = random_scales(3, 2, width_out, width_in // 32)
    old, new = scales.tolist(), marlin_pack_scales(scales).tolist()
    for e in range(2):
        for group in range(width_in // 32):
            for block in range(0, width_out, 64):
                for i in range(8):
                    for j in range(8):
                        assert new[e][group][block + 8 * i + j] == old[e][block + i + 8 * j][group]


@settings(deadline=None, max_examples=25)
@given(seeds, experts, inputs, outputs)
def test_packing_round_trips_bit_for_bit(seed: int, E: int, K: int, N: int) -> None:
    words, scales = random_words(seed, E, N, K // 8), random_scales(seed, E, N, K // 32)
    packed, packed_scales = marlin_pack(words), marlin_pack_scales(scales)
    assert packed_scales.shape == (E, K // 32, N)
    assert torch.equal(marlin_unpack(packed), words)
    assert same_bits(marlin_unpack_scales(packed_scales), scales)
    # any int32 words are some matrix's packing, so the inverse holds both ways
    other = random_words(seed + 1, E, K // 16, 2 * N)
    assert torch.equal(marlin_pack(marlin_unpack(other)), other)
    assert same_bits(marlin_pack_scales(marlin_unpack_scales(packed_scales)), packed_scales)


def test_a_slice_of_a_larger_tensor_packs_like_its_copy() -> None:
    words, scales = random_words(4, 2, 128, 16), random_scales(5, 2, 128, 4)
    whole = dequantise(words, scales)
    for part, groups, meaning in (
        (words[:, 64:], scales[:, 64:], whole[:, 64:]),
        (words[:, :, 8:], scales[:, :, 2:], whole[:, :, 64:]),
    ):
        assert torch.equal(marlin_pack(part), marlin_pack(part.contiguous()))
        assert torch.equal(marlin_pack_scales(groups), marlin_pack_scales(groups.contiguous()))
        assert torch.equal(dequantise(part, groups), meaning)


@pytest.mark.parametrize(
    ("K", "N", "near_K", "near_N"),
    [
        (48, 64, "32 or 64", "64"),
        (64, 96, "64", "64 or 128"),
        (16, 32, "32", "64"),
        (336, 1000, "320 or 352", "960 or 1024"),
    ],
)
def test_widths_that_do_not_tile_are_refused(K: int, N: int, near_K: str, near_N: str) -> None:
    said = f"{K} inputs and {N} outputs, and the nearest that works has {near_K} inputs and {near_N} outputs"
    with pytest.raises(ValueError, match=said):
        marlin_pack(random_words(6, 1, N, K // 8))
    with pytest.raises(ValueError, match=said):
        marlin_unpack(random_words(6, 1, K // 16, 2 * N))


def test_scale_widths_that_do_not_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="32 inputs and 96 outputs"):
        marlin_pack_scales(random_scales(7, 1, 96, 1))
    with pytest.raises(ValueError, match="32 inputs and 96 outputs"):
        marlin_unpack_scales(random_scales(7, 1, 1, 96))


@pytest.mark.parametrize("pack", [marlin_pack, marlin_unpack, marlin_pack_scales, marlin_unpack_scales])
def test_shapes_and_dtypes(pack: Callable[[Tensor], Tensor]) -> None:
    """What an operator says of them; no experts are packed into none."""
    scales = "scales" in pack.__name__
    good = torch.zeros(0, 64, 128, dtype=torch.bfloat16 if scales else torch.int32)
    assert pack(good).numel() == 0 and pack(good).dtype == good.dtype
    for wrong in (good.flatten(0, 1), torch.tensor(1), *([] if scales else [good.float(), good.long()])):
        with pytest.raises(ValueError, match=rf"{pack.__name__} takes (words|packed|scales) of shape .*, found \["):
            pack(wrong)


def test_half_an_output() -> None:
    with pytest.raises(ValueError, match="an even number of columns, found 129"):
        marlin_unpack(random_words(6, 1, 2, 129))
