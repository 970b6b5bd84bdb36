# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`InferenceSession`: one model under one policy, planned, loaded, run and explained."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar, Unpack, overload

import msgspec

from xpuruntime.argument_types import COUNT, NAMES, check_types
from xpuruntime.engines.base import Binding, LoadedModel, closed
from xpuruntime.engines.input_binding import check_call, check_mapping, chosen_outputs
from xpuruntime.engines.model.shapes import with_open_batch
from xpuruntime.engines.registry import EngineRegistry, known_engines
from xpuruntime.errors import EngineError, InputError, LockError, XpuRuntimeError
from xpuruntime.inference.plan_request import PlannedModel, plan_session, reopen_plan, warn_of
from xpuruntime.inference.session_arguments import PolicyAliases, SessionArguments
from xpuruntime.runtime.session_registry import (
    instrumented_method,
    note_bound,
    note_open,
    open_bindings,
    reset_in_child,
)
from xpuruntime.runtime.telemetry import log_decision, log_refusal, traced_run

if TYPE_CHECKING:
    import os
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.engines.run_threads import QueueLimits
    from xpuruntime.evidence import Report
    from xpuruntime.evidence.determinism import DeterminismTests
    from xpuruntime.inference.loading import LoadResult
    from xpuruntime.inference.locked import LockInForce
    from xpuruntime.inference.session_arguments import ModelLike, PolicyLike
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.planning import Plan
    from xpuruntime.policies.execution_policy import Precision
    from xpuruntime.runtime.machine import Machine

ArrayT = TypeVar("ArrayT")


class InferenceSession:
    """A model loaded under a policy.

    Parameters
    ----------
    model : str, path, bytes, onnx.ModelProto, or torch.nn.Module
        An ONNX file, its bytes or an ``onnx.ModelProto`` with its weights inside, an exported program of PyTorch
        (``.pt2``), a module in evaluation mode, or a compiled artifact: the folder that `compile_model` wrote, whose
        own policy holds when none is given.
    policy : Policy, path, mapping, or ``"auto"``, optional
        The policy; a path is loaded. Left out, the policy that the model itself carries holds, such as
        `xpuruntime.pytorch.export` writes; the plan says so.
    device : str, optional
        ``"cpu"``, ``"cuda:0"``, ``"auto"``, …; overrides the policy.
    engine : str or sequence of str, optional
        Engine names in order of preference; overrides the policy.
    precision : str, optional
        ``"fp32"``, ``"fp16"``, ``"bf16"``, …; overrides the policy.
    example_inputs : mapping of str to tensor, or sequence of tensors, optional
        For a module: what it is called with once, to learn its operators and results.
    calibration : path, array, mapping, list or iterable, optional
        Inputs like those that the model will get, to quantize it with where `precision` is ``"int8"``; see
        `Calibration`.
    trust : bool
        Load a ``.pt2`` file although that can run code of the file. Without, such a file is refused.
    plan : Plan, optional
        Open exactly this plan, such as `Plan.from_json` reads: nothing is chosen again. Its policy holds.
        Arguments that would change it, and another model, engine, library, device, driver or setting are refused
        with `PlanError`.
    registry : EngineRegistry, optional
        Engines to choose from; default: all of this package.
    machine : Machine, optional
        Plan against this snapshot instead of a fresh one.
    lock : path, optional
        A lock file that `xpuruntime.lock` or ``xrt lock`` wrote; overrides ``execution.lock`` of the policy. The
        session opens only where the lock holds, and runs its kernels and settings; nothing is tuned.
    frozen : bool
        Take the policy from the lock, and read no other. The validators of the lock are compared all the
        same.
    **aliases
        `PolicyAliases`, other ways to state a part of the policy: `kernel_policy`, `exec_policy`, `backend`, `fp16`.

    Attributes
    ----------
    plan : Plan
        What was decided and why.
    determinism_tests : DeterminismTests or None
        What the last test of this session's determinism found, see `xpuruntime.locks.determinism.session_determinism`.

    Raises
    ------
    ModelError
        The file is missing, corrupt, or refers to data outside its folder; or the policy that it carries is none.
    LockError
        The lock does not hold: names each entry, validator, what is expected and found, and what restores it. Under
        ``mode: strict`` also where the model is not the one that the lock in it was written for.
    PlanError
        `plan` does not fit the model, policy, machine or engine.
    PolicyError
        The policy has an unknown key or a bad value, or two arguments contradict each other.
    CudaError
        The CUDA device asked for is missing.
    EngineError
        The engine asked for is not installed, or refused the model.
    UnsupportedOperationError
        Nothing can run the model as asked; every candidate and its reason is named.

    Examples
    --------
    >>> import numpy as np, xpuruntime as xrt
    >>> with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    ...     out = session.run({"image": np.zeros((1, 1, 8, 8), np.float32)})
    >>> out["logits"].shape
    (1, 10)
    """

    def __init__(
        self,
        model: ModelLike = None,
        policy: PolicyLike | None = None,
        *extra: Never,
        device: str | None = None,
        engine: str | Sequence[str] | None = None,
        precision: Precision | None = None,
        plan: Plan | None = None,
        lock: str | os.PathLike[str] | None = None,
        frozen: bool = False,
        trust: bool = False,
        example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
        calibration: Any = None,
        registry: EngineRegistry | None = None,
        machine: Machine | None = None,
        **aliases: Unpack[PolicyAliases],
    ) -> None:
        unknown = {name: value for name, value in aliases.items() if name not in PolicyAliases.__annotations__}
        if unknown or extra or type(policy).__name__ == "SessionOptions":
            from xpuruntime.inference.session_arguments import refuse_arguments

            unknown |= zip(("providers", "provider_options"), extra, strict=False)  # as ONNX Runtime takes them
            refuse_arguments(unknown, policy)
        self.plan: Plan
        self._lock: LockInForce | None
        self._loaded: LoadedModel | None = None
        self.run = closed  # type: ignore[method-assign]
        #: CUDA graph of the last binding, or why it has none.
        self._bound: str | None = None
        engines = known_engines(registry)
        stated = SessionArguments(policy, device, engine, precision, lock, frozen, trust)
        arguments = stated.with_aliases(aliases, "InferenceSession")
        samples = {"example_inputs": example_inputs, "calibration": calibration}
        if plan is None:
            plan_model = functools.partial(plan_session, model, arguments, engines, machine, **samples)
        elif lock is not None or frozen:
            raise InputError("a lock has a plan of its own. Fix: leave out plan, or lock and frozen")
        else:
            plan_model = functools.partial(reopen_plan, model, plan, arguments, engines, machine, **samples)
        ready = self._load(plan_model, engines, defer=plan is None)
        warn_of(ready.plan, after=len(self.plan.warnings))
        self.plan, self._artifact = ready.plan, ready.artifact
        self._proof, self._checks = ready.proof, ready.conversions
        self.determinism_tests: DeterminismTests | None = None
        self._loaded = ready.loaded
        # The hot path of the engine, in place of the method: two calls less in each run.
        facts = {"engine": self.plan.engine, "device": self.plan.device, "precision": self.plan.precision}
        self.run = traced_run(self._loaded.runner(), facts)  # type: ignore[method-assign]
        if self._lock is not None:
            self._check_lock(self._lock)
        note_open(self)
        reset_in_child(self)

    def _load(self, plan_model: Callable[..., PlannedModel], engines: EngineRegistry, *, defer: bool) -> LoadResult:
        """Plan and load; where the engine fails on a model that it was to check itself, the ONNX checker says why."""
        from xpuruntime.engines.base import Recipe
        from xpuruntime.inference.loading import load_planned

        while True:
            planned = plan_model(defer=True) if defer else plan_model()
            info = planned.request.model
            self.plan, self.policy, self._machine = planned.plan, planned.policy, planned.machine
            self._lock = planned.lock
            self._model = info if self.policy.execution.static_batch is None else with_open_batch(info)
            warn_of(self.plan)
            self._engine = engines.get(self.plan.engine)
            self._request = planned.request.on(self.plan.device, self.policy)
            self._recipe = Recipe(self._engine, self._request, planned.judgement, self._machine)
            try:
                return load_planned(self._recipe, self.plan)
            except XpuRuntimeError:
                if not info.deferred:
                    raise
                defer = False

    def _check_lock(self, lock: LockInForce) -> None:
        """Compare what is loaded now, and what it computes, with the lock; closes the session where it does not fit."""
        from xpuruntime.inference.locked import check_loaded, check_outputs

        try:
            check_loaded(lock)
            check_outputs(self, lock)
            text = f"lock {lock.where} holds for what is loaded and computed"
            log_decision("lock", "INFO", "lock", text, lock=lock.where, digest=lock.lock.digest)
        except LockError as error:
            log_refusal("lock", error)
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def in_child(self) -> None:
        """Refuse runs in a child of a fork: the engine's threads and locks are those of the parent."""
        if self._loaded is not None:
            for owner in (self, *(binding for session, binding in open_bindings() if session is self)):
                owner.run = self._refuse_in_child

    def _refuse_in_child(self, *_: Any, **__: Any) -> Never:
        raise EngineError(
            "this session was opened before the process was forked. Fix: open it in this process again, with a new "
            "InferenceSession",
            engine=self.plan.engine,
        )

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The model's inputs: name, dtype, shape."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The model's outputs: name, dtype, shape."""
        return self._model.outputs

    @property
    def model(self) -> ModelInfo:
        """What was read from the model file."""
        return self._model

    @property
    def lock(self) -> Lock | None:
        """The lock that the session was opened under, if any."""
        return None if self._lock is None else self._lock.lock

    @overload
    def run(
        self, inputs: Mapping[str, NDArray[Any]], stream: Any = None, outputs: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]: ...
    @overload
    def run(
        self, inputs: Mapping[str, ArrayT], stream: Any = None, outputs: Sequence[str] | None = None
    ) -> dict[str, ArrayT]: ...
    def run(
        self, inputs: Mapping[str, Any], stream: Any = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Run the model once. Safe to call from many threads.

        Parameters
        ----------
        inputs : mapping of str to array
            NumPy, or anything that supports DLPack. Arrays of the right type on the session's device are not copied.
        stream : stream, optional
            CUDA only: in whose order the run is. Default: the current stream of the framework of `inputs`.
        outputs : list of str, optional
            The outputs to return, in this order; default: all. Engines compute all the same: ONNX Runtime too, whose
            own choice of outputs leaves no node out.

        Returns
        -------
        dict of str to array
            Of the caller's own kind; those of CUDA arrays stay on the device.

        Raises
        ------
        InputError
            A name, type or shape is not the model's.
        EngineError
            The engine failed.
        XpuRuntimeError
            The session is closed.
        """
        return self._open().checked_run(inputs, stream, outputs)

    def run_async(
        self,
        inputs: Mapping[str, Any] = None,  # type: ignore[assignment]  # noqa: RUF013
        *extra: Never,
        stream: Any = None,
        outputs: Sequence[str] | None = None,
        queue: int | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Future[dict[str, Any]]:
        """Start a run and return at once.

        Parameters
        ----------
        inputs : mapping of str to array
            As for `run`. Do not write into the arrays before the future is done: they are not copied.
        stream : stream, optional
            CUDA only, as for `run`.
        outputs : list of str, optional
            The outputs to return, as for `run`.
        queue : int, optional
            Most runs of this session that may wait already; 1 or more. Default: any number.
        timeout : float, optional
            Seconds within which the run must begin; one that has begun goes on to its end.

        Returns
        -------
        concurrent.futures.Future
            ``.result()`` is what `run` returns, or raises what it raises. ``.cancel()`` works until the run begins. As
            many runs go on side by side as the engine does well; others wait, however many there are. `close` cancels
            those that wait, so that ``.result()`` raises `concurrent.futures.CancelledError`, and waits for the others.

        Raises
        ------
        InputError
            An input is wrong, where the engine looks at once; else the future raises it. Or another argument is.
        QueueFullError
            As many runs wait as `queue` allows.
        DeadlineError
            From the future: the run did not begin within `timeout`.
        XpuRuntimeError
            The session is closed.

        Notes
        -----
        CUDA arrays are run by the calling thread, which only queues the work: such a future is done at once, and its
        arrays are ready in the order of the caller's stream. None of these waits, so `queue` and `timeout` hold.
        """
        check_call(inputs, unknown, "run_async", extra)
        chosen = None if outputs is None else chosen_outputs(outputs, [info.name for info in self.outputs])
        options = {"limits": _limits(queue, timeout), "outputs": chosen}
        stated = {name: value for name, value in options.items() if value is not None}
        future: Future[dict[str, Any]] = instrumented_method(self._open(), "run_async")(inputs, stream, **stated)
        return future

    def bind(
        self,
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        *,
        stream: Any = None,
    ) -> Binding:
        """Fix input and output buffers, so that a run moves no data and makes none. On the CPU, nothing is run.

        Parameters
        ----------
        inputs : mapping, optional
            Name to array, whose memory is bound without a copy, or to a shape, for which memory is made. Inputs whose
            shape is fixed in the model may be left out.
        outputs : mapping, optional
            Name to array to write into. Others are made where their sizes follow from the inputs; else the engine
            makes them in each run. The array of a past cache may be that of the present: with ONNX Runtime on the CPU,
            ``GroupQueryAttention`` writes it in place, with room for later steps. Elsewhere the result is copied after
            each run, which the evidence says and a strict policy refuses.
        stream : stream, optional
            CUDA only: the stream on which you write inputs and read outputs; default: the framework's current one.

        Returns
        -------
        Binding
            Write into ``binding.inputs[name]``, call ``binding.run()``, read ``binding.outputs[name]``.
            ``binding.inputs[name] = array`` binds the memory of another array without a copy, of any size that the
            model takes, with ONNX Runtime and OpenVINO on the CPU; others refuse it. On CUDA with
            ``execution.cuda_graph``, `run` replays a captured graph; ``binding.graph`` says so, or why not.

        Raises
        ------
        InputError
            A buffer has the wrong name, dtype, shape, device or layout.
        """
        loaded = self._open()
        for what, buffers, tensors in (("inputs", inputs, self.inputs), ("outputs", outputs, self.outputs)):
            if buffers is not None:
                check_mapping(buffers, tensors[0].name if tensors else what[:-1], what=what)
        try:
            binding = loaded.bind(inputs, outputs, stream)
        except XpuRuntimeError as error:
            if not isinstance(error, InputError) and self.policy.execution.cuda_graph == "require":
                self._bound = str(error)
            raise
        self._bound = binding.graph
        note_bound(self, binding)
        return binding

    def explain(self, inputs: Mapping[str, Any] | None = None, *, runs: int = 10) -> Report:
        """Run an instrumented copy of the session and report requested, resolved, observed.

        Parameters
        ----------
        inputs : mapping, optional
            As for `run`. Left out, deterministic probe inputs are made from the model's shapes, and the report says so.
        runs : int
            Timed runs after a cold one.

        Returns
        -------
        Report
            Printable; ``.to_dict()``, ``.to_json()``; ``.honoured`` and ``.deviations``.

        Notes
        -----
        Slow: the model is loaded once more with the engine's own profiling. `run` is not affected.
        """
        from xpuruntime.inference.explain import explain_session

        check_types({"runs": COUNT}, {"runs": runs})
        if runs < 1:
            msg = f"runs must be at least 1, got {runs}"
            raise InputError(msg)
        return explain_session(self, self._open(), inputs, runs)

    def intermediates(self, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Run once and return tensors inside of the model, under the same plan.

        Parameters
        ----------
        inputs : mapping of str to array
            As for `run`.
        names : sequence of str
            Tensors, by the names in ``session.model.nodes``: ``node.outputs``.

        Returns
        -------
        dict of str to array
            Of the caller's own kind. Where control flow depends on the inputs, what was not made is left out.

        Raises
        ------
        InputError
            No node makes a tensor of such a name, or the inputs do not fit.
        UnsupportedOperationError
            The session runs a compiled artifact, or the engine refuses the model with more outputs.

        Notes
        -----
        Slow: PyTorch's programs run operator by operator; ONNX models are loaded once more with these tensors as
        outputs, which an engine then cannot fuse away, so that what it fuses there may be other nodes than in `run`.
        """
        from xpuruntime.inference.intermediates import tap

        check_types({"names": NAMES}, {"names": names})
        return tap(self._engine, self._request, self._machine, self._open(), inputs, names)

    def save_compiled(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Artifact:
        """Write this model, compiled, into a folder that `InferenceSession` starts from without the slow part.

        Slow: the engine compiles once more, unless the session itself was made from an artifact, which is copied.

        Parameters
        ----------
        folder : str or path
            By custom ``model.xrt``. It appears whole or not at all.
        overwrite : bool
            Replace a folder that is there.

        Raises
        ------
        InputError
            The folder is there already.
        UnsupportedOperationError
            The engine makes no compiled artifact.
        XpuRuntimeError
            As `compile_model`.
        """
        from xpuruntime.inference.compiling import save_compiled

        self._open()
        request = msgspec.structs.replace(self._request, artifact=self._artifact)
        return save_compiled(self._recipe._replace(request=request), folder, overwrite=overwrite)

    def memory(self) -> dict[str, int]:
        """Return bytes in use by owner, as far as the engine reports them."""
        return self._open().memory()

    def close(self) -> None:
        """Release the model. Idempotent; running afterwards raises.

        Asynchronous runs that have begun finish first; those that wait are cancelled.
        """
        loaded = self._loaded
        try:
            self._close()
        finally:
            if loaded is not None:
                loaded.restore_thread()

    def _close(self) -> None:
        loaded, self._loaded = self._loaded, None
        self.run = closed  # type: ignore[method-assign]
        if loaded is not None and not loaded.forked:
            loaded.stop_async()
            loaded.close()

    def _open(self) -> LoadedModel:
        loaded = self._loaded
        if loaded is None:
            closed()
        if loaded.forked:
            self._refuse_in_child()
        return loaded

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from xpuruntime.inference.session_arguments import refuse_attribute

            refuse_attribute(name)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        msg = f"{self!r} cannot be pickled or copied: it holds an engine's state; open one in each process"
        raise TypeError(msg)

    def __repr__(self) -> str:
        state = "closed" if self._loaded is None else f"{self.plan.engine}@{self.plan.device}"
        return f"<InferenceSession {self._model.path!r} {state}>"


def _limits(queue: int | None, timeout: float | None) -> QueueLimits | None:
    if queue is None and timeout is None:
        return None
    if queue is not None and (isinstance(queue, bool) or not isinstance(queue, int) or queue < 1):
        raise InputError(f"queue is the number of runs that may wait, 1 or more, got {queue!r}")
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout <= threading.TIMEOUT_MAX):
        raise InputError(f"timeout is a number of seconds above 0, got {timeout!r}")
    from xpuruntime.engines.run_threads import QueueLimits

    return QueueLimits(queue, timeout)
