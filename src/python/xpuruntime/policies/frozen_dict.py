# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FrozenDict`: a mapping inside a policy."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["FrozenDict"]


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed and can be hashed. ``dict(x)`` is a copy that can be changed."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("the mappings of a policy are frozen; make a copy with dict(...) and a new policy")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self
