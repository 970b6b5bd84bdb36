# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CallFacts`: the properties of one call that kernel rules match."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, TypeAlias, TypeVar

__all__ = ["ANY_CALL", "SIZES", "UNKNOWN", "CallFacts", "Fact", "Unknown", "unknown_sizes"]

T = TypeVar("T")


class Unknown(enum.Enum):
    """The type of `UNKNOWN`."""

    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return "UNKNOWN"


#: A property that the call has, or may have, and whose value is unknown.
UNKNOWN: Final = Unknown.UNKNOWN
#: A value; ``None`` where the call has no such property; `UNKNOWN`.
Fact: TypeAlias = T | Unknown | None

#: Operation to the sizes that its calls have.
SIZES: Final[dict[str, tuple[str, ...]]] = {"matmul": ("m", "n", "k"), "attention": ("head_dim", "kv")}


class CallFacts(NamedTuple):
    """The properties of one call, or of a node of a graph, that kernel rules match.

    Each is a value, ``None`` where the call has no such property, or `UNKNOWN`. A key that a rule states is never met
    by ``None``, and may be met by `UNKNOWN`. Each source of calls has one function that makes these; see
    ``docs/design/rules.md``.
    """

    op: Fact[str] = None
    m: Fact[int] = None
    n: Fact[int] = None
    k: Fact[int] = None
    head_dim: Fact[int] = None
    kv: Fact[int] = None
    dtype: Fact[str] = None
    device: Fact[str] = None
    arch: Fact[str] = None
    node: Fact[str] = None
    module: Fact[str] = None
    phase: Fact[str] = None


#: The facts of a call of which nothing is known.
ANY_CALL: Final = CallFacts(*[UNKNOWN] * len(CallFacts._fields))


def unknown_sizes(op: str) -> dict[str, Unknown]:
    """Return the sizes that calls of an operation have, all unknown."""
    return dict.fromkeys(SIZES.get(op, ()), UNKNOWN)
