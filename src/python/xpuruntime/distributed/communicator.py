# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Communicator`: the ranks that work together, from the first meeting to the end."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

from xpuruntime._core import DeviceManager, DeviceScope, Event, Stream, Tensor
from xpuruntime.distributed.collectives import Collectives
from xpuruntime.distributed.nccl import FIXES, IN_PROGRESS, SUCCESS, Nccl, open_nccl, run_within, version_text, wait_for
from xpuruntime.distributed.policy import CollectivePolicy, group, in_group, outer_environment, variables_set
from xpuruntime.distributed.rendezvous import (
    Member,
    environment_number,
    local_rank,
    machine_identity,
    meet,
    meeting_place,
)
from xpuruntime.errors import CudaError, EngineError, InputError

#: Seconds that ending a communicator by force may take before it goes on in the background.
_ABORT_SECONDS = 10.0


class Communicator(Collectives):
    """The ranks that work together, one GPU each, over NCCL.

    Made by `init` or `init_from_env`. Calls are launched before they return, wait for peers no longer than the timeout,
    and leave the work itself to the stream; `synchronize` waits for that, with a timeout too. When NCCL fails or a
    timeout passes, the communicator is aborted, which ends its work on the GPU, an `EngineError` says what failed on
    which rank, and every later call says so again; the process goes on.

    Calls may come from any thread, one at a time. A communicator is of the process that made it: not of one forked
    from that.

    Attributes
    ----------
    rank, world_size : int
    device : str
    policy : CollectivePolicy
    timeout : float
        Seconds.
    nccl_version : tuple of int
    library : str
        Path of the libnccl that is used.

    Examples
    --------
    ::

        from xpuruntime import distributed

        with distributed.init_from_env() as comm:
            gradient = comm.all_reduce(gradient, op="avg")
            comm.synchronize()
    """

    def __init__(
        self,
        library: Nccl,
        handle: Any,
        config: Any,
        *,
        rank: int,
        world_size: int,
        device: str,
        policy: CollectivePolicy,
        timeout: float,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.policy, self.timeout = policy, timeout
        self.nccl_version, self.library = library.version, library.path
        self._library = library
        self._handle = handle  # `None` once it was freed
        self._config = config  # it owns the text of `network`, whose address NCCL keeps
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._handle_lock = threading.Lock()
        self._failure = ""
        self._closed = False
        self._captured = False
        self._events: dict[int, Event] = {}
        self._token: tuple[Tensor, Stream] | None = None

    @classmethod
    def init(
        cls,
        rank: int,
        world_size: int,
        *,
        init_method: Any = "env://",
        device: Any = None,
        timeout: float = 60.0,
        config: CollectivePolicy | None = None,
    ) -> Communicator:
        """Meet the other ranks and return the communicator. Every rank calls it, with another `rank`.

        Parameters
        ----------
        rank : int
            From 0 to `world_size` - 1.
        world_size : int
        init_method : str or store
            Where ranks meet: ``"tcp://host:port"`` with an address of the machine of rank 0 and a free port there;
            ``"env://"`` for MASTER_ADDR and MASTER_PORT; or a ``torch.distributed.Store``. The first two need PyTorch,
            whose ``TCPStore`` they use. One rank alone meets nobody.
        device : str or Device, optional
            Default: with ``"env://"`` and LOCAL_RANK set, that GPU; else the current one.
        timeout : float
            Seconds to meet, then to be connected by NCCL, and for each call after that.
        config : CollectivePolicy, optional
            The same on every rank.

        Raises
        ------
        InputError
            An argument is wrong.
        CudaError
            The GPU is missing.
        EngineError
            NCCL is missing or failed, or the ranks did not meet: says which and why.
        UnsupportedOperationError
            The policy asks for what this NCCL, or its environment, does not allow.
        """
        if config is not None and not isinstance(config, CollectivePolicy):
            raise InputError(f"config is {config!r}. Fix: give a CollectivePolicy")
        policy = CollectivePolicy() if config is None else config
        _check_ranks(rank, world_size, timeout)
        name = _device_name(device, init_method)
        library, outer = open_nccl(), outer_environment()
        variables, settings = policy.variables(library, outer), policy.config(library, outer)
        if world_size == 1:
            unique_id = library.make_id()
        else:
            pci_id = DeviceManager.instance().get_device_info(name).pci_id
            member = Member(
                rank=rank,
                world_size=world_size,
                gpu=f"{machine_identity()}/{pci_id}",
                library=version_text(library.version),
                policy=repr(policy),
            )
            unique_id = meet(meeting_place(init_method), member, library.make_id, timeout)
        deadline = time.monotonic() + timeout  # its own time, however late the last rank came
        # NCCL reads these from the environment until the ranks are connected.
        with variables_set(variables, timeout):
            handle = _connect(library, settings, unique_id, rank, world_size, name, deadline - time.monotonic())
            communicator = cls(
                library, handle, settings,
                rank=rank, world_size=world_size, device=name, policy=policy, timeout=timeout,
            )  # fmt: skip
            communicator._settle(SUCCESS, "init", deadline - time.monotonic())
        return communicator

    def group(self) -> AbstractContextManager[None]:
        """Collect the calls of a ``with`` block, and hand them to NCCL as one when it ends.

        Sends and receives that depend on each other need it. Calls are checked where they are written; an exception in
        the block drops them all. Results are valid after the block. Calls of other communicators join.
        """
        return group()

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank has come here, and this communicator's work so far is done.

        Parameters
        ----------
        timeout : float, optional
            Seconds; default: that of the communicator.
        """
        if in_group():
            raise InputError(
                "barrier() waits, and a group is only handed over when it ends. Fix: call it after the group"
            )
        if self._token is None:
            self._token = Tensor.empty((1,), "uint8", self.device), Stream(self.device)
        token, stream = self._token
        self.all_reduce(token, "max", out=token, stream=stream)
        self._wait_for_work("barrier", timeout, None)

    def synchronize(self, timeout: float | None = None, stream: Any = None) -> None:
        """Wait until the work that this communicator was given so far is done on the GPU.

        Parameters
        ----------
        timeout : float, optional
            Seconds; default: that of the communicator. When it passes, the communicator is aborted.
        stream : stream, optional
            Wait for all work of this stream too: for one that replays a graph in which collectives were captured.

        Raises
        ------
        EngineError
            A peer failed, or the work did not end in time.
        CudaError
            What ran there failed. The communicator is aborted.
        """
        self._wait_for_work("synchronize", timeout, stream)

    def check(self) -> None:
        """Raise `EngineError` when NCCL has noticed a failure, of this rank or of a peer, since the last call."""
        self._require_usable("check")
        state = self._state()
        if state not in (SUCCESS, IN_PROGRESS):
            self._fail("check", self._library.explain(state), state)

    @property
    def closed(self) -> bool:
        """Whether it was closed or aborted."""
        return self._closed or bool(self._failure)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the work that was given, and free what NCCL holds. Every rank calls it; twice does no harm.

        Drop CUDA graphs in which collectives were captured before: NCCL waits for them.

        Parameters
        ----------
        timeout : float, optional
            Seconds; default: that of the communicator.

        Raises
        ------
        EngineError
            The work did not end in time; the communicator is aborted then.
        """
        if self._closed or self._failure or self._pid != os.getpid():
            self._closed = True
            return
        if in_group():
            raise InputError(
                "close() inside of a group, whose calls are not handed over yet. Fix: call it after the group"
            )
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            handle = self._handle
            done, status = run_within(
                lambda: self._library.status("comm_finalize", handle), seconds, "xpuruntime-nccl-close"
            )
            if done and status == SUCCESS:
                done = wait_for(lambda: self._state() != IN_PROGRESS, deadline - time.monotonic())
                status = self._state()
            if not done or status != SUCCESS:
                graphs = (
                    " A CUDA graph in which its calls were captured may be alive: drop those first." * self._captured
                )
                reason = (
                    f"its work did not end within {seconds:g} s.{graphs}" if not done else self._library.explain(status)
                )
                self._fail("close", reason, status if done else None)
            self._closed = True
            with self._handle_lock:
                self._handle = None
            self._release()
            run_within(lambda: self._library.status("comm_destroy", handle), _ABORT_SECONDS, "xpuruntime-nccl-close")

    def abort(self) -> None:
        """End at once, with all its work on the GPU, and free what NCCL holds. Never waits for a peer, never raises."""
        if self._pid == os.getpid() and not self._closed:
            self._abort("it was aborted by abort()")
        self._closed = True

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()  # the others may wait for calls that never come

    def __del__(self) -> None:
        with suppress(Exception):
            if self._handle is None or sys.is_finalizing() or self._pid != os.getpid():
                return
            warnings.warn(
                f"{self!r} was dropped without close(), and is aborted", ResourceWarning, stacklevel=1, source=self
            )
            self._abort("it was dropped", wait=0.0)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._failure else version_text(self.nccl_version)
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, device={self.device!r}, {state})"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator cannot be pickled: it is of one process. Make one in each process")

    def _require_usable(self, op: str) -> None:
        if self._pid != os.getpid():
            raise EngineError(
                f"{op} on rank {self.rank}: this communicator was made by process {self._pid}, and process "
                f"{os.getpid()} was forked from that, where NCCL and CUDA do not work. Fix: start processes with "
                "'spawn', and make a communicator in each",
                device=self.device, engine="nccl",
            )  # fmt: skip
        if self._failure or self._closed:
            state = f"failed before: {self._failure}" if self._failure else "is closed"
            raise EngineError(
                f"{op} on rank {self.rank} of {self.world_size}: this communicator {state}. Fix: make a new one",
                device=self.device, engine="nccl",
            )  # fmt: skip

    def _state(self) -> int:
        with self._handle_lock:
            if self._handle is None:
                raise EngineError(
                    f"rank {self.rank} of {self.world_size}: {self._failure or 'the communicator was closed'} while a "
                    "call waited. Fix: make a new one",
                    device=self.device, engine="nccl",
                )  # fmt: skip
            return self._library.state(self._handle)

    def _settle(self, status: int, op: str, seconds: float | None = None) -> None:
        if status == SUCCESS and not self.policy.blocking:
            wait = self.timeout if seconds is None else seconds
            if not wait_for(lambda: self._state() != IN_PROGRESS, wait):
                action = "connect the ranks" if op == "init" else "launch it"
                self._fail(
                    op,
                    f"NCCL could not {action} within {self.timeout:g} s: a peer has not made the same call, or has "
                    "ended",
                    IN_PROGRESS,
                )
            status = self._state()
        if status != SUCCESS:
            self._fail(op, self._library.explain(status), status)

    def _fail(self, op: str, reason: str, status: int | None) -> None:
        fix = FIXES.get(
            status or 0, "see whether every rank is alive and makes the same calls; make a new communicator"
        )
        text = f"{op} on rank {self.rank} of {self.world_size} on {self.device}: {reason.rstrip('.')}"
        ended = self._abort(text)
        rest = "" if ended else f" NCCL has not ended it within {_ABORT_SECONDS:g} s and goes on in the background."
        words = f"{text}. The communicator was aborted.{rest} Fix: {fix}"
        raise EngineError(words, device=self.device, engine="nccl", status=status)

    def _abort(self, failure: str, wait: float | None = None) -> bool:
        with self._handle_lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return True
        self._failure = failure
        library = self._library
        seconds = _ABORT_SECONDS if wait is None else wait
        done, _ = run_within(lambda: library.status("comm_abort", handle), seconds, "xpuruntime-nccl-abort")
        if done:
            self._release()  # until then its work may use them
        return done

    def _release(self) -> None:
        self._events.clear()
        self._token = None

    def _note_work(self, stream: Stream) -> None:
        if stream.capturing:
            self._captured = True
            return
        event = self._events.get(stream.handle)
        if event is None:
            event = self._events[stream.handle] = Event(self.device)
        event.record(stream)

    def _wait_for_work(self, op: str, timeout: float | None, stream: Any) -> None:
        self._require_usable(op)
        if in_group():
            raise InputError(
                f"{op}() inside of a group, whose calls are not handed over yet. Fix: call it after the group"
            )
        events = list(self._events.values())
        if stream is not None:
            events.append((stream if isinstance(stream, Stream) else Stream.wrap(self.device, stream)).record())

        def ended() -> bool:
            try:
                if all(event.query() for event in events):
                    return True
            except CudaError as error:  # of whatever ran there; no later call can do any better
                self._abort(f"{op} on rank {self.rank} of {self.world_size} on {self.device}: {error}")
                raise
            state = self._state()
            if state not in (SUCCESS, IN_PROGRESS):
                self._fail(op, self._library.explain(state), state)
            return False

        seconds = self.timeout if timeout is None else timeout
        if not wait_for(ended, seconds):
            self._fail(
                op, f"its work did not end within {seconds:g} s: a peer has not made the same calls, or ended", None
            )


def init_from_env(*, device: Any = None, timeout: float = 60.0, config: CollectivePolicy | None = None) -> Communicator:
    """Return the communicator of the processes that torchrun started, or whoever sets its variables.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Under torchrun, ranks meet in its store.

    Parameters
    ----------
    device : str or Device, optional
        Default: the GPU LOCAL_RANK, or the current one where that is not set.
    timeout : float
        Seconds to meet, then to be connected by NCCL, and for each call after that.
    config : CollectivePolicy, optional

    Raises
    ------
    InputError
        A variable is missing or no number; otherwise as `Communicator.init`.
    """
    rank, world_size = environment_number("RANK"), environment_number("WORLD_SIZE")
    return Communicator.init(rank, world_size, device=device, timeout=timeout, config=config)


def _connect(
    library: Nccl, config: Any, unique_id: bytes, rank: int, world_size: int, device: str, seconds: float
) -> Any:
    """Have NCCL connect the ranks, and return its handle, which may be in progress. Raises `EngineError`."""
    where = f"rank {rank} of {world_size} on {device}"

    def connect() -> Any:
        with DeviceScope(device):
            return library.connect(unique_id, rank, world_size, config)

    # It answers within microseconds, unless it is asked to block.
    done, handle = run_within(connect, seconds, "xpuruntime-nccl-init")
    if not done:
        raise EngineError(
            f"{where}: NCCL did not connect the ranks within {seconds:g} s, and goes on trying in the background, as "
            "it is set to block. Fix: see whether every rank is alive, and end the process",
            device=device,
            engine="nccl",
        )
    if isinstance(handle, int):
        raise EngineError(
            f"{where}: NCCL cannot begin: {library.explain(handle)}. Fix: {FIXES.get(handle, FIXES[3])}",
            device=device,
            engine="nccl",
            status=handle,
        )
    return handle


def _check_ranks(rank: Any, world_size: Any, timeout: Any) -> None:
    for name, value, least in (("rank", rank, 0), ("world_size", world_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} is {value!r}. Fix: give a whole number from {least}")
    if rank >= world_size:
        raise InputError(f"rank is {rank}, and world_size {world_size}. Fix: give a rank from 0 to {world_size - 1}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise InputError(f"timeout is {timeout!r}. Fix: give seconds, more than 0")


def _device_name(device: Any, init_method: Any) -> str:
    manager = DeviceManager.instance()
    if device is None:
        index = local_rank() if isinstance(init_method, str) and init_method == "env://" else None
        device = f"cuda:{index}" if index is not None else manager.get_current_device()
        if device == "cpu":
            device = "cuda:0"  # which says why there is none
    name = manager.get_device_info(device).device
    if not name.startswith("cuda:"):
        raise InputError(f"device is {name}, and NCCL works on GPUs only. Fix: pass device='cuda:0', or another GPU")
    return name
