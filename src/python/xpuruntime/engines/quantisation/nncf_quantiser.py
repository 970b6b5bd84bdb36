# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NNCF, in a process of its own: it sends telemetry, draws progress bars on stdout, and changes `logging`."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError
from xpuruntime.runtime.packages import install_command
from xpuruntime.runtime.worker import Worker, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import onnx

    from xpuruntime.engines.quantisation.preparing import Prepared
    from xpuruntime.engines.quantisation.style import Style

__all__ = ["nncf_version", "quantise_nncf"]


def nncf_version() -> str:
    """Return the installed version."""
    from importlib import metadata

    if find_spec("nncf") is None:
        raise EngineError(
            f"quantizing with NNCF was asked for, and it is not installed. Fix: {install_command('nncf')}, or "
            "leave the option out: then ONNX Runtime's quantizer is used",
            engine="openvino",
        )
    return metadata.version("nncf")


def quantise_nncf(
    prepared: Prepared, samples: Iterable[dict[str, Any]], style: Style, leave: Sequence[str], folder: Path
) -> onnx.ModelProto:
    """Return the prepared graph quantized by NNCF. Slow: a process is started for it.

    Of the style it obeys `reduced`.
    """
    import numpy as np
    import onnx

    nncf_version()
    for index, sample in enumerate(samples):
        np.savez(folder / f"sample-{index:06}.npz", **sample)
    ops = {node.op_type for node in prepared.proto.graph.node}
    try:
        with Worker(environment={"NNCF_CI": "1"}, timeout=math.inf) as worker:  # no telemetry
            worker.call(
                f"{__name__}:quantise_folder", folder=str(folder), leave=list(leave), reduced=style.reduced,
                transformer="LayerNormalization" in ops and "Conv" not in ops,
            )  # fmt: skip
    except WorkerFailure as failure:
        raise EngineError(
            f"NNCF cannot quantize this model: {(failure.error or failure.reason)[:300]}. "
            "Fix: leave the option out, so that ONNX Runtime's quantizer is used",
            engine="openvino",
        ) from failure
    return onnx.load(str(folder / "quantised.onnx"))


def quantise_folder(folder: str, leave: list[str], *, reduced: bool, transformer: bool) -> None:
    """Quantize the model in a folder, which has a file for each sample: what the process does."""
    import nncf
    import numpy as np
    import onnx

    room = Path(folder)

    def load(path: Path) -> dict[str, Any]:
        with np.load(path) as arrays:
            return dict(arrays)

    files = sorted(room.glob("sample-*.npz"))
    quantised = nncf.quantize(
        onnx.load(room / "prepared.onnx"),
        nncf.Dataset(files, load),
        subset_size=len(files),
        ignored_scope=nncf.IgnoredScope(names=leave) if leave else None,
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=nncf.OverflowFix.ENABLE if reduced else nncf.OverflowFix.DISABLE,
            disable_bias_correction=True,
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1),
        ),
    )
    (room / "quantised.onnx").write_bytes(quantised.SerializeToString(deterministic=True))
