# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Binding`: static input and output buffers of one loaded model, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Binding", "Buffers"]


class Buffers(MutableMapping[str, Any]):
    """The buffers of a binding by name. An assignment binds another array where the engine can; else it is refused."""

    __slots__ = ("_arrays", "_names", "_rebind", "_what")

    def __init__(
        self,
        what: str,
        arrays: Mapping[str, Any],
        names: Sequence[str] | None = None,
        *,
        rebind: Callable[[str, str, Any], None] | None = None,
    ) -> None:
        for key, value in (("_what", what), ("_arrays", arrays), ("_names", names), ("_rebind", rebind)):
            object.__setattr__(self, key, value)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            raise self._unknown(name) from None

    def __setitem__(self, name: str, array: Any) -> None:
        if name not in (self._names or self._arrays):
            raise self._unknown(name)
        if array is self._arrays.get(name):  # as after `inputs["x"] += 1`
            return
        if self._rebind is None:
            msg = f"{self._what} {name!r} of this binding keeps its memory, so that no other array takes its place"
            raise InputError(msg, fix=f"binding.{self._what}s[{name!r}][...] = array, or bind again")
        self._rebind(self._what, name, array)

    def __delitem__(self, name: str) -> None:
        raise InputError(f"{self._what} {name!r} cannot be taken out of a binding", fix="session.bind(...) again")

    def __setattr__(self, name: str, value: Any) -> None:
        fix = f"binding.{self._what}s[{name!r}] = array"
        raise InputError(f"the {self._what}s of a binding are items, and {name!r} is no attribute", fix=fix)

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"the {self._what}s of a binding are items, and {name!r} is no attribute. "
        raise AttributeError(f"{msg}Fix: binding.{self._what}s[{name!r}]")

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def get(self, name: str, default: Any = None) -> Any:
        """Return a buffer, or `default` where there is none of this name."""
        return self._arrays.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return repr(self._arrays)

    def _unknown(self, name: Any) -> InputError:
        names: list[str] = list(self._names or self._arrays)
        if not names:
            return InputError("this binding is closed; bind again")
        if name in names:
            msg = f"the engine makes output {name!r} in each run, since the model does not tell its size"
            return InputError(msg, fix=f"binding.run() first, or session.bind(..., outputs={{{name!r}: array}})")
        known = ", ".join(names)
        return InputError(f"this binding has no {self._what} {name!r}", fix=f"use one of its {self._what}s: {known}")


class Binding(ABC):
    """Static input and output buffers of one loaded model; see `InferenceSession.bind`.

    `inputs` and `outputs` map names to the buffers: write into the inputs, `run()`, read the outputs. `run` takes no
    arguments and is the hot path.
    """

    run: Callable[[], None]
    #: "captured", "off", or the reason why no CUDA graph was captured.
    graph: str

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The buffers of inputs; ``inputs[name] = array`` binds another array on the CPU, and is refused on CUDA."""
        return self._buffers("input")

    @inputs.setter
    def inputs(self, arrays: Mapping[str, Any]) -> None:
        self._take("input", arrays)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The buffers of outputs, as `inputs`."""
        return self._buffers("output")

    @outputs.setter
    def outputs(self, arrays: Mapping[str, Any]) -> None:
        self._take("output", arrays)

    def _buffers(self, what: str) -> Buffers:
        buffers: Buffers = self.__dict__[what]
        return buffers

    def _take(self, what: str, arrays: Mapping[str, Any]) -> None:
        held = self.__dict__.get(what)
        if held and arrays and arrays is not held:
            held.update(arrays)  # each as an assignment of its own
        else:
            self.__dict__[what] = arrays if isinstance(arrays, Buffers) else Buffers(what, arrays)

    @abstractmethod
    def close(self) -> None:
        """Release the buffers. Idempotent."""
