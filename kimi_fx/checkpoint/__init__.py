"""From a checkpoint folder to weights: config, files, preflight, loading, and a report on all of it."""

from .configs import read_drafter, read_target
from .files import CheckpointError
from .load import load_drafter, load_target, random_params
from .report import inspect

__all__ = [
    "CheckpointError",
    "inspect",
    "load_drafter",
    "load_target",
    "random_params",
    "read_drafter",
    "read_target",
]
