# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FrozenDict`: a mapping inside of an immutable value, such as a policy."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

__all__ = ["FrozenDict"]


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed and can be hashed. ``dict(x)`` is a copy that can be changed."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    #: What it is a part of, for the error.
    OWNER: ClassVar[str] = "a policy"
    #: What to do instead.
    FIX: ClassVar[str] = "make a copy with dict(...) and a new policy"

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(f"the mappings of {self.OWNER} are frozen; {self.FIX}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self
