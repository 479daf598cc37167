"""What makes another folder of the artefact store, beyond what test_warmup builds."""

import pytest
import torch

from kimi_fx.runtime.ingredients import ingredients
from kimi_fx.runtime.load import Loaded


@pytest.mark.parametrize(
    ("variable", "changes"),
    [
        ("CXX", {"CXX"}),
        ("TORCHINDUCTOR_VEC_ISA_OK", {"TORCHINDUCTOR_VEC_ISA_OK"}),
        ("TORCHINDUCTOR_CACHE_DIR", set()),
        ("TORCHINDUCTOR_COMPILE_THREADS", set()),
    ],
)
def test_settings_of_the_compilers(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, variable: str, changes: set[str]
) -> None:
    """Inductor names what it compiles by the compiler's command: with another one a store's kernels are not found."""
    monkeypatch.delenv(variable, raising=False)
    before = ingredients(loaded.model, torch.float32, torch.device("cpu"))
    monkeypatch.setenv(variable, "1")
    after = ingredients(loaded.model, torch.float32, torch.device("cpu"))
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == changes


def test_where_the_headers_are(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ingredients(loaded.model, torch.float32, torch.device("cpu"))
    monkeypatch.setattr("kimi_fx.runtime.ingredients.get_path", lambda _: "/elsewhere")
    after = ingredients(loaded.model, torch.float32, torch.device("cpu"))
    assert {key for key in before if before[key] != after[key]} == {"headers"}
