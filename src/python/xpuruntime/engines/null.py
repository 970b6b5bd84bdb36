# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The null engine: the whole path with no vendor.

It computes nothing. Outputs are zeros of the declared types, with shapes that follow from the inputs. It is never
chosen by ``auto``: a policy has to name it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xpuruntime.engines.arrays import from_host, kind_of, kind_of_feeds, to_host
from xpuruntime.engines.base import (
    Binding,
    Judgement,
    LoadedModel,
    Observed,
    PackagedEngine,
    Refusal,
    Request,
    Resolved,
    closed,
)
from xpuruntime.engines.input_binding import (
    ConversionLog,
    InputValidator,
    closed_binding,
    empty_host_array,
    fixed_shape,
    is_tensor,
    known_outputs,
    refuse_stream,
    type_name,
)
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.evidence.records import Control, Time, Unit, VerdictCode
from xpuruntime.runtime.machine import EngineFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.evidence.records import Conversion
    from xpuruntime.runtime.machine import Machine

__all__ = ["NullEngine"]


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


class NullModel(LoadedModel):
    """Answers every run with zeros of the declared types and shapes."""

    def __init__(self, info: ModelInfo, *, strict: bool) -> None:
        self._info = info
        self._strict = strict
        self._log = ConversionLog()
        defaults = info.overridable_inputs
        self._check = InputValidator((*info.inputs, *defaults), [i.name for i in defaults])
        self._open = True

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Return zeros; see `InferenceSession`."""
        if not self._open:
            closed()
        refuse_stream(stream)
        self._check.names(feeds)
        kind = kind_of_feeds({n: a for n, a in feeds.items() if is_tensor(self._check.infos[n])})
        ready = self._check.on_host(feeds, strict=self._strict, log=self._log)
        return {name: from_host(array, kind) for name, array in self._zeros(ready).items()}

    def _zeros(self, ready: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        infos = self._check.infos
        described = {n: (type_name(a, infos[n]), a.shape) for n, a in ready.items() if is_tensor(infos[n])}
        self._check.full(described)
        sizes = self._check.symbols({n: shape for n, (_, shape) in described.items()})
        return {
            info.name: empty_host_array(info.name, _resolve(info, sizes), _numpy_type(info))
            for info in self._info.outputs
        }

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind host buffers; see `InferenceSession.bind`."""
        refuse_stream(stream)
        if not self._open:
            closed()
        return NullBinding(self, inputs or {}, outputs or {})

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Report one opaque unit that stands for the whole graph."""
        times = []
        for _ in range(max(runs, 1)):
            start = time.perf_counter()
            self.run(feeds)
            times.append((time.perf_counter() - start) * 1e6)
        unit = Unit(
            id="null",
            op="Zeros",
            relation="opaque",
            source_nodes=tuple(node.name for node in self._info.nodes),
            outputs=tuple(o.name for o in self._info.outputs),
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

    def conversions(self) -> Sequence[Conversion]:
        """Return what was copied so far."""
        return self._log.records()

    def close(self) -> None:
        """Refuse further runs."""
        self._open = False


class NullBinding(Binding):
    """Host buffers that `run` fills with zeros."""

    def __init__(self, model: NullModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        check = model._check
        check.names({**dict.fromkeys(check.required), **inputs})
        ready = {}
        for name in (n for n in check.infos if n in check.required or n in inputs):
            given, info = inputs.get(name), check.infos[name]
            if given is None or isinstance(given, tuple) or not is_tensor(info):
                ready[name] = empty_host_array(name, fixed_shape(info, given), _numpy_type(info))
            else:
                ready[name] = to_host(name, given, kind_of(name, given))
        zeros = model._zeros(ready)
        known_outputs(outputs, tuple(zeros))
        made: dict[str, np.ndarray[Any, Any]] = {}
        for name, zero in zeros.items():
            array = to_host(name, outputs[name], kind_of(name, outputs[name])) if name in outputs else zero
            if (array.shape, array.dtype) != (zero.shape, zero.dtype):
                msg = (
                    f"output {name!r} is {zero.dtype.name} {list(zero.shape)} for these inputs, got "
                    f"{array.dtype.name} {list(array.shape)}; pass such an array, or leave the output out"
                )
                raise InputError(msg)
            made[name] = array
        self.inputs, self.outputs = ready, made
        self.graph = "off"

        def run() -> None:
            for array in made.values():
                array.fill(0)

        self.run = run

    def close(self) -> None:
        """Release the buffers."""
        self.run = closed_binding
        self.inputs, self.outputs = {}, {}


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
