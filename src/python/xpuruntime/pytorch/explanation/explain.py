# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`explain`: a recording of the kernels that a block of code runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from xpuruntime import _core
from xpuruntime.ops.decision_log import Decision, decisions
from xpuruntime.policies.execution_policy import WeightsPolicy
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.call_scope import generation_phases, module_paths
from xpuruntime.pytorch.call_scope.generation_calls import WATCHES, GenerationWatch
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.fast_path import fast_path
from xpuruntime.pytorch.dispatch.overrides import registry
from xpuruntime.pytorch.dispatch.overrides.native import never_compile
from xpuruntime.pytorch.explanation.attribution import attribute_events
from xpuruntime.pytorch.explanation.call_recorder import CallRecorder
from xpuruntime.pytorch.explanation.explanation import Explanation, ExplanationData, model_text
from xpuruntime.pytorch.explanation.graph_calls import replays_of, replays_so_far, rows_of_replays
from xpuruntime.pytorch.explanation.summary import build_rows
from xpuruntime.pytorch.explanation.timeline import MODULE, RANGE
from xpuruntime.pytorch.profiling.kineto_recording import Profiler, refuse_a_second
from xpuruntime.pytorch.switches.policy_switches import read_settings
from xpuruntime.pytorch.weights import deviations, traffic_of, weights_of
from xpuruntime.runtime.interruptible_waits import uninterrupted
from xpuruntime.runtime.profiler import RecordedBlock

if TYPE_CHECKING:
    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls


class explain(RecordedBlock["Watch"]):  # noqa: N801 - used like a function
    """Find out which kernels the code in a ``with`` block runs: what was asked for, what ran, how often and how long.

    It covers forward and backward, in all threads, with a policy active or without.

    Parameters
    ----------
    root : torch.nn.Module, optional
        The module at which paths begin, where no policy names one; default: the largest one that has been called.

    Returns
    -------
    Explanation
        From ``with``; it has everything after the block.

    Raises
    ------
    InputError
        When the block is entered while a profiler of PyTorch's runs: there can be only one.

    Notes
    -----
    Times come from PyTorch's profiler: of kernels on CUDA devices, or, where none ran, of the CPU. Run a step before,
    so that what is done once is not in them. Inside the block every operator that a policy can speak of passes through
    Python, as under a policy; after it, everything is as before. Of code that `torch.compile` has compiled, operators
    that it calls are seen one by one, and kernels that it made by their names.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> with xrt_torch.kernel_policy(matmul="cpu.reference"), xrt_torch.explain() as found:
    ...     product = torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    >>> row, = (row for row in found.rows if row.op == "matmul")
    >>> row.resolved, row.source, row.status, row.count
    ('cpu.reference', 'kernels.matmul', 'honoured', 1)
    """

    def __init__(self, root: torch.nn.Module | None = None) -> None:
        if root is not None and not isinstance(root, torch.nn.Module):
            msg = f"root is {type(root).__name__!r}: give the torch.nn.Module at which the paths of modules begin"
            raise TypeError(msg)
        self._root = root

    def __getattr__(self, name: str) -> Any:
        if name in ("require", "rows") or name in ExplanationData.__struct_fields__:
            msg = (
                f"explain() has {name!r} in what its with block gives. Fix: with explain() as found: ...; found.{name}"
            )
            raise AttributeError(msg)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check(self) -> None:
        refuse_a_second("explain()")

    def _enter(self) -> Explanation:
        self._found = Explanation()
        ranges = _Ranges([], {})
        self._recorder = CallRecorder(ranges.of_call)
        self._recorder.note_policy()
        active = active_policy()
        self._policy = None if active is None else active.policy.to_dict()
        self._settings = () if active is None else read_settings(active.policy)
        held = None if active is None else active.generation
        self._model = self._root if self._root is not None or active is None else active.root
        self._locked = ("", "") if held is None else (held.path, held.model)
        self._claimed = WeightsPolicy() if active is None else active.policy.execution.weights
        self._placed = [] if active is None else active.placed
        # Threads that the program starts are watched, too, and not only those of autograd.
        profiler = Profiler(
            record_shapes=True, experimental_config=_private_api.ExperimentalConfig(profile_all_threads=True)
        )
        self._before = decisions()
        self._replays = replays_so_far()
        self._start(Watch(self._recorder, profiler, self._root, ranges))
        return self._found

    def _exit(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        watch = self._running()
        self._recorder.note_policy()
        if (active := active_policy()) is not None and active.policy.to_dict() == self._policy:
            ended = {setting.key: setting for setting in read_settings(active.policy)}
            self._settings = tuple(
                ended[setting.key] if setting.status == "honoured" else setting for setting in self._settings
            )
        try:
            try:
                watch.stop()
            finally:
                self._abandon()
            self._finish(watch, partial=error is not None)
        except Exception:
            if error is None:  # otherwise the error of the block is the one to be heard
                raise

    __enter__ = _core.guarded(_enter, RecordedBlock._abandon, _check)
    __exit__ = _core.guarded(_exit, RecordedBlock._abandon)

    def _finish(self, watch: Watch, *, partial: bool) -> None:
        attribution = attribute_events(watch.profiler.events(), self._recorder.kinds, watch.modules)
        recorder = self._recorder
        rows = build_rows(recorder.kinds, attribution, served_since(self._before), recorder.asking)
        rows = (*rows, *rows_of_replays(self._replays))
        unmatched = recorder.asking.unmatched()
        never_ran = () if partial else recorder.asking.never_ran(rows, self._root)
        generation = watch.generation
        weights = () if self._root is None else weights_of(self._root, rows)
        wrong: tuple[str, ...] = ()
        if self._claimed.storage is not None:
            wrong = deviations(self._claimed, weights, self._placed, ran=not partial)
        traffic = None
        if self._claimed.storage is not None and self._root is not None and not partial:
            replays = replays_of(self._root, self._replays)
            traffic = traffic_of(self._claimed, self._root, rows, attribution.modules, replays)
        notes = [*unmatched, *never_ran, *generation.switches, *wrong, *recorder.asking.adapted()]
        notes += () if partial else recorder.asking.met_no_call(rows)
        if attribution.kind == "cpu" and any(row.device.startswith("cuda") for row in rows):
            notes.append(
                "kernels ran on CUDA and the profiler saw none of them, so the times are those of the CPU: CUPTI may "
                "be in use by another tool, or not permitted"
            )
        self._found.finish(
            ExplanationData(
                rows=rows,
                time_kind=attribution.kind,
                overhead_us=attribution.overhead_ns / 1000,
                policy=self._policy,
                notes=tuple(notes),
                unmatched=unmatched,
                never_ran=never_ran,
                model=model_text(self._model),
                generation=generation.facts(),
                settings=self._settings,
                switches=generation.switches,
                weights=weights,
                weight_deviations=wrong,
                weight_traffic=traffic,
                partial=partial,
                fast_path=fast_path().route,
            ),
            self._locked,
        )


class Watch:
    """What is put into PyTorch for a block, and taken away again; `abandon` does it at any point."""

    def __init__(
        self,
        recorder: CallRecorder,
        profiler: Profiler,
        root: torch.nn.Module | None = None,
        ranges: _Ranges | None = None,
    ) -> None:
        self._recorder, self.profiler, self._root, self._ranges = recorder, profiler, root, ranges
        self.generation = GenerationWatch()
        #: Of which a forward ran, by path.
        self.modules: dict[str, torch.nn.Module] = {} if ranges is None else ranges.modules
        self._undo: list[Callable[[], Any]] = []

    def start(self) -> None:
        """Put it there."""
        uninterrupted(self._install)
        self.profiler.start()
        uninterrupted(self._record)

    def stop(self) -> None:
        """Take it away, and keep what the profiler has recorded."""
        self._take_away()
        self.profiler.stop()

    def abandon(self) -> None:
        """Take away whatever of it is there. Idempotent."""
        try:
            self._take_away()
        finally:
            self.profiler.abandon()

    def _take_away(self) -> None:
        uninterrupted(self._uninstall)
        if self._ranges is not None:
            self._ranges.end()

    def _install(self) -> None:
        undo = self._undo
        ops = registry.require(registry.RUNNING)
        undo.append(lambda: registry.release(ops))
        generation_phases.require()
        undo.append(generation_phases.release)
        WATCHES.append(self.generation)
        undo.append(lambda: WATCHES.remove(self.generation))
        module_paths.require(self._root, first=False)
        undo.append(lambda: module_paths.release(self._root, first=False))
        if self._ranges is not None:
            undo += [handle.remove for handle in _module_ranges(self._ranges)]

    def _record(self) -> None:
        before = CONTEXT.watch(self._recorder)
        self._undo.append(lambda: CONTEXT.watch(before))

    def _uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()


def served_since(before: tuple[Decision, ...]) -> list[Decision]:
    """Return the decisions of the core that have served calls since `before` was taken."""
    now = decisions()
    if len(now) < len(before) or any(a.text != b.text for a, b in zip(before, now, strict=False)):
        return list(now)  # somebody has cleared them meanwhile
    served = [new for old, new in zip(before, now, strict=False) if new.count > old.count]
    return [*served, *now[len(before) :]]


class _Ranges(threading.local):
    """Ranges of the profiler around forwards of modules."""

    # A range that ends under another profiler than it began under writes into memory of the first, which is freed.

    def __init__(self, threads: list[list[tuple[int, Any]]], modules: dict[str, torch.nn.Module]) -> None:
        #: Of this thread, each with how many modules run inside of it.
        self._open: list[tuple[int, Any]] = []
        threads.append(self._open)
        self._threads = threads
        self.modules = modules

    def enter(self, module: torch.nn.Module) -> None:
        path, number = module_paths.running(), _core.running_modules()
        self.modules[path] = module
        self.close(number - 1)
        opened = _private_api.RecordFunctionFast(f"{MODULE}{path}")
        self._open.append((number, opened))  # before it begins, so that it is ended wherever an interruption comes
        opened.__enter__()

    def close(self, most: int) -> None:
        """End ranges of modules that have ended: PyTorch calls no hook after an interruption."""
        while self._open and self._open[-1][0] > most:
            # PyTorch refuses to end one that did not begin, or that has ended: an interruption came in between.
            with contextlib.suppress(RuntimeError):
                self._open[-1][1].__exit__(None, None, None)
            self._open.pop()

    def of_call(self, seen: RecordedCalls) -> Any:
        self.close(_core.running_modules())
        return _private_api.RecordFunctionFast(f"{RANGE}{seen.number}")

    def end(self) -> None:
        """End all of this thread before the profiler stops, and never those that other threads are still inside of."""
        self.close(-1)
        for ranges in self._threads:
            if ranges:
                _core.keep_forever(ranges.copy())
                ranges.clear()


def _module_ranges(ranges: _Ranges) -> list[Any]:
    """Put a range with its path around each module's forward; returns what takes the hooks away."""

    # Arguments are left untouched; see the hooks of module_paths.
    def enter(module: Any, _args: Any) -> None:
        if not module_paths.is_traced():
            ranges.enter(module)

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        if not module_paths.is_traced():
            ranges.close(_core.running_modules())

    return [
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(leave, always_call=True),
    ]


never_compile(_module_ranges)  # as the hooks of module_paths
