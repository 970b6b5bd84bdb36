# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CollectivePolicy`: how a communicator moves data, the environment that holds for it, and what NCCL says it ran."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.argument_types import PATH, check_types
from xpuruntime.distributed.nccl import SUCCESS, Nccl, version_text
from xpuruntime.errors import EngineError, InputError, UnsupportedOperationError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import read_regular
from xpuruntime.policies.document import Refused
from xpuruntime.policies.kinds import Choice, Flag, Integer, Text
from xpuruntime.policies.value import PolicyValue, field

if TYPE_CHECKING:
    from xpuruntime._core import ArrayView, Stream
    from xpuruntime.distributed.communicator import Communicator

Algorithm = Literal["ring", "tree", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
Protocol = Literal["ll", "ll128", "simple"]

#: What NCCL_ALGO is set to: the algorithm for the collectives that have it; all others keep NCCL's own choice.
_ALGORITHMS = {
    "ring": "allreduce:ring;allgather:ring;reducescatter:ring",
    "tree": "allreduce:tree",
    "collnet_direct": "allreduce:collnetdirect;allgather:collnetdirect;reducescatter:collnetdirect",
    "collnet_chain": "allreduce:collnetchain",
    "nvls": "allreduce:nvls;allgather:nvls;reducescatter:nvls",
    "nvls_tree": "allreduce:nvlstree",
    "pat": "allgather:pat;reducescatter:pat",
}
_PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}
_SIMPLE_ONLY = frozenset(_ALGORITHMS) - {"ring", "tree"}
#: The first version with each algorithm, and with words for single collectives in NCCL_ALGO.
_WORDS_PER_COLLECTIVE = (2, 24, 0)
#: Field to the field of ncclConfig_t, the variable that NCCL lets override it, and the first version that reads it.
_CONFIG = {
    "min_channels": ("min_ctas", "NCCL_MIN_CTAS", (2, 17, 0)),
    "max_channels": ("max_ctas", "NCCL_MAX_CTAS", (2, 17, 0)),
    "cluster_size": ("cga_cluster_size", "NCCL_CGA_CLUSTER_SIZE", (2, 17, 0)),
    "nvls_channels": ("nvls_ctas", "NCCL_NVLS_NCHANNELS", (2, 27, 0)),
    "network": ("net_name", "NCCL_NET", (2, 17, 0)),
}


class CollectivePolicy(PolicyValue, frozen=True, kw_only=True):
    """How a communicator moves data. NCCL chooses the rest. All ranks must state the same.

    Attributes
    ----------
    algorithm : {"ring", "tree", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"} or None
        For the collectives that have it: tree, collnet_chain and nvls_tree are of all_reduce, pat of all_gather and
        reduce_scatter, the others of these three. broadcast and reduce are always a ring. Needs NCCL 2.24.
    protocol : {"ll", "ll128", "simple"} or None
        For all collectives. Every algorithm but ring and tree has ``"simple"`` only.
    min_channels, max_channels : int or None
        Bounds of the thread blocks that a collective occupies, 1 to 64.
    nvls_channels : int or None
        Thread blocks with NVLink multicast, 1 to 64. Needs NCCL 2.27.
    cluster_size : int or None
        Thread blocks in a cluster, 0 to 8; Hopper and newer.
    network : str or None
        Between machines: ``"Socket"``, ``"IB"``, or the name of a plug-in.
    blocking : bool
        ``False``: NCCL launches from a thread of its own and the caller waits for that with a timeout, so no peer can
        hold it. ``True``: NCCL launches from the calling thread, which is quicker, but a peer that stops answering
        while connections are made (at the first call of a kind) holds that call for as long as it pleases.

    Raises
    ------
    PolicyError
        For unknown keys and values, and values that exclude each other.

    Examples
    --------
    >>> CollectivePolicy(algorithm="ring", max_channels=8)
    CollectivePolicy(algorithm='ring', max_channels=8)
    """

    algorithm: Algorithm | None = field(
        Choice(tuple(_ALGORITHMS), "How the ranks are linked.", what="algorithms"), default=None
    )
    protocol: Protocol | None = field(
        Choice(tuple(_PROTOCOLS), "How data are signaled.", what="protocols"), default=None
    )
    min_channels: int | None = field(Integer(1, 64, "Least number of thread blocks."), default=None)
    max_channels: int | None = field(Integer(1, 64, "Largest number of thread blocks."), default=None)
    nvls_channels: int | None = field(Integer(1, 64, "Thread blocks with NVLink multicast."), default=None)
    cluster_size: int | None = field(Integer(0, 8, "Thread blocks in a cluster."), default=None)
    network: str | None = field(Text("Network between machines.", what="the name of a network"), default=None)
    blocking: bool = field(Flag("Whether calls run in the calling thread."), default=False)

    def _check_together(self) -> None:
        if self.min_channels is not None and self.max_channels is not None and self.min_channels > self.max_channels:
            raise Refused(f"min_channels {self.min_channels} is more than max_channels {self.max_channels}")
        if self.algorithm in _SIMPLE_ONLY and self.protocol not in (None, "simple"):
            raise Refused(
                f"algorithm '{self.algorithm}' has no protocol '{self.protocol}'. Fix: leave it out, or say 'simple'"
            )

    def config(self, library: Nccl, environ: Mapping[str, str] | None = None) -> Any:
        """Return the configuration of nccl4py for one communicator; keep it as long as that lives.

        Raises
        ------
        UnsupportedOperationError
            If this NCCL is too old for a field, or an environment variable would override one.
        """
        env = os.environ if environ is None else environ
        config = library.bindings.Config()
        config.blocking = int(self.blocking)
        _refuse_override(env, "NCCL_COMM_BLOCKING", "blocking", str(int(self.blocking)))
        for key, (name, variable, since) in _CONFIG.items():
            value = getattr(self, key)
            if value is None:
                continue
            if not library.has(*since):
                raise _too_old(f"{key}={value!r}", library, since)
            _refuse_override(env, variable, key, str(value))
            setattr(config, name, value)
        return config

    def variables(self, library: Nccl, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment variables that have to be set while a communicator is made.

        NCCL reads them for each communicator, and has no other way for these fields.

        Raises
        ------
        UnsupportedOperationError
            If this NCCL is too old for a field, or the environment has another value or switches the feature off.
        """
        env = os.environ if environ is None else environ
        wanted: dict[str, str] = {}
        if self.algorithm is not None:
            if not library.has(*_WORDS_PER_COLLECTIVE):
                raise _too_old(f"algorithm={self.algorithm!r}", library, _WORDS_PER_COLLECTIVE)
            if self.algorithm.startswith("nvls") and env.get("NCCL_NVLS_ENABLE") == "0":
                raise UnsupportedOperationError(
                    f"CollectivePolicy.algorithm: {self.algorithm!r} needs NVLink multicast, and NCCL_NVLS_ENABLE=0 "
                    "switches it off on this machine. Fix: state another algorithm, or none"
                )
            wanted["NCCL_ALGO"] = _ALGORITHMS[self.algorithm]
        if self.protocol is not None:
            wanted["NCCL_PROTO"] = _PROTOCOLS[self.protocol]
        for variable, value in wanted.items():
            _refuse_override(env, variable, "algorithm" if variable == "NCCL_ALGO" else "protocol", value)
        return wanted


def _refuse_override(env: Mapping[str, str], variable: str, field: str, value: str) -> None:
    stated = env.get(variable)
    if stated is not None and stated.casefold() != value.casefold():
        raise UnsupportedOperationError(
            f"CollectivePolicy.{field} would be {variable}={value}, and the environment says {variable}={stated}. Fix: "
            f"unset {variable}, or leave {field} out of the policy"
        )


def _too_old(what: str, library: Nccl, since: tuple[int, ...]) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"CollectivePolicy.{what} needs NCCL {version_text(since)}, and {library.path} is "
        f"{version_text(library.version)}. Fix: leave it out, or install a newer NCCL"
    )


_environment = threading.Condition()
_held: dict[str, str] = {}
_before: dict[str, str | None] = {}
_holders = 0


def outer_environment() -> dict[str, str]:
    """Return the environment of the process as it is outside of all `variables_set` blocks."""
    with _environment:
        outer = {**os.environ, **_before}
    return {name: value for name, value in outer.items() if value is not None}


@contextlib.contextmanager
def variables_set(variables: Mapping[str, str], timeout: float) -> Iterator[None]:
    """Set variables of the process inside a ``with`` block, and put back what was there.

    Blocks of several threads that want the same variables run together, as ranks that are threads must; those that
    want others wait. A block without variables waits too, so that it never sees those of another.
    """
    global _holders
    with _environment:
        if not _environment.wait_for(lambda: not _holders or _held == variables, timeout):
            raise EngineError(
                f"other communicators of this process are still being made after {timeout:g} s, with "
                f"{_words(_held)}, and this one needs {_words(variables)}. Fix: make communicators of "
                "different policies one after the other, in the same order in every process",
                engine="nccl",
            )
        if not _holders:
            _held.update(variables)
            _before.update({name: os.environ.get(name) for name in variables})
            os.environ.update(variables)
        _holders += 1
    try:
        yield
    finally:
        with _environment:
            _holders -= 1
            if not _holders:
                for name, value in _before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                _before.clear()
                _held.clear()
                _environment.notify_all()


def _words(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "no algorithm or protocol"


_LINE = re.compile(
    r"\b(?P<collective>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce): (?P<bytes>\d+) Bytes -> "
    r"Algo (?P<algorithm>\S+) proto (?P<protocol>\S+) (?:channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\}|time)"
)
_COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
#: Bytes that a log may have.
_MAX_BYTES = 1 << 30


class CollectiveChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How NCCL ran one collective, in the words of `CollectivePolicy`.

    Attributes
    ----------
    collective : str
        Such as ``"all_reduce"``.
    bytes : int
        Of the array of one rank.
    algorithm, protocol : str
    channels : int or None
        Thread blocks; ``None`` where NCCL does not say.
    """

    collective: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int | None = None


def read_choices(path: str | os.PathLike[str]) -> list[CollectiveChoice]:
    """Return what NCCL wrote of its choices to a log, in order.

    Rank 0 writes them, from NCCL 2.23 on, when the process was started with ``NCCL_DEBUG=INFO``,
    ``NCCL_DEBUG_SUBSYS=TUNING`` and ``NCCL_DEBUG_FILE=path``.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    InputError
        The file cannot be read.
    """
    check_types({"path": PATH}, {"path": path})
    try:
        text = read_regular(path, _MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {reason_of(error)}. Fix: set NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=TUNING and "
            "NCCL_DEBUG_FILE to this path before the process starts"
        ) from None
    return [
        CollectiveChoice(
            collective=_COLLECTIVES[line["collective"]],
            bytes=int(line["bytes"]),
            algorithm=line["algorithm"].lower(),
            protocol=line["protocol"].lower(),
            channels=None if line["low"] is None else int(line["high"]) - int(line["low"]) + 1,
        )
        for line in _LINE.finditer(text)
    ]


class Call:
    """One checked call: what NCCL gets, and the arrays whose order has to be kept.

    `op` is the name of the call here and of its function in nccl4py, whose communicator and stream come after
    `arguments`. `ordered` says whether the arrays have to be ordered before and after the call; it is false where their
    library works on `stream`.
    """

    __slots__ = ("arguments", "communicator", "op", "ordered", "reads", "stream", "writes")

    def __init__(
        self,
        communicator: Communicator,
        op: str,
        arguments: tuple[Any, ...],
        stream: Stream,
        reads: tuple[ArrayView, ...],
        writes: tuple[ArrayView, ...],
        ordered: bool,
    ) -> None:
        self.communicator, self.op, self.arguments = communicator, op, arguments
        self.stream, self.reads, self.writes, self.ordered = stream, reads, writes, ordered

    def order_before(self) -> None:
        """Let the stream wait for the arrays."""
        if self.ordered:
            for view in (*self.reads, *self.writes):
                view.order_before(self.stream)

    def start(self) -> int:
        """Hand it to NCCL and return NCCL's status."""
        communicator = self.communicator
        return communicator._library.status(self.op, *self.arguments, communicator._handle, self.stream.handle)

    def order_after(self) -> None:
        """Let the libraries of the arrays wait for the stream."""
        if self.ordered:
            for view in self.reads:
                view.order_after(self.stream, written=False)
            for view in self.writes:
                view.order_after(self.stream, written=True)


class _Open(threading.local):
    calls: list[Call] | None = None


_open = _Open()


def launch(call: Call) -> None:
    """Hand a call to NCCL now, or when the group that the thread is in ends."""
    if _open.calls is not None:
        call.order_before()  # where the call stands, another stream may be current than at the end
        _open.calls.append(call)
        return
    communicator = call.communicator
    with communicator._lock:
        communicator._require_usable(call.op)
        call.order_before()
        communicator._settle(call.start(), call.op)
        communicator._note_work(call.stream)
        call.order_after()


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Collect the calls of a ``with`` block, and hand them to NCCL as one when it ends.

    Calls are checked where they are written; an exception in the block drops them all. Results are valid after the
    block. A group inside a group ends with the outer one. What is done with their arrays afterwards, freeing them as
    well, is ordered with the stream that is current in their library where the block ends.
    """
    if _open.calls is not None:
        yield
        return
    calls: list[Call] = []
    _open.calls = calls
    try:
        yield
    finally:
        _open.calls = None
    if calls:
        _launch_all(calls)


def in_group() -> bool:
    """Return whether the thread is in a group."""
    return _open.calls is not None


def _launch_all(calls: list[Call]) -> None:
    communicators = sorted({id(call.communicator): call.communicator for call in calls}.values(), key=id)
    if len({communicator.policy.blocking for communicator in communicators}) > 1:
        raise InputError(
            "a group has calls of communicators with blocking=True and blocking=False, which NCCL cannot join. Fix: "
            "make them with one value, or use a group for each"
        )
    words = " + ".join(dict.fromkeys(call.op for call in calls))
    with contextlib.ExitStack() as locks:
        for communicator in communicators:
            locks.enter_context(communicator._lock)
            communicator._require_usable(words)
        library = communicators[0]._library
        for call in calls:
            call.order_before()
        failed: dict[int, int] = {}
        library.status("group_start")
        try:
            for call in calls:
                status = call.start()
                if status != SUCCESS:
                    failed.setdefault(id(call.communicator), status)
        finally:
            ended = library.status("group_end")
        for communicator in communicators:
            communicator._settle(ended or failed.get(id(communicator), SUCCESS), words)
        for call in calls:
            call.communicator._note_work(call.stream)
            call.order_after()
