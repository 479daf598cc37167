"""kimi_fx: Kimi K2.x with speculative decoding, as pure functions over explicit weights.

    import kimi_fx
    print(kimi_fx.generate("def fibonacci(n):", max_tokens=64, temperature=0).outputs[0].text)

Importing it loads neither torch nor a model; the names below do so when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import generate
    from .compose import ConfigError, load_config
    from .config import SamplingParams
    from .engine import Engine

__all__ = ["ConfigError", "Engine", "SamplingParams", "generate", "load_config"]
__version__ = "0.1.0"

_HOMES = {"generate": "api", "Engine": "engine", "SamplingParams": "config"}
_HOMES |= {"load_config": "compose", "ConfigError": "compose"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kimi_fx' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
