# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Timing of PyTorch's own kernel and xpuruntime's on the operands of a real call, for ``best_performance``."""

from __future__ import annotations

import functools
import statistics
import threading
import time
import warnings
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import CONTEXT, forget_tuned_routes
from xpuruntime.pytorch.dispatch.route import Route
from xpuruntime.runtime import trace_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from xpuruntime.ops.ambient import Place
    from xpuruntime.ops.tuning_cache import TuningCache
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["may_measure", "measured", "measuring", "pick", "replayed", "settle"]

#: How much faster than PyTorch's own kernel another has to be, as a fraction, so that noise decides nothing.
_MARGIN = 0.03
#: Microseconds that an xpuruntime call costs the host in a step beside what is measured here, where it is made again
#: and again and caches are warm: of a CUDA device, what steps of `benchmarks/bench_training_step.py` showed, 12 to 27.
_OVERRIDE_COST_US = {"cpu": 10.0, "cuda": 25.0}
#: How many times as long as the host PyTorch's own kernel has to take on the device, so that steps made of such calls
#: surely wait for the device: the operations beside them, casts and additions, need the host more than the device.
_AHEAD = 4.0
#: Another word whenever what is measured is another, so that times of before are not taken for it.
_METHOD = "7"
#: Seconds that the measuring of one candidate may take in a turn, and the fewest and most launches of it.
_BUDGET = 0.02
_FEWEST, _MOST = 3, 50
#: Turns of all candidates, so that a change of the clock, or a program beside this one, meets all of them.
_ROUNDS = 3

_lock = threading.RLock()
_measuring = threading.RLock()


def measuring() -> bool:
    """Say whether kernels are being measured in this thread: what is called then is no call of the program's."""
    return CONTEXT.thread.measuring


def may_measure() -> bool:
    """Say whether a kernel may be measured now: not while a CUDA graph is captured, nor while code is traced."""
    if torch.compiler.is_compiling() or call_state.capturing():
        return False
    return bool(_private_api.dispatch_modes() == 0)


class replayed:  # noqa: N801 - used like a function
    """What is tuned inside this block will be replayed from a CUDA graph, so that the time of the host does not count.

    It holds in all threads, since backward runs in others. For the warm-up before a capture, and the capture itself.
    """

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count(-1)

    def _count(self, step: int) -> None:
        with _lock:
            CONTEXT.replays += step
        forget_tuned_routes()


def settle(
    active: CompiledPolicy,
    key: Any,
    route: Route,
    text: str,
    native: Callable[[], Any],
    xrt_kernel: Callable[[Place], Any],
    device: torch.device,
    *,
    allow_tf32: bool = False,
    deterministic: bool = False,
) -> Route:
    """Return the route for a call whose choice is left to measured times, and keep it under `key`.

    Parameters
    ----------
    active : CompiledPolicy
    key : hashable
        As for `CompiledPolicy.resolve`.
    route : Route
        One that is `open`.
    text : str
        As `key` of `pick`.
    native : callable
        Does the call by PyTorch's own kernel, on the real operands, changing none of them.
    xrt_kernel : callable
        The same by xpuruntime kernels at the place that it is given, of which the core takes the fastest.
    device : torch.device
    allow_tf32, deterministic : bool
        As for `CompiledPolicy.resolve`.

    Returns
    -------
    Route
        The given one, and nothing is kept, where nothing may be measured now.
    """
    place = active.place(
        route.op, "auto", route.source, route.module, allow_tf32=allow_tf32, deterministic=deterministic
    )
    candidates = [(route.kernel, native), ("auto", lambda: xrt_kernel(place))]
    text = f"{text};tf32={allow_tf32};deterministic={deterministic}"
    best = pick(route.op, text, candidates, device)
    if best is None:
        active.keep(key, None)
        return route
    found = Route(
        route.op,
        route.asked,
        route.source,
        best,
        place=place if best == "auto" else None,
        passed_over=route.passed_over,
        module=route.module,
        phase=route.phase,
        tuned=True,
        times=measured(route.op, text, device),
    )
    active.keep(key, found)
    return found


def pick(
    op: str,
    key: str,
    candidates: Sequence[tuple[str, Callable[[], Any]]],
    device: Any,
    *,
    passes: Mapping[str, int] = MappingProxyType({}),
) -> str | None:
    """Return the id of the fastest candidate, measured once for each kind of call and kept on disk.

    Parameters
    ----------
    op : str
        Operation of a `KernelPolicy`.
    key : str
        Everything of the call that its time depends on: operator, shapes, strides, dtypes, switches. Not the device.
    candidates : sequence of (str, callable)
        Each id with what does the call on the real operands, again and again without changing them. PyTorch's own is
        the first, and is kept unless another is faster by more than 3 %. One that raises `UnsupportedOperationError`
        or `InputError` is out.
    device : torch.device
        Where the operands are.
    passes : mapping of str to int
        How often the way through a policy is gone for a candidate other than the first, where that is not once: 2 for a
        kernel of xpuruntime with its gradient, 0 for one of PyTorch's that fast kernels call.

    Returns
    -------
    str or None
        ``None`` where no result is known and nothing may be measured now (see `may_measure`), or another thread does so
        while this one is inside of an attention: use PyTorch's own, and ask again at the next call.

    Notes
    -----
    On CUDA the time of the device is measured by events, with the launches queued behind a kernel that waits, so that
    the host's time is not in it. Inside `replayed` only the device's time counts. Eager calls cost the larger of the
    two where PyTorch's own kernel keeps the device for more than four times as long as the host. Otherwise a step may
    wait for the host, where a kernel that is faster on the device alone gains nothing: they cost the host's time, and
    what a kernel keeps the device for longer than PyTorch's own.
    To the host's time of others than PyTorch's own choice, 25 microseconds are added for each pass, or 10 on the CPU,
    which they cost more in a step than here.
    Results are kept in the file of `xpuruntime.ops.tuning_cache`, for this device and these versions of PyTorch, its
    libraries and this one.
    """
    mark = _mark(op, key, device)
    times = CONTEXT.times.get(mark)
    if times is None:
        times = _stored(mark, [name for name, _ in candidates])
    if times is None:
        if not may_measure():
            return None
        # Who has a turn with PyTorch's switches does not wait for one that may be waiting for that turn.
        here = _core.in_sdpa_turn()
        if here and not _measuring.acquire(blocking=False):
            return None
        try:
            times = _measured_once(f"{op}: {key}", mark, candidates, device, passes)
        finally:
            if here:
                _measuring.release()
    CONTEXT.times[mark] = times
    can = {name for name, _ in candidates}  # another process may have had more
    return _best({name: time for name, time in times.items() if name in can}, candidates[0][0])


def _measured_once(
    what: str,
    mark: tuple[str, str, bool],
    candidates: Sequence[tuple[str, Callable[[], Any]]],
    device: Any,
    passes: Mapping[str, int],
) -> dict[str, float]:
    with _measuring:  # one at a time, so that none meets the load of another
        times = CONTEXT.times.get(mark)
        if times is None:
            with trace_events.mark("tuning", what, candidates=[name for name, _ in candidates]), _as_tuning():
                times = CONTEXT.times[mark] = _measure(candidates, device, mark[2], passes)
            _keep(mark, times)
    return times


@contextmanager
def _as_tuning() -> Iterator[None]:
    """Have what runs inside known as no call of the program's: by `measuring`, and in PyTorch's profiler."""
    CONTEXT.thread.measuring = True
    try:
        with torch.profiler.record_function(trace_events.TUNING):
            yield
    finally:
        CONTEXT.thread.measuring = False


def measured(op: str, key: str, device: Any) -> tuple[tuple[str, float], ...]:
    """Return the ids and the microseconds that `pick` chooses by, as far as they are known; its arguments."""
    return tuple(CONTEXT.times.get(_mark(op, key, device), {}).items())


def _mark(op: str, key: str, device: Any) -> tuple[str, str, bool]:
    return op, f"{key};{_device_name(device)}", device.type != "cuda" or CONTEXT.replays == 0


def _best(times: dict[str, float], native: str) -> str:
    best = min(times, key=lambda name: times[name])
    if native in times and times[best] > times[native] * (1 - _MARGIN):
        return native
    return best


def _measure(
    candidates: Sequence[tuple[str, Callable[[], Any]]], device: Any, eager: bool, passes: Mapping[str, int]
) -> dict[str, float]:
    """Return the microseconds of each candidate that can serve."""
    working: list[tuple[str, Callable[[], Any]]] = []
    for name, run in candidates:
        try:
            for _ in range(2):  # what is made on the first calls is not measured
                run()
        except (UnsupportedOperationError, InputError):
            continue
        working.append((name, run))
    hosts: dict[str, float] = {}
    devices: dict[str, float] = {}
    for _ in range(_ROUNDS):
        for name, run in working:
            host, on_device = _time_cuda(run, device) if device.type == "cuda" else (_time_host(run), 0.0)
            hosts[name] = min(host, hosts.get(name, host))
            devices[name] = min(on_device, devices.get(name, on_device))
    native = candidates[0][0]
    if not eager:
        return devices
    way = _OVERRIDE_COST_US[device.type]
    paid = {name: host + (way * passes.get(name, 1) if name != native else 0.0) for name, host in hosts.items()}
    return _costs(hosts, devices, native, paid)


def _costs(hosts: dict[str, float], devices: dict[str, float], native: str, paid: dict[str, float]) -> dict[str, float]:
    """Return what each candidate costs an eager step, of microseconds of the host and of the device.

    `paid` are those of the host with what the way to a candidate costs a step beside them.
    """
    if native in hosts and devices[native] < _AHEAD * hosts[native]:
        return {name: paid[name] + max(0.0, devices[name] - devices[native]) for name in hosts}
    return {name: max(paid[name], devices[name]) for name in hosts}


def _time_host(run: Callable[[], Any]) -> float:
    clock = time.perf_counter
    least = float("inf")
    end = clock() + _BUDGET
    for count in range(_MOST):
        start = clock()
        run()
        now = clock()
        least = min(least, now - start)
        if now > end and count + 1 >= _FEWEST:
            break
    return least * 1e6


def _time_cuda(run: Callable[[], Any], device: Any) -> tuple[float, float]:
    """Return the microseconds of the host, and those of the device."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        stream.synchronize()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        stream.synchronize()
        whole = time.perf_counter() - start
        count = min(max(int(_BUDGET / 2 / whole), _FEWEST), _MOST)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The stream waits while the launches are queued: about 2 cycles for each nanosecond that the host needs.
        torch.cuda._sleep(int(2e9 * (host * (count + 1) + 1e-4)))
        clock = time.perf_counter
        first.record(stream)
        points = [clock()]
        for _ in range(count):
            run()
            points.append(clock())
        last.record(stream)
        last.synchronize()
        device_time = float(first.elapsed_time(last)) * 1e3 / count
    return statistics.median(after - before for before, after in pairwise(points)) * 1e6, device_time


def _device_name(device: Any) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu x{torch.get_num_threads()}"


def _validators() -> dict[str, str]:
    from xpuruntime import __version__

    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "xpuruntime": __version__,
        "method": _METHOD,
    }


@functools.cache
def _open_store() -> TuningCache | None:
    from xpuruntime.ops.tuning_cache import TuningCache, tuning_path

    try:
        path = tuning_path()
    except InputError as error:
        warnings.warn(f"measured times are not kept: {error}", XpuRuntimeWarning, stacklevel=2)
        return None
    return None if path is None else TuningCache(path)


def _stored(mark: tuple[str, str, bool], names: list[str]) -> dict[str, float] | None:
    store = _open_store()
    if store is None:
        return None
    entry, _ = store.find(_text(mark), _validators())
    if entry is None:
        return None
    times = {time["kernel"]: float(time["microseconds"]) for time in entry["times"]}
    return times if names[0] in times else None


def _keep(mark: tuple[str, str, bool], times: dict[str, float]) -> None:
    store = _open_store()
    if store is None or not times:
        return
    order = sorted(times, key=lambda name: times[name])
    listed = [{"kernel": name, "config": "", "microseconds": max(times[name], 1e-3)} for name in order]
    store.put(_text(mark), {"times": listed, "validators": _validators()})


def _text(mark: tuple[str, str, bool]) -> str:
    op, key, eager = mark
    return f"torch;{op};{key};{'eager' if eager else 'replayed'}"
