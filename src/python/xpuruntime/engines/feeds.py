# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FeedCheck`: the caller's arrays held against the model's inputs, once per new set of shapes."""

from __future__ import annotations

import difflib
import threading
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.evidence.records import Conversion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xpuruntime.engines.model import TensorInfo

__all__ = ["ConversionLog", "FeedCheck", "describe"]

_SEEN_LIMIT = 4096


class ConversionLog:
    """What was copied or converted, each said once with a count. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, what: str, reason: str, count: int = 1) -> None:
        """Count one more occurrence."""
        with self._lock:
            self._counts[what, reason] = self._counts.get((what, reason), 0) + count

    def records(self) -> tuple[Conversion, ...]:
        """Return the log so far."""
        with self._lock:
            return tuple(Conversion(what=w, reason=r, count=n) for (w, r), n in self._counts.items())


def describe(info: TensorInfo) -> str:
    """Return ``"x: float32 [N, 64]"``."""
    dims = ", ".join("?" if d is None else str(d) for d in info.shape) if info.shape is not None else "..."
    return f"{info.name}: {info.dtype} [{dims}]"


class FeedCheck:
    """Checks names, dtypes, ranks and shapes of feeds against the model.

    Shapes that passed once are remembered, so that the hot path costs one set look-up.

    Parameters
    ----------
    inputs : sequence of TensorInfo
        The model's inputs.
    optional : iterable of str
        Inputs that have a default and may be left out.
    """

    def __init__(self, inputs: Sequence[TensorInfo], optional: Iterable[str] = ()) -> None:
        self.infos = {info.name: info for info in inputs}
        self.required = tuple(info.name for info in inputs if info.name not in set(optional))
        self._seen: set[tuple[Any, ...]] = set()

    def names(self, feeds: Mapping[str, Any]) -> None:
        """Refuse missing and unknown input names, naming the nearest.

        Raises
        ------
        InputError
        """
        if not hasattr(feeds, "keys"):
            first = self.required[0] if self.required else "input"
            msg = f"inputs must be a dict of name to array, got {type(feeds).__name__}; pass {{{first!r}: array}}"
            raise InputError(msg)
        for name in feeds:
            if name not in self.infos:
                near = difflib.get_close_matches(str(name), self.infos, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                msg = f"the model has no input {name!r}{hint} Its inputs: {self._all()}"
                raise InputError(msg)
        missing = [name for name in self.required if name not in feeds]
        if missing:
            msg = f"input {missing[0]!r} is missing. The model's inputs: {self._all()}"
            raise InputError(msg)

    def check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Refuse one array by dtype, rank or fixed dimensions, showing expected and got.

        Raises
        ------
        InputError
        """
        info = self.infos[name]
        if dtype != info.dtype:
            msg = (
                f"input {name!r} has dtype {dtype}, the model expects {info.dtype}; convert it first "
                f"(NumPy: x.astype({info.dtype!r})). Nothing is converted silently"
            )
            raise InputError(msg)
        if info.shape is None:
            return
        expected = "[" + ", ".join("?" if d is None else str(d) for d in info.shape) + "]"
        if len(shape) != len(info.shape):
            msg = f"input {name!r} has rank {len(shape)} (shape {list(shape)}), the model expects rank {len(info.shape)}: {expected}"
            raise InputError(msg)
        for axis, (got, want) in enumerate(zip(shape, info.shape, strict=True)):
            if isinstance(want, int) and got != want:
                msg = f"input {name!r} has shape {list(shape)}, the model expects {expected}: axis {axis} must be {want}, got {got}"
                raise InputError(msg)

    def symbols(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return symbolic dimension to size; refuse two sizes for one symbol.

        Raises
        ------
        InputError
        """
        bound: dict[str, tuple[int, str]] = {}
        for name, shape in shapes.items():
            info = self.infos[name]
            for got, want in zip(shape, info.shape or (), strict=False):
                if not isinstance(want, str):
                    continue
                size, by = bound.setdefault(want, (got, name))
                if size != got:
                    msg = f"dimension {want!r} is {size} in input {by!r} but {got} in input {name!r}; they must be equal"
                    raise InputError(msg)
        return {symbol: size for symbol, (size, _) in bound.items()}

    def full(self, described: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Check every array given as name to ``(dtype, shape)``, then the symbols they share."""
        for name, (dtype, shape) in described.items():
            self.check(name, dtype, shape)
        self.symbols({name: shape for name, (_, shape) in described.items()})

    def known(self, key: tuple[Any, ...]) -> bool:
        """Say whether this exact set of shapes has passed before."""
        return key in self._seen

    def remember(self, key: tuple[Any, ...]) -> None:
        """Remember a set of shapes that passed."""
        if len(self._seen) >= _SEEN_LIMIT:
            self._seen.clear()
        self._seen.add(key)

    def _all(self) -> str:
        return "; ".join(describe(info) for info in self.infos.values())
