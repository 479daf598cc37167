"""Keys of a `config.json`: what is missing, malformed or not supported; rope settings in every spelling.

Shared by target and drafter. Which keys each of them needs is in `configs.py`.
"""

import math
from typing import Any

from ..config import Rope

Json = dict[str, Any]

SIZE, COUNT = "a whole number of at least 1", "a whole number of at least 0"
NUMBER, AMOUNT = "a number above 0", "a number of at least 0"
FLAG, OBJECT = "true or false", "an object"
ANY = ""
YARN = {  # keys that it can do without
    "beta_fast": NUMBER, "beta_slow": NUMBER, "mscale": AMOUNT, "mscale_all_dim": AMOUNT, "attention_factor": NUMBER,
}  # fmt: skip


def malformed(config: Json, keys: dict[str, str]) -> list[str]:
    """One sentence for all absent keys, one for each value of the wrong kind."""
    absent = [key for key in keys if config.get(key) is None]
    problems = [f"{len(absent)} keys are missing or null: {', '.join(absent)}"] if absent else []
    wrong = [key for key, kind in keys.items() if key not in absent and not is_kind(config[key], kind)]
    return problems + [f"{key} is {config[key]!r}, not {keys[key]}" for key in wrong]


def malformed_if_given(config: Json, keys: dict[str, str]) -> list[str]:
    """As `malformed`, of keys that may be absent."""
    return malformed(config, {key: kind for key, kind in keys.items() if config.get(key) is not None})


def is_kind(value: Any, kind: str) -> bool:
    if kind == ANY:
        return True
    if kind in (FLAG, OBJECT):
        return isinstance(value, bool if kind == FLAG else dict)
    if isinstance(value, bool) or not isinstance(value, int | float if kind in (NUMBER, AMOUNT) else int):
        return False
    return math.isfinite(value) and (value >= 0 if kind in (COUNT, AMOUNT) else value > 0)


def differing(config: Json, fixed: Json) -> list[str]:
    given = [key for key in fixed if config.get(key) is not None]
    return [f"{key} is {config[key]!r}, only {fixed[key]!r} is supported" for key in given if config[key] != fixed[key]]


def _rope_settings(config: Json) -> Json:
    """One dict of `rope_scaling` or `rope_parameters`, `type` or `rope_type`, theta inside or beside."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return {"rope_theta": config.get("rope_theta"), **settings, "rope_type": kind}


def rope_problems(config: Json) -> list[str]:
    if problems := malformed_if_given(config, {"rope_parameters": OBJECT, "rope_scaling": OBJECT}):
        return problems
    settings = _rope_settings(config)
    kind = settings["rope_type"]
    if kind not in ("default", "yarn"):
        return [f"rope type {kind!r} is not supported, only 'yarn' or none"]
    keys = {"rope_theta": NUMBER}
    if kind == "yarn":
        keys |= {"factor": NUMBER, "original_max_position_embeddings": SIZE}
    problems = malformed(settings, keys) + differing(settings, {"truncate": True})
    problems += malformed_if_given(settings, YARN) if kind == "yarn" else []
    problems += [f"rope settings for {key} alone are not supported" for key in settings if key.endswith("_attention")]
    if kind == "yarn" and not problems and settings["factor"] < 1:
        problems.append(f"rope factor is {settings['factor']}, at least 1 is needed")
    return problems


def read_rope(config: Json, amplitude: float | None = None) -> Rope:
    settings = _rope_settings(config)
    if settings["rope_type"] == "default":
        return Rope(theta=float(settings["rope_theta"]), amplitude=1.0 if amplitude is None else amplitude)
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return Rope(
        theta=float(settings["rope_theta"]),
        factor=float(settings["factor"]),
        original_max_position=settings["original_max_position_embeddings"],
        amplitude=_amplitude(settings) if amplitude is None else amplitude,
        **{key: float(settings[key]) for key in optional if settings.get(key) is not None},
    )


def _amplitude(settings: Json) -> float:
    """Factor on cos and sin, as `transformers/modeling_rope_utils.py` has it for YaRN.

    `attention_factor` if given, else m(mscale) / m(mscale_all_dim) if both are, else m(1), where
    m(s) = 0.1 s ln(factor) + 1.
    """
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    log = 0.1 * math.log(settings["factor"])
    return (log * over + 1) / (log * under + 1) if over and under else log + 1
