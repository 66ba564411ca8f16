"""The names of the head families, and of layouts that others publish heads in: the one place that knows them.

Every entry is a loader, so that looking at the names imports no head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.heads.base import Head
    from headstart.heads.medusa_published import Converted


class Family(NamedTuple):
    """`config` is a frozen dataclass; a head is built as `head(config, width, vocab_size)`: D and U."""

    name: str
    config: type[Any]
    head: type[Head]


class Published(NamedTuple):
    """A foreign layout of a family: told by its config.json, and turned into ours."""

    family: str
    recognises: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Converted]


def _medusa() -> Family:
    from headstart.heads.medusa import Medusa, MedusaConfig

    return Family("medusa", MedusaConfig, Medusa)


def _medusa_published() -> Published:
    from headstart.heads.medusa_published import convert, recognises

    return Published("medusa", recognises, convert)


HEADS: Mapping[str, Callable[[], Family]] = MappingProxyType({"medusa": _medusa})
PUBLISHED: tuple[Callable[[], Published], ...] = (_medusa_published,)


def family(name: str) -> Family:
    """Raises BadInput for a name that is not in the table."""
    if name not in HEADS:
        raise BadInput(
            f"There is no head family {name!r}; the families are {', '.join(sorted(HEADS))}. "
            "If a newer headstart made this head, update."
        )
    return HEADS[name]()


def published(config: Mapping[str, Any]) -> Published | None:
    """The layout whose config.json this is, if it is one."""
    return next((layout for layout in (load() for load in PUBLISHED) if layout.recognises(config)), None)
