# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CapturedStep`: a step that replays a graph where it can, and runs eagerly where it must."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from xpuruntime.errors import UnsupportedOperationError, warn
from xpuruntime.printable import error_line
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import pytree
from xpuruntime.pytorch.capture.captured_state import StateSnapshot
from xpuruntime.pytorch.capture.graph_key import (
    CaptureReport,
    GraphInfo,
    GraphKey,
    StaticInputs,
    describe,
    difference,
    flatten,
    on_device,
    signature,
    structure_key,
    unflatten,
)
from xpuruntime.pytorch.capture.step_program import forget_accumulators, uncached_autocast
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.rank_agreement import note_step

if TYPE_CHECKING:
    from xpuruntime.pytorch.capture.captured_state import CapturedState
    from xpuruntime.pytorch.capture.graph_recorder import CapturedGraph, GraphRecorder
    from xpuruntime.pytorch.capture.step_program import StepProgram

R = TypeVar("R")

#: A first step may have to run eagerly, because the optimizer makes its state there. More say that it always does.
_MOST_POSTPONED = 3


class _Graph:
    """One captured step: what it reads, what it writes, and what must stay alive for it."""

    __slots__ = ("gradients", "hits", "inputs", "key", "outputs", "places", "policy", "recording")

    def __init__(
        self, key: Any, inputs: StaticInputs, recording: CapturedGraph, places: list[int], work: StepProgram
    ) -> None:
        self.key = key
        self.inputs = inputs
        self.recording = recording
        self.outputs = recording.outputs
        self.places = places
        gradients = [(parameter, parameter.grad) for parameter in work.parameters]
        makes_some = torch.is_grad_enabled() and any(gradient is not None for _, gradient in gradients)
        gradients.sort(key=lambda pair: pair[1] is None)
        self.gradients = gradients if makes_some else []
        self.policy = context.active_policy()  # whose kernels and workspaces the graph refers to
        self.hits = 0

    def lost_gradients(self) -> bool:
        """Say whether `zero_grad` has taken the gradients away that the graph writes: of the first, so of all."""
        return bool(self.gradients) and self.gradients[0][0].grad is not self.gradients[0][1]

    def attach_gradients(self) -> None:
        """Let parameters have the gradients that this graph writes; another graph writes others."""
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


class CapturedStep(Generic[R]):
    """A step that replays a graph where it can, and runs eagerly where it must. Made by `capture_graph`.

    One thread at a time calls it. See `capture_graph` for what a call does.
    """

    def __init__(
        self,
        work: StepProgram,
        used: CapturedState,
        device: torch.device,
        recorder: GraphRecorder | None,
        *,
        warmup: int = 3,
        max_graphs: int = 8,
        strict: bool = False,
        clone_outputs: bool = False,
        why_eager: str = "",
        reasons: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self._work = work
        self._state = used
        self._device = device
        self._recorder = recorder
        self._warmup = warmup
        self._max_graphs = max_graphs
        self._strict = strict
        self._clone = clone_outputs
        self._why_eager = why_eager
        self._first_reasons = list(reasons)
        self._notes = dict.fromkeys(notes)
        self._tensors = used.tensors()
        self._spread = len({tensor.device for tensor in self._tensors}) > 1
        self._surroundings = GraphKey(used, device)
        self._gradients_are_read = work.optimizer is None or not work.steps_inside
        self._lock = threading.Lock()
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._active: _Graph | None = None
        self._eager: dict[Any, str] = {}
        self._postponed: dict[Any, int] = {}
        self._captures = self._replays = self._eager_calls = self._evictions = 0
        self._warned = False
        self._warned_often = False
        for reason in [*self._first_reasons, *([why_eager] if why_eager else [])]:
            self._warn(reason)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Do one step on these inputs. Returns what ``fn`` returned, apart from autograd."""
        if self._lock.locked():
            msg = (
                "a call of this captured step is still running, in another thread or around this one; its graphs share "
                "their inputs, outputs and memory, so make one step for each thread, or call it in turn"
            )
            raise UnsupportedOperationError(msg)
        with self._lock:  # an exception between a call of acquire() and a try block would leave it locked
            result: R = self._call(args, kwargs)
            return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._order()
        leaves, structure = flatten(args, kwargs)
        if self._why_eager:
            return self._run_eagerly(leaves, structure)
        key = (signature(leaves), structure_key(structure), *self._surroundings.now())
        graph: _Graph | None = self._graphs.get(key)
        if graph is None or graph.places != self._places():
            graph = self._graph_for(key, leaves, structure)
            if graph is None:
                return self._run_eagerly(leaves, structure)
        else:
            self._graphs.move_to_end(key)
        return self._replay(graph, leaves)

    def _replay(self, graph: _Graph, leaves: Sequence[Any]) -> Any:
        note_step()
        graph.inputs.fill(leaves)
        graph.recording.graph.replay()
        graph.hits += 1
        self._replays += 1
        if graph is not self._active or self._gradients_are_read or graph.lost_gradients():
            graph.attach_gradients()
        self._active = graph
        self._work.rest()
        for optimizer in self._state.optimizers:
            _private_api.note_step(optimizer)
        if self._clone:
            return pytree.tree_map_only(torch.Tensor, torch.clone, graph.outputs)
        return graph.outputs

    def _order(self) -> None:
        """Put what this call does after the last one, whatever that was, when it was on another stream."""
        if self._recorder is not None:
            self._recorder.order()

    def _run_eagerly(self, leaves: Sequence[Any], structure: Any) -> Any:
        self._eager_calls += 1
        self._active = None
        if not self._spread:
            leaves = on_device(leaves, self._device)
        args, kwargs = unflatten(leaves, structure)
        return self._work.run(args, kwargs)

    def _places(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))  # of hundreds of tensors, at each call

    def _graph_for(self, key: Any, leaves: Sequence[Any], structure: Any) -> _Graph | None:
        stale = self._graphs.get(key)
        if stale is not None:
            self._drop(key)
            self._notes["parameters or buffers were moved to other memory, so graphs were captured anew"] = None
        if key in self._eager:
            return None
        if len(self._graphs) >= self._max_graphs:
            self._evictions += 1
            self._warn_often(key)
            self._drop(next(iter(self._graphs)))
        return self._capture(key, leaves, structure)

    def _capture(self, key: Any, leaves: Sequence[Any], structure: Any) -> _Graph | None:
        assert self._recorder is not None
        inputs = StaticInputs(leaves, structure, self._device)
        work = self._work
        forget_accumulators(work.parameters)

        def run() -> Any:
            inputs.forget_gradients()
            return work.captured_part(*inputs.arguments())

        with uncached_autocast(), tuning.replayed():
            problem = ""
            snapshot = StateSnapshot(self._state, self._device, optimizers=work.steps_inside)
            try:
                with self._recorder.warming():
                    for _ in range(self._warmup):
                        inputs.fill(leaves)
                        run()
            except BaseException:
                self._reset_modules()
                raise
            finally:
                problem = snapshot.restore()
                work.forget_gradients()
            if problem:
                self._postpone(key, problem)
                return None
            inputs.fill(leaves)
            try:
                recording = self._recorder.record(run, self._state.generators)
            except Exception as error:
                self._after_failure(snapshot)
                self._fall_back(key, _why(error), error)
                return None
            except BaseException:
                self._after_failure(snapshot)
                raise
            snapshot.restore_host()
        self._captures += 1
        self._postponed.pop(key, None)
        graph = self._graphs[key] = _Graph(key, inputs, recording, self._places(), work)
        return graph

    def _after_failure(self, snapshot: StateSnapshot) -> None:
        self._work.forget_gradients()
        try:
            self._reset_modules()
        finally:
            snapshot.restore()
        if getattr(self._recorder, "cut_loose", False):
            self._drop_all()  # they would go on with random numbers of their own
            self._recorder.cut_loose = False  # type: ignore[union-attr]

    def _reset_modules(self) -> None:
        """Let modules of ``fully_shard`` begin anew after a step that was broken off, when the device has done it."""
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            _private_api.reset_fully_sharded(self._state.all_modules())

    def _postpone(self, key: Any, problem: str) -> None:
        """Leave a capture for the next call, after a real step has made the state that is missing."""
        tried = self._postponed[key] = self._postponed.get(key, 0) + 1
        if tried < _MOST_POSTPONED:
            self._notes[f"{problem}, so the first step runs eagerly, and the next is captured"] = None
        else:
            self._fall_back(key, f"{problem}, still after {tried} steps", None)

    def _fall_back(self, key: Any, why: str, error: Exception | None) -> None:
        reason = f"the step for {describe(key)} cannot be captured: {why}"
        if self._strict:
            msg = f"capture_graph: {reason}. Change the step, or leave strict=True out to have it run eagerly"
            raise UnsupportedOperationError(msg) from error
        self._eager[key] = reason
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            msg = f"capture_graph: {reason}. It runs eagerly; `step.reasons` has all reasons"
            warn(msg)

    def _warn_often(self, key: Any) -> None:
        if self._evictions >= 2 * self._max_graphs and not self._warned_often:
            self._warned_often = True
            last = next(reversed(self._graphs))
            msg = (
                f"capture_graph: {self._captures} graphs were captured, and {self._evictions} dropped for others, as "
                f"no more than max_graphs={self._max_graphs} are kept; from the last to this call these change: "
                f"{difference(last, key)}. Pad the inputs to a few shapes, or raise max_graphs"
            )
            warn(msg)

    def _drop(self, key: Any) -> None:
        graph = self._graphs.pop(key)
        if graph is self._active:
            self._active = None
        graph.recording.graph.reset()
        graph.inputs.keep_until_read()
        assert self._recorder is not None
        self._recorder.released(1)

    def _drop_all(self) -> None:
        for key in list(self._graphs):
            self._drop(key)

    def prepare(self, *args: Any, **kwargs: Any) -> bool:
        """Capture the step for such inputs, if it is not yet, without doing it. Returns whether it is captured.

        Nothing is trained: parameters, buffers, state of optimizer and scaler and random numbers are as before.
        """
        leaves, structure = flatten(args, kwargs)
        if self._why_eager:
            return False
        with self._lock:
            self._order()
            key = (signature(leaves), structure_key(structure), *self._surroundings.now())
            graph = self._graphs.get(key)
            if graph is None or graph.places != self._places():
                graph = self._graph_for(key, leaves, structure)
            return graph is not None

    def reset(self) -> None:
        """Drop all graphs and give their memory back; needed after parameters or modules were replaced by others."""
        with self._lock:
            self._order()
            self._drop_all()
            self._work.forget_gradients()
            self._eager.clear()
            self._postponed.clear()
            self._tensors = self._state.tensors()
            self._work.parameters[:] = self._state.parameters()
            self._surroundings = GraphKey(self._state, self._device)

    @property
    def static_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The buffers that the graph of the last call reads, as positional and named arguments; ``None``: it had none.

        What is written into them need not be copied: give them back as the inputs of the next call.
        """
        return None if self._active is None else self._active.inputs.arguments()

    @property
    def graphs(self) -> tuple[GraphInfo, ...]:
        """The graphs that are kept, least recently used first."""
        return tuple(
            GraphInfo(key=describe(key), bytes=graph.recording.bytes + graph.inputs.bytes, hits=graph.hits)
            for key, graph in self._graphs.items()
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why something runs eagerly, each once; empty where all of the step is captured."""
        always = [self._why_eager] if self._why_eager else []
        return tuple(dict.fromkeys([*always, *self._first_reasons, *self._eager.values()]))

    @property
    def report(self) -> CaptureReport:
        """What of the step runs as a graph, what does not, and why."""
        captured = not self._why_eager and (bool(self._graphs) or not self._eager)
        return CaptureReport(
            device=str(self._device),
            captured=captured,
            optimizer=self._where(self._work.optimizer, self._state.optimizers, captured),
            scaler=self._where(self._work.scaler, self._state.scalers, captured),
            reasons=self.reasons,
            notes=tuple(self._notes),
            graphs=self.graphs,
            captures=self._captures,
            replays=self._replays,
            eager_calls=self._eager_calls,
        )

    def _where(self, own: Any, reasons: list[Any], captured: bool) -> str:
        if own is None and not reasons:
            return "none"
        if not captured:
            return "eager"
        if own is None:
            return "in fn"
        return "in the graph" if self._work.steps_inside else "after each replay"


def _why(error: Exception) -> str:
    text = error_line(error)
    advice = (
        "what waits for the device (.item(), .cpu(), printing), copies from pageable host memory, and tensors of an "
        "earlier forward pass that are still alive cannot be captured"
    )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        advice += (
            "; nor can parameters whose gradients are accumulated on the default stream, such as those of a "
            "DistributedDataParallel that was not constructed in a `with torch.cuda.stream(torch.cuda.Stream()):` block"
        )
    return f"{type(error).__name__}: {text.rstrip('.')} ({advice})"
