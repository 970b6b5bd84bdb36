# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Native configuration of PyTorch: a script that loads the program and sets the switches of the session."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from xpuruntime.engines.base import Observed
from xpuruntime.engines.native_export.native_config import (
    KeyOutcome,
    KeyOutcomes,
    NativeConfig,
    NativeExporter,
    script_main,
)
from xpuruntime.engines.torch.controls import PYTORCH_CHOICE
from xpuruntime.engines.torch.names import NAMES, TorchSettings, multiplies_integers
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.evidence.records import Unit

_PROGRAM = "model.pt2"
_OPTIONS = ("mode", "compile_mode", "fullgraph", "dynamic")


class TorchExporter(NativeExporter):
    """Exports sessions of exported programs."""

    targets: ClassVar[dict[str, str]] = {"torch": "a Python script that loads and runs the program with PyTorch"}
    proved: ClassVar[tuple[str, ...]] = ("torch",)
    worker: ClassVar[Path] = Path(__file__).with_name("native_worker.py")

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the script, with a copy of the program."""
        del target
        info, settings = self.job.request.model, self.settings_as(TorchSettings)
        source: Any = info.source
        if not source.plain:
            raise UnsupportedOperationError(
                f"{info.path} takes arguments by name, or constants. Fix: export it again with tensors by position",
                engine="torch",
            )
        for input_ in (*info.inputs, *info.outputs):
            if input_.dtype.startswith("float8"):
                raise UnsupportedOperationError(
                    f"{input_.name!r} of {info.path} has the type {input_.dtype}, which NumPy lacks, so that no script "
                    "takes or gives arrays of it. Fix: convert it inside of the module, and export that",
                    engine="torch",
                )
        shutil.copyfile(info.file, folder / _PROGRAM)
        taken, output_bits = self.bits()
        text = _TEMPLATE.format(
            main=script_main("open_model"),
            name=self.job.name,
            digest=self.job.digest,
            version=self.job.version,
            device=self.job.request.device,
            inputs=[input_.name for input_ in info.inputs],
            outputs=[output.name for output in info.outputs],
            bits=_bits_text(taken, output_bits),
            run=_RUN_BITS if taken or output_bits else _RUN,
            deterministic=settings.deterministic,
            threads=settings.threads,
            tf32=settings.tf32,
            compile=_compile_arguments(settings) if settings.mode == "compile" else None,
        )
        notes = []
        if settings.convert is not None:
            notes.append(f"the program is run in its own types: a session converts it to {settings.convert}")
        return self.write_script(folder, text, self._outcomes(settings), notes)

    def device_word(self) -> str:
        """Return the device of the outputs."""
        return self.job.request.device

    def observed(self, feeds: Mapping[str, Any], value: dict[str, Any]) -> Observed | None:
        """Return the operators that ran one by one, where none was compiled; see `NativeExporter.observed`."""
        del feeds
        ran = value["operators"]
        return None if ran is None else Observed(units=self._units(ran))

    def _units(self, ran: dict[str, list[str]]) -> tuple[Unit, ...]:
        """Return the units of what the worker saw: of each operator of the graph the types of its results."""
        import torch

        from xpuruntime.engines.torch.names import torch_precision

        source: Any = self.job.request.model.source
        seen = {source.names[name]: types for name, types in ran.items() if name in source.names}
        units = []
        for node in self.job.request.model.nodes:
            kinds = {torch_precision(getattr(torch, dtype)) for dtype in seen.get(node.name, ())}
            precision = "->".join(sorted(kinds)) or None
            units.append(
                Unit(
                    id=node.name,
                    op=node.op,
                    relation="exact",
                    source_nodes=(node.name,),
                    outputs=node.outputs,
                    engine="torch",
                    device=self.job.request.device,
                    precision_run="int8" if multiplies_integers(node.op) else precision,
                )
            )
        return tuple(units)

    def _outcomes(self, settings: TorchSettings) -> tuple[KeyOutcome, ...]:
        outcomes = KeyOutcomes(self.job, "PyTorch")
        if settings.convert is not None:
            outcomes.add("execution.precision", "lost", f"the program is not converted to {settings.convert}")
        outcomes.add("execution.precision", "kept", "types of the program, and the switches of TF32")
        outcomes.add("execution.tf32", "kept", "allow_tf32 of matmul and cuDNN")
        outcomes.add("execution.threads", "kept", "torch.set_num_threads")
        outcomes.add_determinism("kept", "torch.use_deterministic_algorithms, and no cuDNN benchmark")
        outcomes.add("execution.cuda_graph", "lost", "no graph is captured")
        outcomes.add("execution.shapes.", "weakened", "the program checks its own sizes, and no range of the policy")
        outcomes.add_kernels((), "PyTorch's own choice", "PyTorch chooses kernels", choice=PYTORCH_CHOICE)
        outcomes.add_options(NAMES, _OPTIONS, "kept", "torch.compile, or not")
        return outcomes.settle(device="the program is moved there")


def _bits_text(taken: Sequence[str], output_names: Sequence[str]) -> str:
    if not taken and not output_names:
        return ""
    return f"BFLOAT16 = {list(taken)!r}  # as bits, in arrays of uint16; so are outputs of that type\n"


def _compile_arguments(settings: TorchSettings) -> dict[str, Any]:
    compile_options = settings.compile
    arguments: dict[str, Any] = {"fullgraph": compile_options.get("fullgraph") == "1"}
    if "compile_mode" in compile_options:
        arguments["mode"] = compile_options["compile_mode"]
    if "dynamic" in compile_options:
        arguments["dynamic"] = compile_options["dynamic"] == "1"
    return arguments


_TEMPLATE = '''\
#!/usr/bin/env python3
"""The program {name} on PyTorch {version}, as the lock {digest} has it.

`open_model` gives the module, `run` runs it. As a program: session.py INPUTS.npz OUTPUTS.npz
"""

import os
import sys
from pathlib import Path

DETERMINISTIC = {deterministic}
if DETERMINISTIC:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts

import numpy as np
import torch

MODEL = Path(__file__).resolve().parent / "model.pt2"
VERSION = {version!r}
DEVICE = {device!r}
INPUTS = {inputs!r}
OUTPUTS = {outputs!r}
THREADS = {threads}
TF32 = {tf32}
COMPILE = {compile!r}
{bits}

def open_model(compiled=True):
    if torch.__version__ != VERSION:
        raise RuntimeError(f"locked with PyTorch {{VERSION}}, and {{torch.__version__}} is installed")
    if THREADS is not None:
        torch.set_num_threads(THREADS)
    if TF32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = TF32
        torch.backends.cudnn.allow_tf32 = TF32
    if DETERMINISTIC:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    program = torch.export.load(str(MODEL))
    if DEVICE != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, DEVICE)
    module = program.module()
    return torch.compile(module, **COMPILE) if COMPILE is not None and compiled else module


{run}


{main}'''

_RESULTS = """\
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(module(*tensors))
    results = [one for one in results if one is not None]
    for one in results:
        if one.device != torch.device(DEVICE):
            raise RuntimeError(f"a result is on {one.device}, not on {DEVICE}")
"""

_RUN = (
    """\
def run(module, inputs):
    tensors = [torch.from_numpy(np.ascontiguousarray(inputs[name])).to(DEVICE) for name in INPUTS]
"""
    + _RESULTS
    + """\
    return {name: one.cpu().numpy() for name, one in zip(OUTPUTS, results)}"""
)

_RUN_BITS = (
    """\
def tensor_of(name, array):
    bits = np.ascontiguousarray(array)
    if name not in BFLOAT16:
        return torch.from_numpy(bits)
    if bits.dtype.itemsize != 2 or bits.dtype.kind not in "uV":
        raise TypeError(f"{name} is bfloat16, and taken as its bits in an array of uint16, not as {bits.dtype}")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def array_of(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def run(module, inputs):
    tensors = [tensor_of(name, inputs[name]).to(DEVICE) for name in INPUTS]
"""
    + _RESULTS
    + """\
    return {name: array_of(one.cpu()) for name, one in zip(OUTPUTS, results)}"""
)
