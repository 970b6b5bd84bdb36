# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The operations of a communicator: each checks its arrays on this rank, then hands one call to NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.distributed.call import Call, launch
from xpuruntime.distributed.operands import (
    input_view,
    moved_type,
    output_view,
    reduced_type,
    reduction,
    require_apart,
    require_writable,
    resolve_stream,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime._core import ArrayView, Stream
    from xpuruntime.distributed.nccl import NcclLibrary

__all__ = ["Collectives"]


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
    _library: NcclLibrary

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None, stream: Any = None) -> Any:
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
        number, view = reduction(op), input_view(x, "x", self.device)
        dtype = reduced_type(view, op, self._library)
        target, order = self._target(view, out, (view.shape,), stream)
        require_apart(view, target, 0)
        self._launch(
            "all_reduce", self._library.ncclAllReduce, (view.data_ptr, target.data_ptr, view.size, dtype, number),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return target.array

    def reduce(self, x: Any, op: str = "sum", root: int = 0, out: Any = None, stream: Any = None) -> Any:
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
        number, root, view = reduction(op), self._rank(root, "root"), input_view(x, "x", self.device)
        dtype = reduced_type(view, op, self._library)
        if root != self.rank:
            if out is not None:
                raise InputError(
                    f"'out' is written on rank {root} only, and this is rank {self.rank}. Fix: leave it out"
                )
            order = resolve_stream((view,), stream, self.device)
            self._launch(
                "reduce", self._library.ncclReduce, (view.data_ptr, None, view.size, dtype, number, root),
                (view,), (), order, view.size,
            )  # fmt: skip
            return None
        target, order = self._target(view, out, (view.shape,), stream)
        require_apart(view, target, 0)
        self._launch(
            "reduce", self._library.ncclReduce, (view.data_ptr, target.data_ptr, view.size, dtype, number, root),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return target.array

    def broadcast(self, x: Any, root: int = 0, out: Any = None, stream: Any = None) -> Any:
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
        root, view = self._rank(root, "root"), input_view(x, "x", self.device)
        dtype, parts = moved_type(view, self._library)
        target, order = self._target(view, out, (view.shape,), stream)
        require_apart(view, target, 0)
        self._launch(
            "broadcast", self._library.ncclBroadcast, (view.data_ptr, target.data_ptr, view.size * parts, dtype, root),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return target.array

    def all_gather(self, x: Any, out: Any = None, stream: Any = None) -> Any:
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
        view = input_view(x, "x", self.device)
        dtype, parts = moved_type(view, self._library)
        stacked = (self.world_size, *view.shape)
        joined = (self.world_size * view.shape[0], *view.shape[1:]) if view.shape else stacked
        target, order = self._target(view, out, (joined, stacked), stream)
        require_apart(view, target, self.rank * view.size * view.itemsize)
        self._launch(
            "all_gather", self._library.ncclAllGather, (view.data_ptr, target.data_ptr, view.size * parts, dtype),
            (view,), (target,), order, view.size,
        )  # fmt: skip
        return target.array

    def reduce_scatter(self, x: Any, op: str = "sum", out: Any = None, stream: Any = None) -> Any:
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
        number, view = reduction(op), input_view(x, "x", self.device)
        dtype = reduced_type(view, op, self._library)
        if not view.shape or view.shape[0] % self.world_size:
            raise InputError(
                f"'x' {list(view.shape)} cannot be split over {self.world_size} ranks along its first dimension. Fix: "
                f"pass a first dimension that is a multiple of {self.world_size}"
            )
        shape = (view.shape[0] // self.world_size, *view.shape[1:])
        target, order = self._target(view, out, (shape,), stream)
        require_apart(view, target, -self.rank * target.size * target.itemsize)
        self._launch(
            "reduce_scatter", self._library.ncclReduceScatter,
            (view.data_ptr, target.data_ptr, target.size, dtype, number), (view,), (target,), order, target.size,
        )  # fmt: skip
        return target.array

    def send(self, x: Any, peer: int, stream: Any = None) -> None:
        """Send an array to rank `peer`, which has to `recv` one of the same shape and dtype from this rank.

        Several sends and receives that depend on each other belong in one `group`.

        Parameters
        ----------
        x : array [..]
        peer : int
        stream : stream, optional
        """
        peer, view = self._rank(peer, "peer"), input_view(x, "x", self.device)
        dtype, parts = moved_type(view, self._library)
        order = resolve_stream((view,), stream, self.device)
        self._launch(
            "send", self._library.ncclSend, (view.data_ptr, view.size * parts, dtype, peer), (view,), (), order,
            view.size,
        )  # fmt: skip

    def recv(self, out: Any, peer: int, stream: Any = None) -> Any:
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
        view = require_writable(input_view(out, "out", self.device), "out")
        dtype, parts = moved_type(view, self._library)
        order = resolve_stream((view,), stream, self.device)
        self._launch(
            "recv", self._library.ncclRecv, (view.data_ptr, view.size * parts, dtype, peer), (), (view,), order,
            view.size,
        )  # fmt: skip
        return out

    def _rank(self, value: int, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.world_size:
            raise InputError(f"{name} is {value!r}; expected a rank from 0 to {self.world_size - 1}")
        return value

    def _target(
        self, like: ArrayView, out: Any, shapes: tuple[tuple[int, ...], ...], stream: Any
    ) -> tuple[ArrayView, tuple[Stream, bool]]:
        """Return the array to write, and the order of the call."""
        if out is not None:
            target = output_view(out, "out", like, shapes)
            return target, resolve_stream((like, target), stream, self.device)
        order = resolve_stream((like,), stream, self.device)
        made = like.make_like(shapes[0], "out", order[0] if order[1] else None)
        return input_view(made, "out", self.device), order

    def _launch(
        self,
        op: str,
        function: Any,
        arguments: tuple[Any, ...],
        reads: tuple[ArrayView, ...],
        writes: tuple[ArrayView, ...],
        order: tuple[Stream, bool],
        size: int,
    ) -> None:
        if size == 0:
            return  # on every rank
        stream, ordered = order
        launch(Call(self, op, function, arguments, stream, reads, writes, ordered))  # type: ignore[arg-type]
