# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`InferenceSession`: one model under one policy, planned, loaded, run and explained."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import closed
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import InputError, PolicyError, XpuRuntimeWarning

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Literal

    from xpuruntime.engines.base import Binding, LoadedModel
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.evidence import Report
    from xpuruntime.planning import Plan
    from xpuruntime.policies import ExecutionPolicy, KernelPolicy, Policy
    from xpuruntime.runtime.machine import Machine

    PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, Any]
    Precision = Literal["model", "fp32", "tf32", "fp16", "bf16", "int8"]

__all__ = ["InferenceSession", "plan"]


class InferenceSession:
    """A model loaded under a policy.

    Parameters
    ----------
    model : str or path
        An ONNX file.
    device : str, optional
        ``"cpu"``, ``"cuda:0"``, ``"auto"``, …; overrides the policy.
    engine : str or sequence of str, optional
        Engine names in order of preference; overrides the policy. `backend` is an alias.
    kernel_policy : KernelPolicy, optional
        Overrides the policy's kernels.
    exec_policy : ExecutionPolicy, optional
        Overrides the policy's execution section.
    policy : Policy, path, mapping, or ``"auto"``, optional
        The policy; a path is loaded.
    precision : str, optional
        ``"fp32"``, ``"fp16"``, ``"bf16"``, …; ``fp16=True`` is the same as ``precision="fp16"``.
    registry : EngineRegistry, optional
        Engines to choose from; default: all of this package.
    machine : Machine, optional
        Plan against this snapshot instead of a fresh one.

    Attributes
    ----------
    plan : Plan
        What was decided and why.
    run : callable
        ``run(inputs, stream=None) -> dict of str to array``. `inputs` maps names to arrays: NumPy, or anything that
        speaks DLPack. Results are of the caller's own kind; CUDA arrays stay on the device and in the order of the
        caller's stream (`stream`, else the framework's current one). Safe to call from many threads.

    Raises
    ------
    ModelError
        The file is missing, corrupt, or refers to data outside its folder.
    PolicyError
        The policy has an unknown key or a bad value, or two arguments contradict each other.
    CudaError
        The CUDA device asked for is not there.
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
        model: str | os.PathLike[str],
        device: str | None = None,
        engine: str | Sequence[str] | None = None,
        kernel_policy: KernelPolicy | None = None,
        exec_policy: ExecutionPolicy | None = None,
        policy: PolicyLike | None = None,
        *,
        precision: Precision | None = None,
        fp16: bool = False,
        backend: str | Sequence[str] | None = None,
        registry: EngineRegistry | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._loaded: LoadedModel | None = None
        self.run: Callable[..., dict[str, Any]] = closed
        engines = registry if registry is not None else default_registry()
        stated = _merge(device, engine, kernel_policy, exec_policy, policy, precision, fp16=fp16, backend=backend)
        self._model, self.plan, self._machine = _plan(model, stated, engines, machine)
        self.policy = stated
        if self.plan.warnings:
            lines = self.plan.warnings
            text = lines[0] if len(lines) == 1 else "\n  ".join(("", *lines))
            warnings.warn(f"{self.plan.engine}@{self.plan.device}: {text}", XpuRuntimeWarning, stacklevel=2)
        from xpuruntime.engines.base import Request

        request = Request(model=self._model, device=self.plan.device, policy=stated)
        chosen = engines.get(self.plan.engine)
        self._loaded = chosen.load(request, self.plan.judgement(), self._machine)
        self.run = self._loaded.runner()

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

    def bind(
        self,
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        *,
        stream: Any = None,
    ) -> Binding:
        """Fix input and output buffers, so that a run moves no data and makes none.

        Parameters
        ----------
        inputs : mapping, optional
            Name to array, whose memory is bound without a copy, or to a shape, for which memory is made. Inputs whose
            shape is fixed in the model may be left out.
        outputs : mapping, optional
            Name to array to write into. Others are made.
        stream : stream, optional
            CUDA only: the stream on which you write inputs and read outputs; default: the framework's current one.

        Returns
        -------
        Binding
            Write into ``binding.inputs[name]``, call ``binding.run()``, read ``binding.outputs[name]``. On CUDA with
            ``execution.cuda_graph``, `run` replays a captured graph; ``binding.graph`` says so, or why not.

        Raises
        ------
        InputError
            A buffer has the wrong name, dtype, shape, device or layout.
        """
        return self._open().bind(inputs, outputs, stream)

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

        if runs < 1:
            msg = f"runs must be at least 1, got {runs}"
            raise InputError(msg)
        return explain_session(self, self._open(), inputs, runs)

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner, as far as the engine tells."""
        return self._open().memory()

    def close(self) -> None:
        """Release the model. Idempotent; running afterwards raises."""
        loaded, self._loaded = self._loaded, None
        self.run = closed
        if loaded is not None:
            loaded.close()

    def _open(self) -> LoadedModel:
        if self._loaded is None:
            closed()
        return self._loaded

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


def plan(
    model: str | os.PathLike[str],
    device: str | None = None,
    engine: str | Sequence[str] | None = None,
    kernel_policy: KernelPolicy | None = None,
    exec_policy: ExecutionPolicy | None = None,
    policy: PolicyLike | None = None,
    *,
    precision: Precision | None = None,
    fp16: bool = False,
    backend: str | Sequence[str] | None = None,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Decide what would run, without loading anything.

    Parameters are those of `InferenceSession`.

    Returns
    -------
    Plan
        The chosen engine and device, every rejected candidate with its reason and fix, and the enforceability of each
        policy key.
    """
    engines = registry if registry is not None else default_registry()
    stated = _merge(device, engine, kernel_policy, exec_policy, policy, precision, fp16=fp16, backend=backend)
    return _plan(model, stated, engines, machine)[1]


def _merge(
    device: str | None,
    engine: str | Sequence[str] | None,
    kernel_policy: KernelPolicy | None,
    exec_policy: ExecutionPolicy | None,
    policy: PolicyLike | None,
    precision: Precision | None,
    *,
    fp16: bool,
    backend: str | Sequence[str] | None,
) -> Policy:
    from xpuruntime.policies import Policy

    if engine is not None and backend is not None and engine != backend:
        msg = f"engine={engine!r} and backend={backend!r} contradict each other; backend is an alias, state one of them"
        raise PolicyError(msg)
    if fp16 and precision not in (None, "fp16"):
        msg = f"fp16=True and precision={precision!r} contradict each other; state one of them"
        raise PolicyError(msg)
    return Policy.coerce(policy).with_overrides(
        device=device,
        engine=engine if engine is not None else backend,
        precision="fp16" if fp16 else precision,
        kernel_policy=kernel_policy,
        exec_policy=exec_policy,
    )


def _plan(
    model: str | os.PathLike[str], policy: Policy, registry: EngineRegistry, machine: Machine | None
) -> tuple[ModelInfo, Plan, Machine]:
    from xpuruntime.engines.model import inspect_model
    from xpuruntime.planning import PlanRequest, resolve

    info = inspect_model(model)
    facts = machine if machine is not None else _machine_of(registry)
    return info, resolve(PlanRequest(model=info), policy, facts, registry.engines()), facts


@functools.lru_cache(maxsize=8)
def _machine_of(registry: EngineRegistry) -> Machine:
    """Take the snapshot once per registry: what is installed does not change under a running process."""
    from xpuruntime.runtime.snapshot import machine_snapshot

    return machine_snapshot(registry.engines())
