"""How evenly a random router spreads tokens over its experts, and how many of them a round then reads.

Random hidden states go through random router weights, so a token's logits are normal and independent. Without a bias
every expert is as likely as any other; a bias makes some likelier, as chances of 1, 1/2, 1/3 … would. Tokens of one
text agree more than independent ones do, so real rounds read fewer experts than even routing says.
"""

import torch
from torch import Tensor

KINDS = ("uniform", "zipf")


def chances(kind: str, experts: int, chosen: int) -> Tensor:
    """[E] f64: how likely a token visits each expert, in descending order; they add up to `chosen`.

    Zipf: drawn one after another without return with chances of 1, 1/2, 1/3 …, which is a race of waiting times.
    """
    if kind == "uniform":
        return torch.full((experts,), chosen / experts, dtype=torch.float64)
    rate = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    low, high = 0.0, float(experts * chosen)  # when the race is stopped
    for _ in range(100):
        end = (low + high) / 2
        low, high = (end, high) if (1 - (-end * rate).exp()).sum() < chosen else (low, end)
    return 1 - (-low * rate).exp()


def expected_hits(
    chance: Tensor,  # [E]
    tokens: int,
) -> float:
    """Distinct experts that independent tokens visit."""
    return float((1 - (1 - chance) ** tokens).sum())


def router_bias(
    chance: Tensor,  # [E]
    spread: float,  # standard deviation of the router's logits
) -> Tensor:
    """[E] f32 under which sigmoid(logit) + bias is positive with these chances, so that the best are so chosen."""
    return -(spread * torch.special.ndtri(1 - chance)).sigmoid().float()
