"""headstart: speculative decoding that never changes an output, on any Hugging Face causal LM.

The names below are the public ones; they are loaded when first used, so that importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headstart._version import __version__

if TYPE_CHECKING:
    from headstart.checkpoint import DraftSize as DraftSize
    from headstart.checkpoint import load_head as load_head
    from headstart.drafters.draft_model import DraftModel as DraftModel
    from headstart.drafters.lookup import PromptLookup as PromptLookup
    from headstart.errors import HeadstartError as HeadstartError
    from headstart.generation import Output as Output
    from headstart.generation import generate as generate
    from headstart.generation import stream as stream
    from headstart.policies.chain import Chain as Chain
    from headstart.policies.static import StaticTree as StaticTree
    from headstart.sampling import Sampling as Sampling
    from headstart.session import Session as Session
    from headstart.targets.load import load_target as load_target
    from headstart.verify.lossless import Lossless as Lossless
    from headstart.verify.target_only import TargetOnly as TargetOnly
    from headstart.verify.typical import Typical as Typical

_HOME = {
    "Chain": "policies.chain",
    "DraftModel": "drafters.draft_model",
    "DraftSize": "checkpoint",
    "HeadstartError": "errors",
    "Lossless": "verify.lossless",
    "Output": "generation",
    "PromptLookup": "drafters.lookup",
    "Sampling": "sampling",
    "Session": "session",
    "StaticTree": "policies.static",
    "TargetOnly": "verify.target_only",
    "Typical": "verify.typical",
    "generate": "generation",
    "load_head": "checkpoint",
    "load_target": "targets.load",
    "stream": "generation",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(f"headstart.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
