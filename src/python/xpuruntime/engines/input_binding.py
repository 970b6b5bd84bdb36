# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Input validation: the caller's arrays are checked against the model's inputs, once per new set of shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import kind_of, to_host, torch_dtype_name
from xpuruntime.errors import InputError, OutOfMemoryError, XpuRuntimeError
from xpuruntime.evidence.records import Conversion
from xpuruntime.policies.document import nearest, question

if TYPE_CHECKING:
    import numpy as np

    from xpuruntime.engines.model import TensorInfo

_SEEN_LIMIT = 4096


def describe(info: TensorInfo) -> str:
    """Return ``"x: float32 [N, 64]"``, or ``"s: sequence of float32 [N, 64]"``."""
    dims = ", ".join("?" if d is None else str(d) for d in info.shape) if info.shape is not None else "..."
    kind = "" if is_tensor(info) else f"{info.kind} of "
    return f"{info.name}: {kind}{info.dtype} [{dims}]"


def wrong_type(name: str, dtype: str, wanted: str) -> InputError:
    """Return the error for an array of another type than the model's, with how NumPy and torch convert."""
    convert = f"NumPy: x.astype({wanted!r}), torch: x.to(torch.{wanted})"
    if wanted == "string":
        convert = "NumPy: an array of dtype object that holds str"
    elif wanted == "bfloat16":
        convert = "NumPy: x.astype(ml_dtypes.bfloat16), torch: x.to(torch.bfloat16)"
    msg = (
        f"input {name!r} has dtype {dtype}, the model expects {wanted}; nothing is converted silently. "
        f"Fix: convert it first ({convert})"
    )
    return InputError(msg)


def host_array(info: TensorInfo, array: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy view of an input; see `to_host`."""
    kind = kind_of(info.name, array)
    try:
        return to_host(info.name, array, kind)
    except InputError:
        if kind == "torch" and torch_dtype_name(array.dtype) != info.dtype:  # such as one that NumPy does not have
            raise wrong_type(info.name, torch_dtype_name(array.dtype), info.dtype) from None
        raise


def _text(name: str, host: np.ndarray[Any, Any], log: ConversionLog) -> np.ndarray[Any, Any]:
    """Return an array of `str` objects; engines take no fixed-width strings, and write bytes as Python shows them."""
    if host.dtype.kind in "US":
        log.add(f"input {name!r} converted to Python strings", "the engine takes no fixed-width strings")
        host = host.astype(object)
    if not any(isinstance(element, bytes) for element in host.flat):
        return host
    log.add(f"input {name!r} decoded from UTF-8", "the engine takes no bytes in place of strings")
    text: np.ndarray[Any, Any] = host.copy()
    try:
        for at, element in enumerate(host.flat):
            text.flat[at] = element.decode() if isinstance(element, bytes) else element
    except UnicodeDecodeError as error:
        msg = f"input {name!r} has bytes that are not UTF-8 text: {error.reason} at byte {error.start}"
        raise InputError(msg, fix="pass str, or text encoded as UTF-8") from None
    return text


def is_tensor(info: TensorInfo) -> bool:
    """Say whether `info` is a tensor; sequences, maps and optionals are not."""
    return info.kind == "tensor"


def closed_binding(*_: Any, **__: Any) -> Any:
    """Stand in for a binding's `run` after `close`."""
    raise XpuRuntimeError("this binding is closed; bind again")


def fixed_shape(info: TensorInfo, stated_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of a buffer: the one given, else the model's own."""
    if info.dtype == "string" or not is_tensor(info):
        msg = f"input {info.name!r} ({describe(info)}) has no fixed buffer. Fix: use run()"
        raise InputError(msg)
    if stated_shape is None and info.shape is None:
        msg = f"the rank of input {info.name!r} is not known. Fix: pass bind({{{info.name!r}: shape or array}})"
        raise InputError(msg)
    shape = []
    size: Any
    for size in stated_shape if stated_shape is not None else info.shape or ():
        if hasattr(size, "__index__") and int(size) < 0:
            msg = f"input {info.name!r} cannot have the shape {tuple(stated_shape or ())}: a size is 0 or more"
            raise InputError(msg)
        if not hasattr(size, "__index__"):
            msg = (
                f"input {info.name!r} has free dimensions ({describe(info)}); "
                f"pass bind({{{info.name!r}: shape or array}})"
            )
            raise InputError(msg)
        shape.append(int(size))
    return tuple(shape)


def empty_host_array(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return a host buffer of zeros."""
    import numpy as np

    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError, OverflowError) as error:  # beyond what an address can hold
        raise _no_room(name, shape, error) from None


def _no_room(name: str, shape: tuple[int, ...], error: Exception) -> OutOfMemoryError:
    msg = f"no host memory for {name!r} of shape {list(shape)}: {error}. Fix: use a smaller batch"
    return OutOfMemoryError(msg, device="cpu")


def check_mapping(mapping: Any, name: str = "input", *, what: str = "inputs") -> None:
    """Refuse what is no mapping of names to arrays."""
    if not isinstance(mapping, dict) and not (hasattr(mapping, "keys") and hasattr(mapping, "__getitem__")):
        msg = f"{what} must be a dict of name to array, got {type(mapping).__name__}. Fix: pass {{{name!r}: array}}"
        raise InputError(msg)


def check_call(feeds: Any, other: Mapping[str, Any], method: str = "run", extra: Sequence[Any] = ()) -> None:
    """Refuse a call of `InferenceSession` that has the form of ONNX Runtime's, or unknown arguments."""
    theirs = {"output_names", "input_feed", "run_options", "callback", "user_data"}.intersection(other)
    listed = isinstance(feeds, (list, tuple)) and all(isinstance(feed, str) for feed in feeds)
    if theirs or feeds is None or listed or extra:
        names = other.get("output_names") or feeds
        chosen = f", outputs={list(names)!r}" if isinstance(names, (list, tuple)) else ""
        received = f"{feeds!r} in the place of the inputs" if feeds is None or listed else "more than the inputs"
        received = f"the argument {min(theirs)!r}" if theirs else received
        msg = f"{method} takes the inputs first, and got {received}, as ONNX Runtime's own {method} has it"
        fix = f"session.run({{name: array}}{chosen}), which returns a dict of output name to array"
        if method == "run_async":
            fix = f"future = session.run_async({{name: array}}{chosen}), then future.result() or "
            fix += "future.add_done_callback(f)"
        raise InputError(msg, fix=fix)
    if other:
        known = ("stream", "outputs", *(("queue", "timeout") if method == "run_async" else ()))
        near = nearest(min(other), known)
        fix = f"{near}=" if near else f"leave it out; there are {', '.join(known)}"
        raise TypeError(f"{method} has no argument {min(other)!r}. Fix: {fix}")


def chosen_outputs(chosen: Any, names: Sequence[str]) -> list[str]:
    """Return the outputs that a caller chose, each once."""
    if not isinstance(chosen, (list, tuple)) or not chosen:
        what = repr(chosen) if isinstance(chosen, (str, list, tuple)) else f"an object of type {type(chosen).__name__}"
        raise InputError(f"outputs is a list of names, got {what}", fix=f"outputs=[{names[0]!r}], or leave it out")
    known_outputs(chosen, names)
    return list(dict.fromkeys(chosen))


def known_outputs(output_names: Iterable[str], names: Sequence[str]) -> None:
    """Refuse an output that the model does not have."""
    unknown = sorted(str(name) for name in output_names if name not in names)
    if unknown:
        msg = f"the model has no output {unknown[0]!r}; its outputs: {', '.join(names)}"
        raise InputError(msg)


def refuse_stream(stream: Any) -> None:
    """Refuse a stream on the CPU."""
    if stream is not None:
        msg = "stream= is for CUDA sessions; this one runs on the CPU, in the calling thread. Leave it out"
        raise InputError(msg)


class InputValidator:
    """Checks names, dtypes, ranks and shapes of feeds against the model.

    Shapes that passed once are remembered, so that the hot path costs one set look-up.
    """

    def __init__(self, inputs: Sequence[TensorInfo], optional: Iterable[str] = (), *, equal: bool = False) -> None:
        self._equal = equal
        self.infos = {info.name: info for info in inputs}
        self.required = tuple(info.name for info in inputs if info.name not in set(optional))
        self._seen: set[tuple[Any, ...]] = set()

    def names(self, feeds: Mapping[str, Any]) -> None:
        """Refuse missing and unknown input names, naming the nearest."""
        check_mapping(feeds, self.required[0] if self.required else "input")
        for name in feeds:
            if name not in self.infos:
                near = nearest(str(name), self.infos)
                msg = f"the model has no input {name!r}{question(near, '.')} Its inputs: {self._all()}"
                raise InputError(msg, fix=f"pass {{{near or next(iter(self.infos))!r}: array}}")
        missing = [name for name in self.required if name not in feeds]
        if missing:
            msg = f"input {missing[0]!r} is missing. The model's inputs: {self._all()}"
            raise InputError(msg, fix=f"pass {{{missing[0]!r}: array}}")

    def check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Refuse one array by dtype, rank or fixed dimensions, showing expected and got."""
        info = self.infos[name]
        if dtype != info.dtype:
            raise wrong_type(name, dtype, info.dtype)
        if info.shape is None:
            return
        expected = "[" + ", ".join("?" if d is None else str(d) for d in info.shape) + "]"
        if len(shape) != len(info.shape):
            msg = (
                f"input {name!r} has rank {len(shape)} (shape {list(shape)}), the model expects rank "
                f"{len(info.shape)}: {expected}. Fix: pass an array of that shape"
            )
            raise InputError(msg)
        for axis, (got, limit) in enumerate(zip(shape, info.limits, strict=False)):
            if limit is not None and not limit[0] <= got <= limit[1]:
                size = str(limit[0]) if limit[0] == limit[1] else f"from {limit[0]} to {limit[1]}"
                msg = (
                    f"input {name!r} has shape {list(shape)}, but execution.shapes states that axis {axis} is {size}, "
                    f"got {got}. Fix: pass such an array, or state {got} there"
                )
                raise InputError(msg)
        for axis, (got, want) in enumerate(zip(shape, info.shape, strict=True)):
            if isinstance(want, int) and got != want:
                msg = (
                    f"input {name!r} has shape {list(shape)}, the model expects {expected}: axis {axis} must be "
                    f"{want}, got {got}. Fix: pass an array of that shape"
                )
                raise InputError(msg)

    def symbols(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return symbolic dimension to size, without those that have several."""
        bound: dict[str, tuple[int, str]] = {}
        several: set[str] = set()
        for name, shape in shapes.items():
            info = self.infos[name]
            for got, want in zip(shape, info.shape or (), strict=False):
                if not isinstance(want, str):
                    continue
                size, by = bound.setdefault(want, (got, name))
                if size == got:
                    continue
                if self._equal:
                    msg = (
                        f"dimension {want!r} is {size} in input {by!r} but {got} in input {name!r}; they must be equal"
                    )
                    raise InputError(msg)
                several.add(want)
        return {symbol: size for symbol, (size, _) in bound.items() if symbol not in several}

    def full(self, described: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Check every array given as name to ``(dtype, shape)``, then the symbols they share."""
        for name, (dtype, shape) in described.items():
            self.check(name, dtype, shape)
        if self._equal:
            self.symbols({name: shape for name, (_, shape) in described.items()})

    def admit(self, described: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Check every array as `full` does, unless arrays of just these types and shapes have passed before."""
        key = tuple(described.items())
        if not self.known(key):
            self.full(described)
            self.remember(key)

    def on_host(self, feeds: Mapping[str, Any], *, strict: bool, log: ConversionLog) -> dict[str, Any]:
        """Return NumPy arrays ready for an engine: checked, shared where possible, copied once where not contiguous."""
        self.names(feeds)
        tensors = {name: is_tensor(self.infos[name]) for name in feeds}
        hosts = {n: host_array(self.infos[n], a) for n, a in feeds.items() if tensors[n]}
        self.full({n: (type_name(a, self.infos[n]), a.shape) for n, a in hosts.items()})
        ready: dict[str, Any] = {n: self.contiguous(n, a, strict=strict, log=log) for n, a in hosts.items()}
        for name in feeds:
            if not tensors[name]:
                ready[name] = self._other(name, feeds[name], strict=strict, log=log)
        return ready

    def _other(self, name: str, value: Any, *, strict: bool, log: ConversionLog) -> Any:
        """Return a sequence, optional or map as an engine takes it: arrays inside are checked as others are."""
        info = self.infos[name]
        if info.kind == "map" or (info.kind == "optional" and value is None):
            return value
        if info.kind == "sequence" and not isinstance(value, (list, tuple)):
            msg = f"input {name!r} is a sequence: pass a list of {info.dtype} arrays, got {type(value).__name__}"
            raise InputError(msg)
        many = isinstance(value, (list, tuple))
        arrays = []
        for item in value if many else (value,):
            host = host_array(info, item)
            self.check(name, type_name(host, info), host.shape)
            arrays.append(self.contiguous(name, host, strict=strict, log=log))
        return arrays if many else arrays[0]

    def contiguous(
        self, name: str, host: np.ndarray[Any, Any], *, strict: bool, log: ConversionLog
    ) -> np.ndarray[Any, Any]:
        """Return one host array as an engine takes it: copied once where it is not contiguous; see `on_host`."""
        want = self.infos[name].dtype
        if not host.dtype.isnative:
            msg = f"input {name!r} has dtype {host.dtype.str} in foreign byte order; convert it with x.astype({want!r})"
            raise InputError(msg)
        if want == "string":
            host = _text(name, host, log)
        if host.flags.c_contiguous:
            return host
        if strict:
            msg = (
                f"input {name!r} is not C-contiguous (strides {host.strides}) and the policy is strict; "
                "pass np.ascontiguousarray(x)"
            )
            raise InputError(msg)
        import numpy as np

        try:
            copy = np.ascontiguousarray(host)
        except MemoryError as error:
            raise _no_room(name, host.shape, error) from None
        log.add(f"input {name!r} copied once", "it was not C-contiguous")
        return copy

    def forget(self) -> None:
        """Forget the shapes that passed, so that the next run is checked from the start."""
        self._seen.clear()

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


def type_name(array: np.ndarray[Any, Any], info: TensorInfo) -> str:
    """Return the model's word for the dtype of `array`. Objects are taken for strings where strings are expected."""
    kind = array.dtype.kind
    if kind in "US" or (kind == "O" and info.dtype == "string"):
        return "string"
    return str(array.dtype.name).replace("float8_e", "float8e")  # of ml_dtypes


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

    def notes(self) -> tuple[str, ...]:
        """Return the log so far as sentences: what was done, and why."""
        return tuple(f"{record.what}: {record.reason}" for record in self.records())
