# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EngineSettings`: base class of the typed settings that an engine's judgement carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from xpuruntime.policies.compound_kinds import FrozenDict

if TYPE_CHECKING:
    from typing import Self

__all__ = ["EngineSettings"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable, hashable value: what one engine is loaded with, in the engine's own terms.

    Members that are dicts are frozen too. Equal requests give equal settings.
    """

    def __post_init__(self) -> None:
        """Freeze the members that are dicts, apart from what the caller passed."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is dict:
                msgspec.structs.force_setattr(self, name, _FrozenOptions(value))

    def replace(self, **changes: Any) -> Self:
        """Return the same settings with other values for some members."""
        return msgspec.structs.replace(self, **changes)


class _FrozenOptions(FrozenDict):
    """Options inside of settings."""

    __slots__ = ()
    OWNER: ClassVar[str] = "an engine's settings"
    FIX: ClassVar[str] = "use settings.replace(...)"
