# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for streams and graphs."""

from types import TracebackType

from xpuruntime._core import DeviceLike, StreamLike

class Stream:
    """An in-order queue of work on one device.

    On the CPU each piece of work is done when the call that asked for it returns, so a CPU stream is always complete,
    and the same program runs on a machine without a GPU. Streams may be used from any thread. Two are equal when they
    are the same stream of the same device. ``__cuda_stream__`` lets other libraries use it.

    Parameters
    ----------
    device : str or Device
        ``"cuda:0"``, ``"cpu"``, ...
    priority : int
        CUDA's numbers: a smaller number is a higher priority. See `priority_range`.
    non_blocking : bool
        Whether its work is independent of the legacy default stream.

    Raises
    ------
    CudaError
        If the device is not there.
    InputError
        If the priority is out of range.
    """

    def __init__(self, device: DeviceLike = "cuda:0", *, priority: int = 0, non_blocking: bool = True) -> None: ...
    @staticmethod
    def wrap(device: DeviceLike, stream: StreamLike, *, owner: object = None) -> Stream:
        """Return a stream that someone else owns and that is never destroyed here.

        Parameters
        ----------
        device : str or Device
            The device that the stream is on.
        stream : int or stream object
            A ``cudaStream_t``, or a stream of PyTorch, CuPy or any library with ``__cuda_stream__``, which is kept.
        owner : object, optional
            What to keep alive instead of `stream`.
        """

    @staticmethod
    def default(device: DeviceLike = "cuda:0") -> Stream:
        """Return the legacy default stream of a device."""

    @staticmethod
    def priority_range(device: DeviceLike = "cuda:0") -> tuple[int, int]:
        """Return the (lowest, highest) priority of a device; ``(0, 0)`` on the CPU."""

    @property
    def device(self) -> str: ...
    @property
    def handle(self) -> int:
        """The ``cudaStream_t`` as an integer; 0 on the CPU."""

    @property
    def owned(self) -> bool:
        """Whether this library made the stream and will destroy it."""

    @property
    def priority(self) -> int: ...
    @property
    def non_blocking(self) -> bool: ...
    @property
    def capturing(self) -> bool:
        """Whether work given to it is being recorded into a graph."""

    def abort_capture(self) -> None:
        """End a capture that was left open on this stream, and drop what was recorded; nothing without one.

        For a stream whose user failed during a capture, such as an engine. Call it on the thread that began the
        capture.
        """

    def synchronize(self) -> None:
        """Block until all work given so far is done; other Python threads run on."""

    def query(self) -> bool:
        """Return whether all work given so far is done."""

    def wait_event(self, event: Event) -> None:
        """Let later work here start after `event`; the host does not wait.

        Raises
        ------
        UnsupportedOperationError
            If this is a CPU stream and the event is of a CUDA device.
        """

    def wait_stream(self, other: Stream) -> None:
        """Let later work here start after all work given to `other` so far; the host does not wait."""

    def record(self, *, timing: bool = False) -> Event:
        """Return a new event, recorded here. With `timing`, `Event.elapsed_us` takes it."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

class Event:
    """A point in a stream's work; on the CPU, the time at which it was recorded.

    An event that was never recorded counts as complete. Events may be used from any thread.

    Parameters
    ----------
    device : str or Device
    timing : bool
        Whether `elapsed_us` takes it. Timed events cost more to record.
    """

    def __init__(self, device: DeviceLike = "cuda:0", *, timing: bool = False) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def timing(self) -> bool: ...
    @property
    def handle(self) -> int:
        """The ``cudaEvent_t`` as an integer; 0 on the CPU."""

    def record(self, stream: Stream) -> None:
        """Move the event to the end of the work given to `stream` so far."""

    def synchronize(self) -> None:
        """Block until the work before the event is done; other Python threads run on."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def elapsed_us(self, end: Event) -> float:
        """Return the microseconds from this event to `end`.

        Raises
        ------
        InputError
            If one was made without timing, is not recorded, is not complete, or they are on different devices.
        """

class GraphUpdate:
    """What `Graph.update` did."""

    @property
    def in_place(self) -> bool:
        """Whether the graph was changed in place; if not, it was instantiated anew."""

    @property
    def reason(self) -> str | None:
        """Why it could not be changed in place."""

class GraphCapture:
    """What ``with graph.capture(stream)`` holds."""

    def __enter__(self) -> Graph: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Graph:
    """Work recorded from a CUDA stream, to be launched again as a whole.

    A graph holds addresses, not tensors: keep every buffer that captured work touches for as long as it is replayed.
    Capture is thread-local: it ends on the thread that began it, and what other threads do cannot break it. Nothing
    here synchronises. Dropping a graph while a replay runs is safe.

    Examples
    --------
    ::

        graph = xrt.Graph()
        with graph.capture(stream):
            output.copy_(input, stream=stream)
        graph.replay(stream)
    """

    def __init__(self) -> None: ...
    def capture(self, stream: Stream, *, instantiate: bool = True) -> GraphCapture:
        """Record the work that a ``with`` block gives to `stream`, and make it ready to run.

        An exception in the block ends the capture, drops what was recorded, and goes on. The stream can be used again
        in every case.

        Parameters
        ----------
        stream : Stream
            A CUDA stream that is not a default stream.
        instantiate : bool
            ``False`` for a graph that is only passed to `update`.

        Raises
        ------
        UnsupportedOperationError
            If `stream` is on the CPU.
        InputError
            If the stream is a default stream or is being captured, or if this graph holds work already.
        CudaError
            If something that cannot be captured happened in the block.
        """

    def begin_capture(self, stream: Stream) -> None:
        """Start to record; `capture` does this for a ``with`` block."""

    def end_capture(self) -> None:
        """Stop recording. Raises CudaError when something that cannot be captured happened."""

    def abort_capture(self) -> None:
        """Stop recording and drop what was recorded. Does nothing when there is no capture."""

    def instantiate(self) -> None:
        """Make the graph ready to run. Slow the first time, nothing after."""

    def replay(self, stream: Stream) -> None:
        """Launch all of it, in the order of `stream`.

        Raises
        ------
        InputError
            If the graph is not instantiated, or the stream is on another device.
        """

    def update(self, newer: Graph) -> GraphUpdate:
        """Take over the work of a newly captured graph, in place where the two have the same topology."""

    @property
    def capturing(self) -> bool: ...
    @property
    def captured(self) -> bool: ...
    @property
    def instantiated(self) -> bool: ...
    @property
    def node_count(self) -> int: ...
    @property
    def device(self) -> str | None: ...

class StreamManager:
    """The streams that the parts of a program share."""

    @staticmethod
    def instance() -> StreamManager:
        """Return the process's default manager."""

    def create(self, device: DeviceLike = "cuda:0", *, priority: int = 0, non_blocking: bool = True) -> Stream:
        """Return a stream of your own."""

    def default_stream(self, device: DeviceLike = "cuda:0") -> Stream:
        """Return the legacy default stream of a device."""

    def pooled(self, device: DeviceLike = "cuda:0", *, priority: int = 0) -> Stream:
        """Return one of eight shared streams of that device and priority, in turn."""

    def priority_range(self, device: DeviceLike = "cuda:0") -> tuple[int, int]:
        """Return the (lowest, highest) priority of a device."""
