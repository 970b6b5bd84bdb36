# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Native configuration of OpenVINO: properties as JSON with a script, and a model repository of Triton."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import Observed
from xpuruntime.engines.native_export.native_config import (
    KeyOutcome,
    KeyOutcomes,
    NativeConfig,
    NativeExporter,
    python_literal,
    script_main,
)
from xpuruntime.engines.native_export.triton_config import TRITON_COMMAND, ModelConfig, TensorConfig, tensor_configs
from xpuruntime.engines.openvino.execution_graph import executed_nodes
from xpuruntime.engines.openvino.loading import prepared_graph
from xpuruntime.engines.openvino.options import NAMES, OpenVinoSettings
from xpuruntime.engines.openvino.slots import port_order
from xpuruntime.errors import EngineFailed

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, TensorInfo

_CONFIG, _GRAPH = "config.json", "model.xml"
_HINT = "INFERENCE_PRECISION_HINT"
#: Types that Triton's backend lacks.
_NOT_IN_TRITON = ("bfloat16", "float64", "string")
#: Properties that Triton's backend passes on.
_TRITON = ("PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "NUM_STREAMS")


class OpenVinoExporter(NativeExporter):
    """Exports sessions of OpenVINO on its CPU, GPU and NPU plugins."""

    targets: ClassVar[dict[str, str]] = {
        "openvino-json": "OpenVINO's graph, its properties as JSON, and a Python script that loads both",
        "triton": "a model repository for Triton's openvino backend",
    }
    proved: ClassVar[tuple[str, ...]] = ("openvino-json",)
    worker: ClassVar[Path] = Path(__file__).with_name("native_worker.py")
    _info: ModelInfo

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the graph as a session compiles it, and the configuration."""
        settings = self.settings_as(OpenVinoSettings)
        graph, self._info = prepared_graph(self.job.request, settings)
        if target == "triton":
            return self._repository(settings, graph, folder)
        _save(graph, folder)
        properties = {**settings.properties, _HINT: settings.hint}
        config = {settings.device: dict(sorted(properties.items()))}
        (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        order = [self._info.inputs[index].name for index in port_order(graph, self._info)]
        taken, output_bits = self.bits()
        text = _TEMPLATE.format(
            main=script_main("open_model"),
            name=self.job.name,
            digest=self.job.digest,
            version=self.job.version,
            device=settings.device,
            inputs=order,
            outputs=[output.name for output in self._info.outputs],
            bits=f"BFLOAT16 = {sorted({*taken, *output_bits})!r}  # as bits, in arrays of uint16\n"
            if taken or output_bits
            else "",
            run=_RUN_BITS if taken or output_bits else _RUN,
            checked=python_literal({_HINT: settings.hint}),
        )
        also = f"benchmark_app takes the same: -m {_GRAPH} -d {settings.device} -load_config {_CONFIG}"
        return self.write_script(folder, text, self._outcomes(settings), [also])

    def device_word(self) -> str:
        """Return OpenVINO's name of the device."""
        return self.settings_as(OpenVinoSettings).device

    def observed(self, feeds: Mapping[str, Any], value: dict[str, Any]) -> Observed:
        """Return the units of the graph that OpenVINO executed; see `NativeExporter.observed`."""
        from xpuruntime.engines.openvino.observing import units_of

        del feeds
        settings = self.settings_as(OpenVinoSettings)
        units, notes = units_of(executed_nodes(value["graph"]), self._info, self.job.request.device, settings)
        return Observed(units=units, notes=tuple(notes))

    def _outcomes(self, settings: OpenVinoSettings) -> tuple[KeyOutcome, ...]:
        outcomes = KeyOutcomes(self.job, "OpenVINO")
        outcomes.add("execution.precision", "kept", f"{_HINT} {settings.hint}, which the script reads back")
        outcomes.add("execution.threads", "kept", "INFERENCE_NUM_THREADS")
        outcomes.add_determinism("kept", "the same streams and threads")
        self._of_the_graph(outcomes, settings)
        outcomes.add_options(NAMES, (*settings.properties, "quantizer"), "kept", "the same property, or the graph")
        return outcomes.settle(device="compile_model names it, and the script reads EXECUTION_DEVICES back")

    def _of_the_graph(self, outcomes: KeyOutcomes, settings: OpenVinoSettings) -> None:
        outcomes.add("execution.tf32", "kept", "no plugin of OpenVINO computes in TF32")
        outcomes.add("execution.layout", "kept", "the plugin's choice")
        outcomes.add("execution.allow_cpu_ops", "kept", "the plugin compiles the whole model or refuses it")
        outcomes.add("execution.memory.pool", "kept", "OpenVINO's own")
        outcomes.add("execution.shapes.", "kept", "sizes and ranges of the graph that is written")
        outcomes.add_kernels(settings.keep_fp32, "the graph, or OpenVINO's own choice", "no such choice")

    def _repository(self, settings: OpenVinoSettings, graph: Any, folder: Path) -> NativeConfig:
        model = folder / self.job.name
        (model / "1").mkdir(parents=True)
        _save(graph, model / "1")
        passed = {name: value for name, value in settings.properties.items() if name in _TRITON}
        bf16 = {"HINT_BF16": "YES"} if settings.hint == "bf16" else {}
        config = ModelConfig(
            name=self.job.name,
            backend="openvino",
            inputs=self._tensors(self._info.inputs),
            outputs=self._tensors(self._info.outputs),
            parameters={**passed, **bf16, "TARGET_DEVICE": settings.device},
        )
        config.write(folder, self.job.digest)
        left = sorted(set(settings.properties) - set(_TRITON))
        return NativeConfig(
            outcomes=self._triton_outcomes(settings),
            entry=config.entry,
            command=TRITON_COMMAND,
            notes=(
                f"the version of OpenVINO is that of the server; the lock has {self.job.version}",
                f"the backend passes on no {', '.join(left)}" if left else "every property is passed on",
            ),
        )

    def _tensors(self, tensors: Iterable[TensorInfo]) -> tuple[TensorConfig, ...]:
        return tensor_configs(tensors, self.job.name, backend="openvino", without=_NOT_IN_TRITON, scalars=False)

    def _triton_outcomes(self, settings: OpenVinoSettings) -> tuple[KeyOutcome, ...]:
        outcomes = KeyOutcomes(self.job, "Triton's openvino backend")
        if settings.hint == "bf16":
            outcomes.add("execution.precision", "kept", "HINT_BF16")
        outcomes.add("execution.precision", "lost", f"the backend passes no {_HINT} on, and OpenVINO may take another")
        outcomes.add("execution.threads", "kept", "INFERENCE_NUM_THREADS")
        outcomes.add_determinism("weakened", "the backend chooses properties that are not passed on")
        self._of_the_graph(outcomes, settings)
        outcomes.add_options(NAMES, _TRITON, "kept", "the same parameter")
        outcomes.add_options(NAMES, ("quantizer",), "kept", "the graph")
        outcomes.add_options(NAMES, ("",), "lost", "the backend passes no such property on")
        return outcomes.settle(device="TARGET_DEVICE")


def _save(graph: Any, folder: Path) -> None:
    import openvino as ov

    try:
        ov.serialize(graph, str(folder / _GRAPH))
    except RuntimeError as error:
        raise EngineFailed(f"OpenVINO cannot write its graph: {error}", engine="openvino") from None


_TEMPLATE = '''\
#!/usr/bin/env python3
"""The model {name} on OpenVINO {version}, as the lock {digest} has it.

`open_model` gives the compiled model, `run` runs it. As a program: session.py INPUTS.npz OUTPUTS.npz
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino as ov

FOLDER = Path(__file__).resolve().parent
VERSION = {version!r}
DEVICE = {device!r}
PROPERTIES = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))[DEVICE]
INPUTS = {inputs!r}
OUTPUTS = {outputs!r}
READ_BACK = {checked}
{bits}

def open_model(more=None):
    if ov.__version__.partition("-")[0] != VERSION:
        raise RuntimeError(f"locked with OpenVINO {{VERSION}}, and {{ov.__version__}} is installed")
    core = ov.Core()
    properties = {{**PROPERTIES, **(more or {{}})}}
    compiled = core.compile_model(core.read_model(str(FOLDER / "model.xml")), DEVICE, properties)
    for name, value in READ_BACK.items():
        found = compiled.get_property(name)
        found = found.to_string() if hasattr(found, "to_string") else str(found)
        if found != value:
            raise RuntimeError(f"{{name}} {{value}} was asked for, and the compiled model has {{found}}")
    devices = [str(one) for one in compiled.get_property("EXECUTION_DEVICES")]
    if not all(one.partition(".")[0] == DEVICE.partition(".")[0] for one in devices):
        raise RuntimeError(f"{{DEVICE}} was asked for, and the model is compiled for {{devices}}")
    return compiled


{run}


{main}'''

_RUN = """\
def run(compiled, inputs):
    request = compiled.create_infer_request()
    request.infer([inputs[name] for name in INPUTS])
    return {name: request.get_output_tensor(index).data.copy() for index, name in enumerate(OUTPUTS)}"""

_RUN_BITS = """\
def tensor_of(name, array):
    if name not in BFLOAT16:
        return array
    bits = np.ascontiguousarray(array)
    if bits.dtype.itemsize != 2 or bits.dtype.kind not in "uV":
        raise TypeError(f"{name} is bfloat16, and taken as its bits in an array of uint16, not as {bits.dtype}")
    return ov.Tensor(bits.view(np.uint16), ov.Shape(bits.shape), ov.Type.bf16)


def array_of(name, tensor):
    array = tensor.data.copy()
    return array.view(np.uint16) if name in BFLOAT16 else array


def run(compiled, inputs):
    request = compiled.create_infer_request()
    request.infer([tensor_of(name, inputs[name]) for name in INPUTS])
    return {name: array_of(name, request.get_output_tensor(index)) for index, name in enumerate(OUTPUTS)}"""
