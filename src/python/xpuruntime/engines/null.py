# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The null engine: the whole path with no vendor.

It computes nothing. Outputs are zeros of the declared types, with shapes that follow from the inputs. It is never
chosen by ``auto``: a policy has to name it.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xpuruntime.engines.base import (
    Binding,
    Judgement,
    LoadedModel,
    Observed,
    PackagedEngine,
    Refusal,
    Request,
    Resolved,
)
from xpuruntime.engines.binding import HostBinding, HostBuffers
from xpuruntime.engines.host_model import HostModel
from xpuruntime.engines.input_binding import ConversionLog, empty_host_array, is_tensor
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.evidence.records import Control, Time, Unit, VerdictCode
from xpuruntime.runtime.machine import EngineFacts, Machine

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.engines.model import ModelInfo, TensorInfo


class NullEngine(PackagedEngine[Any]):
    """Runs the whole path and computes nothing; for tests, and for measuring what the path itself costs."""

    name: ClassVar[str] = "null"
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu",)
    automatic: ClassVar[bool] = False
    title: ClassVar[str] = "the null engine"
    runs_on: ClassVar[str] = "cpu"

    def probe(self) -> EngineFacts:
        """Say that it is always there."""
        return EngineFacts(name=self.name, version="1", loadable=True, providers=("null",))

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CPU: memory is all it touches."""
        del machine
        return ("cpu",)

    def refuse_package(self, machine: Machine) -> None:
        """Refuse nothing: there is no package."""

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse where it was not named, or an output is no tensor."""
        del machine
        named = request.policy.execution.engine
        listed = (named,) if isinstance(named, str) else tuple(named)
        listed += tuple(candidate.engine for candidate in request.policy.execution.fallback_candidates)
        if self.name not in listed:
            reason = "it computes nothing and is used only when named"
            return Refusal(VerdictCode.NOT_NAMED, reason, "state engine: null if you want zeros")
        shapeless = [o.name for o in request.model.outputs if o.shape is None or not is_tensor(o)]
        if shapeless:
            reason = f"output {shapeless[0]!r} is no tensor with a known rank"
            return Refusal(VerdictCode.OP_UNSUPPORTED, reason, "use another engine")
        return None

    def resolve(self, request: Request, machine: Machine) -> Resolved[Any]:
        """Return no settings."""
        del machine
        controls = tuple(_control(key, value) for key, value in request.policy.stated().items())
        return Resolved({}, controls, "named in the policy; computes nothing")

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        """Return the model that answers with zeros."""
        del judgement, machine
        return NullModel(request.model, strict=request.policy.mode == "strict")


def _control(key: str, value: Any) -> Control:
    placed = key in ("execution.engine", "execution.device", "execution.fallback", "mode")
    placed = (
        placed or key in ("execution.static_shape", "execution.static_batch") or key.startswith("execution.shapes.")
    )
    return Control(
        key=key,
        requested=str(value),
        resolved=str(value) if placed else "-",
        enforceability="enforced" if placed else "unsupported",
        reason="decided by the plan" if placed else "the null engine computes nothing",
        fix=None if placed else "use another engine, or leave the key out",
    )


class NullModel(HostModel):
    """Answers every run with zeros of the declared types and shapes."""

    def __init__(self, info: ModelInfo, *, strict: bool) -> None:
        super().__init__(
            info,
            info,
            [output.name for output in info.outputs],
            optional=info.overridable_inputs,
            strict=strict,
            observer=functools.partial(_observed, weakref.proxy(self), info),
            log=ConversionLog(),
        )

    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        del handle
        return self.zeros({name: array.shape for name, array in ready.items() if is_tensor(self._check.infos[name])})

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, _core.Tensor]) -> Sequence[_core.Tensor]:
        del handle, tensors
        msg = "the model takes or gives bfloat16, which NumPy does not have; the null engine cannot make it"
        raise UnsupportedOperationError(msg, engine="null")

    def zeros(self, shapes: Mapping[str, tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
        """Return the outputs for inputs of these shapes."""
        sizes = self._check.symbols(shapes)
        outputs = self._info.outputs
        return [empty_host_array(info.name, _resolve(info, sizes), _numpy_type(info)) for info in outputs]

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind host buffers; see `InferenceSession.bind`."""
        self.check_bind(stream)
        return HostBinding(_NullBuffers(self, inputs or {}, outputs or {}))


def _observed(model: NullModel, info: ModelInfo, feeds: Mapping[str, Any], runs: int) -> Observed:
    times = []
    for _ in range(max(runs, 1)):
        start = time.perf_counter()
        model.run(feeds)
        times.append((time.perf_counter() - start) * 1e6)
    unit = Unit(
        id="null",
        op="Zeros",
        relation="opaque",
        source_nodes=tuple(node.name for node in info.nodes),
        outputs=tuple(o.name for o in info.outputs),
        engine="null",
        device="cpu",
        provider="null",
        kernel="zeros",
        kernel_source="reported",
        time=Time(value=float(np.median(times)), unit="us", kind="wall", runs=len(times)),
    )
    effective = {"execution.engine": "null", "execution.device": "cpu"}
    return Observed(
        units=(unit,),
        effective=effective,
        notes=("the null engine computes nothing: all outputs are zero",),
        run_us=tuple(times),
        units_us=tuple(times),
    )


class _NullBuffers(HostBuffers):
    def in_place(self, source: str, name: str) -> bool:
        """Say so of all: nothing is read."""
        del source, name
        return True

    def arrange(self) -> None:
        model = self._model
        assert isinstance(model, NullModel)
        for name, zeros in zip(model._outputs, model.zeros({n: a.shape for n, a in self.inputs.items()}), strict=True):
            self.outputs.setdefault(name, zeros)

    def run(self) -> None:
        if self.changed:
            self.place()
        for array in self.outputs.values():
            array.fill(0)


def _numpy_type(info: TensorInfo) -> Any:
    if info.dtype == "string":
        return object
    try:
        return np.dtype(info.dtype)
    except TypeError:
        msg = f"{info.name!r} has dtype {info.dtype}, which NumPy does not have; the null engine cannot make it"
        raise UnsupportedOperationError(msg, engine="null") from None


def _resolve(info: TensorInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = []
    for dim in info.shape or ():
        size = dim if isinstance(dim, int) else sizes.get(str(dim))
        if size is None:
            msg = (
                f"dimension {dim!r} of output {info.name!r} does not follow from the inputs; the null engine "
                "cannot know it"
            )
            raise UnsupportedOperationError(msg, engine="null")
        shape.append(int(size))
    return tuple(shape)
