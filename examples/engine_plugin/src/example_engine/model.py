# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by the reference evaluator: running it, binding buffers, and reporting what ran."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from example_engine.engine import NAMES
from xpuruntime.engines.arrays import from_host, kind_of, kind_of_feeds, to_host
from xpuruntime.engines.base import Binding, LoadedModel, Observed, Request, closed
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
from xpuruntime.engines.model_source import ModelSource, prepare_source
from xpuruntime.errors import EngineError, InputError, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.evidence.records import Time, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo, NodeInfo, TensorInfo
    from xpuruntime.evidence.records import Conversion

__all__ = ["ReferenceModel", "load_model"]

ENGINE = NAMES[0]
_PRECISIONS = {"float16": "fp16", "float32": "fp32", "float64": "fp64"}


def load_model(request: Request, settings: Mapping[str, Any], version: str) -> ReferenceModel:
    """Load a model.

    Raises
    ------
    ModelError
        Its weights cannot be read.
    UnsupportedOperationError
        The evaluator has no implementation of an operator.
    """
    log = ConversionLog()
    # The model as an engine should get it: nodes have unique names, and shapes that the policy states are fixed.
    source = prepare_source(request, log)
    try:
        proto = _read(source)
    except Exception as error:
        raise ModelError(f"{source.label} cannot be read: {error}", engine=ENGINE) from error
    try:
        evaluator = ReferenceEvaluator(proto)
    except Exception as error:
        raise UnsupportedOperationError(
            f"the reference evaluator of onnx {version} does not take {source.label}: {error}. Use another engine",
            engine=ENGINE,
            device="cpu",
        ) from error
    return ReferenceModel(request.model, evaluator, settings, log)


def _read(source: ModelSource) -> onnx.ModelProto:
    if isinstance(source.model, str):
        return onnx.load(source.model)
    proto = onnx.load_model_from_string(source.model)
    if source.folder is not None:
        onnx.load_external_data_for_model(proto, source.folder)
    return proto


class ReferenceModel(LoadedModel):
    """Runs on the CPU; NumPy in, NumPy out, other frameworks through DLPack.

    The evaluator says nothing about threads, so runs are put one after the other.
    """

    def __init__(
        self, info: ModelInfo, evaluator: ReferenceEvaluator, settings: Mapping[str, Any], log: ConversionLog
    ) -> None:
        self._info = info
        self._evaluator: ReferenceEvaluator | None = evaluator
        self._errors = settings["options"].get("floating_point_errors", "ignore")
        self._seen_errors = "unknown"
        self._strict = settings["strict"]
        self._log = log
        self._lock = threading.Lock()
        defaults = info.overridable_inputs
        self.check = InputValidator((*info.inputs, *defaults), [tensor.name for tensor in defaults], equal=True)

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind."""
        evaluator = self._evaluator
        if evaluator is None:
            closed()
        refuse_stream(stream)
        self.check.names(feeds)
        kind = kind_of_feeds({name: array for name, array in feeds.items() if is_tensor(self.check.infos[name])})
        ready = self.check.on_host(feeds, strict=self._strict, log=self._log)
        found = self._evaluate(evaluator, ready)
        return {out.name: from_host(self._result(out, found[out.name]), kind) for out in self._info.outputs}

    def _evaluate(self, evaluator: ReferenceEvaluator, ready: Mapping[str, Any]) -> dict[str, Any]:
        """Return every value of the graph by name."""
        try:
            with self._lock, np.errstate(all=self._errors):
                self._seen_errors = np.geterr()["invalid"]
                found: dict[str, Any] = evaluator.run(None, dict(ready), intermediate=True)
                return found
        except FloatingPointError as error:
            raise EngineError(
                f"running {self._info.path}: {error}, and floating_point_errors is 'raise'", engine=ENGINE, device="cpu"
            ) from None
        except MemoryError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> XpuRuntimeError:
        text = f"running {self._info.path} failed in onnx's reference evaluator: {type(error).__name__}: {error}"
        return EngineError(text, engine=ENGINE, device="cpu")

    def _result(self, info: TensorInfo, value: Any) -> Any:
        """Return a value that is the caller's own: the evaluator hands out inputs and weights as they are."""
        if value is None or not is_tensor(info):
            return [np.array(one) for one in value] if isinstance(value, list) else value
        array = np.array(value)
        if type_name(array, info) != info.dtype:  # the type is read back, not assumed
            msg = f"output {info.name!r} came as {array.dtype.name}, and the model says {info.dtype}"
            raise EngineError(msg, engine=ENGINE, device="cpu")
        return array

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind NumPy buffers."""
        refuse_stream(stream)
        if self._evaluator is None:
            closed()
        return ReferenceBinding(self, inputs or {}, outputs or {})

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run, and say of each node which implementation ran and what it computed in."""
        evaluator = self._evaluator
        if evaluator is None:
            closed()
        ready = self.check.on_host(feeds, strict=self._strict, log=self._log)
        times, values = [], {}
        for _ in range(max(runs, 1)):
            start = time.perf_counter()
            values = self._evaluate(evaluator, ready)
            times.append((time.perf_counter() - start) * 1e6)
        whole = Time(value=float(np.median(times)), unit="us", kind="wall", runs=len(times))
        kernels = {out: _implementation(node) for node in evaluator.rt_nodes_ for out in node.output if out}
        units = tuple(_unit(node, inner, values, kernels) for node, inner in _with_inner_nodes(self._info.nodes))
        # Only what was read back: a key that is left out is reported as unobservable, which is the truth.
        effective = {"execution.engine": ENGINE, "execution.device": "cpu"}
        for name in NAMES:
            effective[f"execution.provider_options.{name}.floating_point_errors"] = self._seen_errors
        notes = (f"one run of all nodes took {whole.value:.0f} us; the evaluator reports no time for each",)
        return Observed(units=units, effective=effective, notes=notes)

    def conversions(self) -> Sequence[Conversion]:
        """Return what was copied so far."""
        return self._log.records()

    def close(self) -> None:
        """Drop the evaluator; runs in other threads finish first, since they hold it."""
        self._evaluator = None


def _implementation(node: Any) -> str:
    return f"{type(node).__module__}.{type(node).__qualname__}"


def _with_inner_nodes(nodes: Sequence[NodeInfo]) -> list[tuple[NodeInfo, tuple[str, ...]]]:
    """Return the nodes of the main graph, each with the names of those in its subgraphs."""
    outer = [node for node in nodes if not node.graph]
    inner: dict[str, list[str]] = {node.name: [] for node in outer}
    for node in nodes:
        if node.graph:
            owners = [name for name in inner if node.graph.startswith(f"{name}/")]
            inner[max(owners, key=len)].append(node.name)
    return [(node, tuple(inner[node.name])) for node in outer]


def _unit(node: NodeInfo, inner: tuple[str, ...], values: Mapping[str, Any], kernels: Mapping[str, str]) -> Unit:
    made = tuple(name for name in node.outputs if name)
    types = [str(values[name].dtype) for name in made if hasattr(values.get(name), "dtype")]
    return Unit(
        id=node.name,
        op=node.op,
        relation="opaque" if inner else "exact",  # what ran inside a loop or a branch is not reported
        source_nodes=(node.name, *inner),
        outputs=made,
        engine=ENGINE,
        device="cpu",
        provider="numpy",
        kernel=kernels.get(made[0]) if made else None,
        kernel_source="reported" if made and made[0] in kernels else "unknown",
        precision_run=_PRECISIONS.get(types[0], types[0]) if types else None,
    )


class ReferenceBinding(Binding):
    """NumPy buffers: `run` reads the inputs and writes the outputs."""

    def __init__(self, model: ReferenceModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        check = model.check
        self.graph = "off"
        check.names({**dict.fromkeys(check.required), **inputs})
        names = [name for name in check.infos if name in check.required or name in inputs]
        bound = {name: _input(check.infos[name], inputs.get(name)) for name in names}
        check.full({name: (type_name(array, check.infos[name]), array.shape) for name, array in bound.items()})
        first = model.run(bound)  # the only way to know the shapes of outputs for every model
        known_outputs(outputs, tuple(first))
        made = {name: _output(name, value, outputs.get(name)) for name, value in first.items()}
        self.inputs, self.outputs = bound, made

        def run() -> None:
            for name, value in model.run(bound).items():
                np.copyto(made[name], value, casting="no")

        self.run = run

    def close(self) -> None:
        """Release the buffers."""
        self.run = closed_binding
        self.inputs, self.outputs = {}, {}


def _input(info: TensorInfo, given: Any) -> np.ndarray[Any, Any]:
    if given is None or isinstance(given, tuple) or info.dtype == "string" or not is_tensor(info):
        return empty_host_array(info.name, fixed_shape(info, given), np.dtype(info.dtype))
    array = to_host(info.name, given, kind_of(info.name, given))
    if not array.flags.c_contiguous:
        msg = (
            f"input {info.name!r} is not C-contiguous, so its memory cannot be bound. Fix: pass np.ascontiguousarray(x)"
        )
        raise InputError(msg)
    return array


def _output(name: str, value: Any, given: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
        msg = f"output {name!r} has no fixed buffer. Fix: use run()"
        raise InputError(msg)
    if given is None:
        return value
    array = to_host(name, given, kind_of(name, given))
    if (array.shape, array.dtype) != (value.shape, value.dtype) or not array.flags.writeable:
        msg = (
            f"output {name!r} is {value.dtype.name} {list(value.shape)} and writable for these inputs, got "
            f"{array.dtype.name} {list(array.shape)}"
        )
        raise InputError(msg)
    return array
