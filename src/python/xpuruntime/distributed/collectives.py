# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The operations of a communicator: each checks its arrays on this rank, then hands one call to NCCL."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from xpuruntime._core import ArrayView, Stream
from xpuruntime.distributed.nccl import DTYPES, OPS, Nccl, version_text
from xpuruntime.distributed.policy import Call, launch
from xpuruntime.errors import InputError, UnsupportedOperationError

ArrayT = TypeVar("ArrayT")


class Collectives:
    """What `Communicator` does with arrays.

    Arrays are contiguous DLPack arrays of the communicator's GPU, of PyTorch, CuPy or others, or `xpuruntime.Tensor`.
    Every rank must make the same calls in the same order, with the same shapes and dtypes: NCCL does not compare them.
    Without ``out=`` a new array of the library of `x` is returned. Work is enqueued and the call returns: results are
    complete in the order of the stream, which is by default the current one of the library of `x`. With ``stream=``, a
    `Stream`, a stream of another library or a ``cudaStream_t``, both are ordered before and after the call.

    All raise `InputError` for arguments that are wrong, `UnsupportedOperationError` for dtypes that cannot be reduced,
    and `EngineError` when NCCL fails, a peer has failed, or the call was not launched within the timeout.
    """

    rank: int
    world_size: int
    device: str
    _library: Nccl

    def all_reduce(self, x: ArrayT, op: str = "sum", out: Any = None, stream: Any = None) -> ArrayT:
        """Return the reduction over all ranks, on every rank.

        Parameters
        ----------
        x : array [..]
        op : {"sum", "prod", "max", "min", "avg"}
        out : array [..], optional
            Of the shape and dtype of `x`; `x` itself for in place.
        stream : stream, optional

        Returns
        -------
        array [..]
        """
        number, view = _reduction(op), _input_view(x, "x", self.device)
        dtype = _reduced_type(view, op, self._library)
        target, order = self._target(view, out, (view.shape,), stream)
        _require_apart(view, target, 0)
        self._launch(
            "all_reduce", (view.data_ptr, target.data_ptr, view.size, dtype, number),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return cast("ArrayT", target.array)

    def reduce(self, x: ArrayT, op: str = "sum", root: int = 0, out: Any = None, stream: Any = None) -> ArrayT | None:
        """Return the reduction over all ranks on rank `root`, ``None`` on the others.

        Parameters
        ----------
        x : array [..]
        op : {"sum", "prod", "max", "min", "avg"}
        root : int
        out : array [..], optional
            On rank `root` only; `x` itself for in place.
        stream : stream, optional

        Returns
        -------
        array [..] or None
        """
        number, root, view = _reduction(op), self._rank(root, "root"), _input_view(x, "x", self.device)
        dtype = _reduced_type(view, op, self._library)
        if root != self.rank:
            if out is not None:
                raise InputError(
                    f"'out' is written on rank {root} only, and this is rank {self.rank}. Fix: leave it out"
                )
            order = _resolve_stream((view,), stream, self.device)
            self._launch(
                "reduce", (view.data_ptr, 0, view.size, dtype, number, root),
                (view,), (), order, view.size,
            )  # fmt: skip
            return None
        target, order = self._target(view, out, (view.shape,), stream)
        _require_apart(view, target, 0)
        self._launch(
            "reduce", (view.data_ptr, target.data_ptr, view.size, dtype, number, root),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return cast("ArrayT", target.array)

    def broadcast(self, x: ArrayT, root: int = 0, out: Any = None, stream: Any = None) -> ArrayT:
        """Return the array of rank `root`, on every rank.

        Parameters
        ----------
        x : array [..]
            Read on rank `root`; on the others it says shape and dtype.
        root : int
        out : array [..], optional
            Of the shape and dtype of `x`; `x` itself for in place.
        stream : stream, optional

        Returns
        -------
        array [..]
        """
        root, view = self._rank(root, "root"), _input_view(x, "x", self.device)
        dtype, parts = _moved_type(view, self._library)
        target, order = self._target(view, out, (view.shape,), stream)
        _require_apart(view, target, 0)
        self._launch(
            "broadcast", (view.data_ptr, target.data_ptr, view.size * parts, dtype, root),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return cast("ArrayT", target.array)

    def all_gather(self, x: ArrayT, out: Any = None, stream: Any = None) -> ArrayT:
        """Return the arrays of all ranks joined along the first dimension, on every rank.

        Parameters
        ----------
        x : array [n, ..] or []
        out : array [world_size * n, ..] or [world_size, n, ..], optional
            In place where `x` is the part of it that belongs to this rank.
        stream : stream, optional

        Returns
        -------
        array [world_size * n, ..]
        """
        view = _input_view(x, "x", self.device)
        dtype, parts = _moved_type(view, self._library)
        stacked = (self.world_size, *view.shape)
        joined = (self.world_size * view.shape[0], *view.shape[1:]) if view.shape else stacked
        target, order = self._target(view, out, (joined, stacked), stream)
        _require_apart(view, target, self.rank * view.size * view.itemsize)
        self._launch(
            "all_gather", (view.data_ptr, target.data_ptr, view.size * parts, dtype),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return cast("ArrayT", target.array)

    def reduce_scatter(self, x: ArrayT, op: str = "sum", out: Any = None, stream: Any = None) -> ArrayT:
        """Return this rank's part, along the first dimension, of the reduction over all ranks.

        Parameters
        ----------
        x : array [world_size * n, ..]
        op : {"sum", "prod", "max", "min", "avg"}
        out : array [n, ..], optional
            In place where it is the part of `x` that belongs to this rank.
        stream : stream, optional

        Returns
        -------
        array [n, ..]
        """
        number, view = _reduction(op), _input_view(x, "x", self.device)
        dtype = _reduced_type(view, op, self._library)
        if not view.shape or view.shape[0] % self.world_size:
            raise InputError(
                f"'x' {list(view.shape)} cannot be split over {self.world_size} ranks along its first dimension. Fix: "
                f"pass a first dimension that is a multiple of {self.world_size}"
            )
        shape = (view.shape[0] // self.world_size, *view.shape[1:])
        target, order = self._target(view, out, (shape,), stream)
        _require_apart(view, target, -self.rank * target.size * target.itemsize)
        self._launch(
            "reduce_scatter", (view.data_ptr, target.data_ptr, target.size, dtype, number), (view,), (target,), order,
            target.size,
        )  # fmt: skip
        return cast("ArrayT", target.array)

    def send(self, x: Any, peer: int, stream: Any = None) -> None:
        """Send an array to rank `peer`, which has to `recv` one of the same shape and dtype from this rank.

        Several sends and receives that depend on each other belong in one `group`.

        Parameters
        ----------
        x : array [..]
        peer : int
        stream : stream, optional
        """
        peer, view = self._rank(peer, "peer"), _input_view(x, "x", self.device)
        dtype, parts = _moved_type(view, self._library)
        order = _resolve_stream((view,), stream, self.device)
        self._launch(
            "send", (view.data_ptr, view.size * parts, dtype, peer), (view,), (), order,
            view.size,
        )  # fmt: skip

    def recv(self, out: ArrayT, peer: int, stream: Any = None) -> ArrayT:
        """Receive into an array what rank `peer` sends to this rank, and return the array.

        Parameters
        ----------
        out : array [..]
        peer : int
        stream : stream, optional

        Returns
        -------
        array [..]
        """
        peer = self._rank(peer, "peer")
        view = _require_writable(_input_view(out, "out", self.device), "out")
        dtype, parts = _moved_type(view, self._library)
        order = _resolve_stream((view,), stream, self.device)
        self._launch(
            "recv", (view.data_ptr, view.size * parts, dtype, peer), (), (view,), order,
            view.size,
        )  # fmt: skip
        return out

    def _rank(self, value: int, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.world_size:
            raise InputError(f"{name} is {value!r}. Fix: give a rank from 0 to {self.world_size - 1}")
        return value

    def _target(
        self, like: ArrayView, out: Any, shapes: tuple[tuple[int, ...], ...], stream: Any
    ) -> tuple[ArrayView, tuple[Stream, bool]]:
        if out is not None:
            target = _output_view(out, "out", like, shapes)
            return target, _resolve_stream((like, target), stream, self.device)
        order = _resolve_stream((like,), stream, self.device)
        target = like.make_like(shapes[0], "out", order[0] if order[1] else None)
        return _input_view(target, "out", self.device), order

    def _launch(
        self,
        op: str,
        arguments: tuple[Any, ...],
        reads: tuple[ArrayView, ...],
        writes: tuple[ArrayView, ...],
        order: tuple[Stream, bool],
        size: int,
    ) -> None:
        if size == 0:
            return  # on every rank
        stream, ordered = order
        launch(Call(self, op, arguments, stream, reads, writes, ordered))  # type: ignore[arg-type]


def _input_view(array: Any, name: str, device: str) -> ArrayView:
    """Return an array of `device` that NCCL can read in one piece. Raises `InputError` naming the fix."""
    view = ArrayView(array, name)
    if view.device != device:
        raise InputError(
            f"'{name}' is on {view.device}, and this communicator is on {device}. Fix: move it there, or make the "
            "communicator with device= of the array"
        )
    if not view.is_contiguous:
        raise InputError(
            f"'{name}' {list(view.shape)} is not contiguous, and NCCL moves memory in one piece. Fix: pass "
            f"{name}.contiguous(), or a copy of it"
        )
    return view


def _output_view(array: Any, name: str, like: ArrayView, shapes: tuple[tuple[int, ...], ...]) -> ArrayView:
    view = _input_view(array, name, like.device)
    if view.dtype != like.dtype:
        raise InputError(f"'{name}' is {view.dtype}, and the result is {like.dtype}. Fix: pass one of that dtype")
    if view.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise InputError(f"'{name}' has shape {list(view.shape)}, and the result has {allowed}. Fix: pass that shape")
    return _require_writable(view, name)


def _require_writable(view: ArrayView, name: str) -> ArrayView:
    if view.readonly:
        raise InputError(f"'{name}' is read-only, and NCCL would write to it. Fix: pass a copy")
    return view


def _require_apart(x: ArrayView, out: ArrayView, offset: int | None) -> None:
    start, end = x.data_ptr, x.data_ptr + x.size * x.itemsize
    out_start, out_end = out.data_ptr, out.data_ptr + out.size * out.itemsize
    if start < out_end and out_start < end and (offset is None or start - out_start != offset):
        raise InputError(
            "'out' shares memory with 'x' at another place than where the result belongs. Fix: pass memory of its own, "
            "or leave out= away"
        )


def _reduction(op: str) -> int:
    number = OPS.get(op) if isinstance(op, str) else None
    if number is None:
        raise InputError(f"op is {op!r}. Fix: give one of {', '.join(OPS)}")
    return number


def _reduced_type(view: ArrayView, op: str, library: Nccl) -> int:
    dtype = view.dtype
    if dtype == "bool":
        if op in ("max", "min"):
            return DTYPES["uint8"][0]
        raise UnsupportedOperationError(
            f"'x' is bool, and a {op} of it is no bool. Fix: op='max' is or, op='min' is and; or convert it"
        )
    known = DTYPES.get(dtype)
    if known is None:
        raise UnsupportedOperationError(
            f"'x' is {dtype}, which NCCL cannot reduce. Fix: convert it to one of {', '.join(DTYPES)}"
        )
    number, since = known
    if not library.has(*since):
        raise UnsupportedOperationError(
            f"'x' is {dtype}, which NCCL has since {version_text(since)}, and {library.path} is "
            f"{version_text(library.version)}. Fix: install a newer NCCL, or convert it"
        )
    return number


def _moved_type(view: ArrayView, library: Nccl) -> tuple[int, int]:
    """Return NCCL's number of a dtype that is only moved, and into how many of these an element goes."""
    # What NCCL has no name for is moved as bytes.
    known = DTYPES.get(view.dtype)
    if known is not None and library.has(*known[1]):
        return known[0], 1
    return DTYPES["uint8"][0], view.itemsize


def _resolve_stream(views: tuple[ArrayView, ...], stream: Any, device: str) -> tuple[Stream, bool]:
    """Return the stream of a call, and whether the arrays have to be ordered around it."""
    # Without a stream given, it is the current stream of the library of the first array that has one, else the device's
    # default stream.
    if stream is not None:
        named = stream if isinstance(stream, Stream) else Stream.wrap(device, stream)
        if named.device != device:
            raise InputError(f"stream is on {named.device}, and the arrays are on {device}. Fix: pass a stream of it")
        return named, True
    for view in views:
        current = view.current_stream
        if current is not None:
            alone = all(view.same_library(other) for other in views)
            return Stream.wrap(device, current), not alone
    return Stream.default(device), True
