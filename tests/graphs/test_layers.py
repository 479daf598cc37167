"""YaRN against transformers' own functions, rotations against complex numbers, the small layers against fp64."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kimi_fx.checkpoint import read_target
from kimi_fx.config import Rope
from kimi_fx.graphs import layers
from oracles.write_checkpoint import target_config

KIMI = {"rope_theta": 50000.0, "factor": 64.0, "original": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
ROPES = [
    KIMI,
    KIMI | {"factor": 32.0},
    {"rope_theta": 50000.0, "factor": 4.0, "original": 1024, "beta_fast": 32.0, "beta_slow": 1.0},
    {"rope_theta": 10000.0, "factor": 8.0, "original": 256, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_theta": 10000.0, "factor": 40.0, "original": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    {"rope_theta": 1e6, "factor": 1.5, "original": 32, "beta_fast": 8.0, "beta_slow": 7.0},
]


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("given", ROPES)
def test_inverse_frequencies_are_those_of_transformers(given: dict[str, Any], width: int) -> None:
    """Bit for bit."""
    original = given["original"]
    settings = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": original}
    settings |= {key: value for key, value in given.items() if key != "original"}
    length = round(original * given["factor"])
    config = DeepseekV3Config(qk_rope_head_dim=width, rope_parameters=settings, max_position_embeddings=length)
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = Rope(given["rope_theta"], given["factor"], original, given["beta_fast"], given["beta_slow"])
    assert theirs.shape == (width // 2,) and amplitude == 1.0
    assert torch.equal(layers.inverse_frequencies(rope, width), theirs)


def test_without_yarn() -> None:
    exact = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(layers.inverse_frequencies(Rope(10000.0), 64).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("factor", "scale"), [(64.0, 0.1446796), (32.0, 0.1308608)])
def test_scales_of_kimi(tmp_path: Path, factor: float, scale: float) -> None:
    """The published softmax scales of heads of 128 + 64; cos and sin are not scaled."""
    rope = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    config = target_config(qk_nope_head_dim=128, rope_scaling=rope | {"mscale": 1.0, "mscale_all_dim": 1.0})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_target(tmp_path, None)
    assert round(model.softmax_scale, 7) == scale
    assert model.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(factor) + 1) ** 2)
    assert model.rope.amplitude == 1.0


@pytest.fixture
def turned() -> tuple[Tensor, Tensor, Tensor]:
    """x [B, N, H, R], positions [B, N] and inverse frequencies."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 16, generator=generator)
    return x, torch.randint(0, 3000, (2, 5), generator=generator), layers.inverse_frequencies(Rope(10000.0), 16)


def by_complex(even: Tensor, odd: Tensor, positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
    """amplitude * (even + i odd) * exp(i position * frequency), in fp64 from the fp32 angle."""
    angle = (positions[:, :, None, None] * frequencies).double()
    return torch.complex(even.double(), odd.double()) * torch.polar(torch.full_like(angle, amplitude), angle)


@pytest.mark.parametrize("amplitude", [1.0, 1.25])
def test_pairs_are_complex_numbers(turned: tuple[Tensor, Tensor, Tensor], amplitude: float) -> None:
    x, positions, frequencies = turned
    cos, sin = layers.pair_angles(*layers.angles(positions, frequencies, amplitude))
    z = by_complex(x[..., 0::2], x[..., 1::2], positions, frequencies, amplitude)
    expected = torch.stack((z.real, z.imag), -1).flatten(-2)
    found = x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("amplitude", [1.0, 1.25])
def test_halves_are_complex_numbers(turned: tuple[Tensor, Tensor, Tensor], amplitude: float) -> None:
    x, positions, frequencies = turned
    cos, sin = layers.half_angles(*layers.angles(positions, frequencies, amplitude))
    z = by_complex(*x.chunk(2, -1), positions, frequencies, amplitude)
    expected = torch.cat((z.real, z.imag), -1)
    torch.testing.assert_close(layers.rotate_halves(x, cos, sin).double(), expected, rtol=0, atol=2e-6)


def test_rotation_in_bfloat16_rounds_once(turned: tuple[Tensor, Tensor, Tensor]) -> None:
    x, positions, frequencies = turned
    cos, sin = layers.half_angles(*layers.angles(positions, frequencies))
    x = x.bfloat16()
    ours = layers.rotate_halves(x, cos, sin)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, layers.rotate_halves(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_rms_norm(size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = size * torch.randn(3, 4, 32, generator=generator), torch.randn(32, generator=generator)
    for eps in (1e-5, 1e-6):
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight
        torch.testing.assert_close(layers.rms_norm(x, weight, eps).double(), exact, rtol=1e-5, atol=1e-6)
