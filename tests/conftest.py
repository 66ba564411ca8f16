"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from headstart.targets.hf import HFTarget
from headstart.testing import tiny_target

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def tiny() -> Callable[..., HFTarget]:
    """`tiny_target`, made once per set of arguments. Shared: tests must not change what it returns."""
    return cache(tiny_target)
