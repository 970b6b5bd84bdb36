# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Binding`: static input and output buffers of one loaded model, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import ge
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xpuruntime.engines.arrays import kind_of, to_host
from xpuruntime.engines.input_binding import (
    closed_binding,
    empty_host_array,
    fixed_shape,
    host_array,
    is_tensor,
    known_outputs,
    type_name,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.engines.host_model import HostModel
    from xpuruntime.engines.model import ModelInfo, TensorInfo


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

    def __repr__(self) -> str:
        held = (f"{what} {name!r}" for what in ("input", "output") for name in self.__dict__.get(what, ()))
        return f"<{type(self).__name__}: {', '.join(held) or 'closed'}>"

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


Array = np.ndarray[Any, Any]

#: Positions of caches in the inputs and outputs of operators that write a cache in place where both are one buffer.
_CACHES = {("com.microsoft", "GroupQueryAttention"): {3: 1, 4: 2}}


class HostBuffers(ABC):
    """Arrays bound to one `HostModel`. Nothing is run to learn a size.

    An output gets memory where the caller passes an array, or where the model gives its sizes as numbers or as
    dimensions of inputs; any other is made by the engine in each run, and may have another size in each.
    """

    def __init__(self, model: HostModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        check = model._check
        check.names({**dict.fromkeys(check.required), **inputs})
        self._model = model
        self._infos = {info.name: info for info in model._info.outputs}
        names = [name for name in check.infos if name in check.required or name in inputs]
        self.inputs = {name: _input_buffer(check.infos[name], inputs.get(name)) for name in names}
        check.full({name: (type_name(a, check.infos[name]), a.shape) for name, a in self.inputs.items()})
        known_outputs(outputs, model._outputs)
        self.buffers = {name: _output_buffer(name, array) for name, array in outputs.items() if array is not None}
        self.outputs: dict[str, Array] = {}
        self.copied: frozenset[str] = frozenset()
        self.fixed: set[str] = set()
        self._untrue: set[str] = set()
        self.place()

    def place(self) -> None:
        """Find the memory of every output, and say which the engine has to make."""
        sizes = self._model._check.symbols({name: array.shape for name, array in self.inputs.items()})
        outputs: dict[str, Array] = {}
        for name in self._model._outputs:
            wanted = self._wanted(name, sizes)
            if name in self.buffers:
                wanted = self._kept(name, wanted)
                outputs[name] = _fitting(name, self.buffers[name], self._infos[name], wanted)
            elif wanted is not None:
                outputs[name] = self._made(name, wanted)
        self.copied = self._overlapping(outputs)
        self.outputs.clear()
        self.outputs.update(outputs)
        self.fixed = set(outputs)
        self.changed = False
        self.arrange()

    def _wanted(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return the shape of an output where it follows from those of the inputs, as the model states them."""
        info = self._infos[name]
        if info.kind == "unknown":
            return None
        if not is_tensor(info) or info.dtype == "string":
            what = "holds strings, which have" if is_tensor(info) else "is no tensor, so it has"
            raise InputError(f"output {name!r} {what} no fixed buffer. Fix: use run()")
        if name in self._untrue or info.shape is None or info.dtype == "unknown":
            return None
        shape = tuple(sizes.get(size) if isinstance(size, str) else size for size in info.shape)
        return None if None in shape else shape  # type: ignore[return-value]

    def _kept(self, name: str, wanted: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the shape of a cache that is written in place and has room for more than the model states so far."""
        if wanted is None:
            return None
        for source, array in self.inputs.items():
            roomy = len(array.shape) == len(wanted) and all(map(ge, array.shape, wanted))
            if roomy and self.in_place(source, name):
                kept: tuple[int, ...] = array.shape
                return kept
        return wanted

    def _made(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return the memory that an output has already, or that of another run's size."""
        held = self.outputs.get(name)
        dtype = np.dtype(self._infos[name].dtype)
        if held is not None and (held.shape, held.dtype) == (shape, dtype) and not self._is_input(held):
            return held
        return empty_host_array(name, shape, dtype)

    def _is_input(self, array: Array) -> bool:
        return any(np.may_share_memory(array, input_) for input_ in self.inputs.values())

    def _overlapping(self, outputs: Mapping[str, Array]) -> frozenset[str]:
        """Return the outputs that share memory with an input which the engine must not write while it reads."""
        names = set()
        model = self._model
        for name, array in outputs.items():
            for other, buffer in outputs.items():
                if other != name and np.may_share_memory(array, buffer):
                    raise InputError(
                        f"the buffers of outputs {name!r} and {other!r} share memory. Fix: give each its own"
                    )
            shared = [other for other, buffer in self.inputs.items() if np.may_share_memory(array, buffer)]
            if not shared or (len(shared) == 1 and self.in_place(shared[0], name)):
                continue
            if model._strict:
                msg = (
                    f"the buffer of output {name!r} shares memory with input {shared[0]!r}, so that each run would "
                    "copy the result, and the policy is strict. Fix: give the output a buffer of its own"
                )
                raise InputError(msg)
            model._log.add(
                f"output {name!r} copied after each bound run", f"its buffer shares memory with input {shared[0]!r}"
            )
            names.add(name)
        return frozenset(names)

    def in_place(self, source: str, name: str) -> bool:
        """Say whether the engine writes this output over this input, whose very memory it has. None does by default."""
        del source, name
        return False

    def rebind(self, what: str, name: str, array: Any) -> None:
        """Bind another array in place of a buffer, from the next run on."""
        if what == "output":
            self.buffers[name] = _output_buffer(name, array)
            self.place()
            return
        check = self._model._check
        info = check.infos[name]
        if not hasattr(array, "__dlpack__"):
            fix = f"binding.inputs[{name!r}][...] = value, or pass an array"
            raise InputError(f"input {name!r} is given as a {type(array).__name__}", fix=fix)
        buffer = _input_buffer(info, array)
        check.check(name, type_name(buffer, info), buffer.shape)
        self.inputs[name] = buffer
        self.changed = True

    def untrue(self, name: str, shape: tuple[int, ...]) -> None:
        """Take note that an output has another shape than the model states: the engine makes it from now on."""
        if name in self.buffers:
            msg = (
                f"output {name!r} changed its shape from {list(self.buffers[name].shape)} to {list(shape)}: it depends "
                "on the values of the inputs"
            )
            raise InputError(msg, fix=f"leave {name!r} out of bind(outputs=...), so that the engine makes it")
        self._untrue.add(name)
        self.fixed.discard(name)

    def copy_result(self, name: str, result: Array) -> None:
        """Copy what the engine made into the buffer of an output; keep it where there is none."""
        target = self.outputs.get(name)
        if target is not None and name in self.fixed and target.shape != result.shape:
            self.untrue(name, result.shape)
        if target is None or name not in self.fixed:
            self.outputs[name] = np.array(result)
        elif target.dtype != result.dtype:
            raise InputError(f"output {name!r} is {result.dtype.name}, got a buffer of {target.dtype.name}")
        else:
            np.copyto(target, result)

    @abstractmethod
    def arrange(self) -> None:
        """Hand the buffers to the engine."""

    @abstractmethod
    def run(self) -> None:
        """Run on the buffers."""

    def close(self) -> None:
        """Forget the buffers."""
        self.inputs.clear()
        self.outputs.clear()
        self.buffers.clear()


class HostBinding(Binding):
    """NumPy buffers bound to one `HostModel`. Not for use by two threads at once."""

    def __init__(self, buffers: HostBuffers) -> None:
        self.graph = "off"
        self._held: HostBuffers | None = buffers
        names = buffers._model._outputs
        self.inputs = Buffers("input", buffers.inputs, rebind=buffers.rebind)
        self.outputs = Buffers("output", buffers.outputs, names, rebind=buffers.rebind)
        self.run = buffers.run

    def close(self) -> None:
        """Release the binding; the arrays live on while you hold them."""
        self.run = closed_binding
        held, self._held = self._held, None
        if held is not None:
            held.close()
        self.inputs, self.outputs = Buffers("input", {}), Buffers("output", {})


def writes_cache(info: ModelInfo, source: str, name: str) -> bool:
    """Say whether the output `name` is the cache `source` which one operator alone reads, and writes in place."""
    readers = [node for node in info.nodes if source in node.inputs]
    if len(readers) != 1 or readers[0].graph:
        return False
    node = readers[0]
    at = _CACHES.get((node.domain, node.op), {}).get(node.inputs.index(source))
    return at is not None and at < len(node.outputs) and node.outputs[at] == name


def _input_buffer(info: TensorInfo, buffer: Any) -> Array:
    if buffer is None or isinstance(buffer, tuple) or info.dtype == "string" or not is_tensor(info):
        return empty_host_array(info.name, fixed_shape(info, buffer), np.dtype(info.dtype))
    if isinstance(buffer, list) and all(isinstance(size, int) for size in buffer):
        msg = f"input {info.name!r}: a shape is a tuple. Fix: pass bind({{{info.name!r}: {tuple(buffer)}}})"
        raise InputError(msg)
    array = host_array(info, buffer)
    if not array.flags.c_contiguous:
        msg = (
            f"input {info.name!r} is not C-contiguous, so its memory cannot be bound. Fix: pass "
            "np.ascontiguousarray(x), or its shape"
        )
        raise InputError(msg)
    return array


def _output_buffer(name: str, buffer: Any) -> Array:
    if not hasattr(buffer, "__dlpack__"):
        msg = (
            f"output {name!r} is given as a {type(buffer).__name__}. Fix: pass an array to write into, or leave it out"
        )
        raise InputError(msg)
    array = to_host(name, buffer, kind_of(name, buffer))
    if not array.flags.c_contiguous or not array.flags.writeable:
        msg = f"output {name!r} must be C-contiguous and writable to be bound. Fix: pass np.empty(shape, dtype)"
        raise InputError(msg)
    return array


def _fitting(name: str, array: Array, info: TensorInfo, wanted: tuple[int, ...] | None) -> Array:
    sizes: tuple[Any, ...] | None = wanted if wanted is not None else info.shape
    fits = sizes is None or (
        len(sizes) == array.ndim
        and all(not isinstance(size, int) or size == got for size, got in zip(sizes, array.shape, strict=True))
    )
    if (info.dtype != "unknown" and type_name(array, info) != info.dtype) or not fits:
        shape = "[" + ", ".join("?" if size is None else str(size) for size in sizes or ()) + "]"
        msg = (
            f"output {name!r} is {info.dtype} {shape} for these inputs, as the model states it, got "
            f"{array.dtype.name} {list(array.shape)}. Fix: pass such an array, or leave the output out"
        )
        raise InputError(msg)
    return array
