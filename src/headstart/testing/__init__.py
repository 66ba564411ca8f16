"""Public test kit: small targets, and stub drafters that force any accept length. Never imported by the package.

Oracle(target, depth)            proposes the target's own greedy continuation: everything is accepted
Wrong(target, depth)             proposes tokens that the target will not pick: nothing is accepted
Mixed(target, depth, accepts)    right for accepts[step] tokens, then wrong; cycled over steps
tiny_target(...)                 a seeded random transformer of a real family
table_target(table)              a target whose next-token law is exactly known
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headstart.targets.table import TableTarget
from headstart.targets.tiny import tiny_target
from headstart.testing.stubs import Mixed, Oracle, Wrong

__all__ = ["Mixed", "Oracle", "Wrong", "table_target", "tiny_target"]


def table_target(table: torch.Tensor | Sequence[Any], max_positions: int = 4096) -> TableTarget:
    """`table[..., i, j, x]`: probability of x after i, j; one axis is a law without context. See `TableTarget`."""
    return TableTarget(torch.as_tensor(table, dtype=torch.float64), max_positions)
