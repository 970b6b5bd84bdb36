# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NNCF, in a process of its own: it sends telemetry, draws progress bars on stdout, and changes `logging`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError
from xpuruntime.runtime.packages import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import onnx

    from xpuruntime.engines.quantisation.preparing import Prepared
    from xpuruntime.engines.quantisation.style import Style

__all__ = ["nncf_version", "quantise_nncf"]

#: What the process runs: `folder` holds the model and one file for each sample.
_WORK = """
import json, sys
from pathlib import Path
import numpy as np, onnx, nncf
folder = Path(sys.argv[1])
asked = json.loads((folder / "asked.json").read_text())
def load(path):
    with np.load(path) as arrays:
        return dict(arrays)
files = sorted(folder.glob("sample-*.npz"))
model = onnx.load(folder / "prepared.onnx")
ignored = nncf.IgnoredScope(names=asked["leave"]) if asked["leave"] else None
made = nncf.quantize(
    model, nncf.Dataset(files, load), subset_size=len(files), ignored_scope=ignored,
    model_type=nncf.ModelType.TRANSFORMER if asked["transformer"] else None,
    advanced_parameters=nncf.AdvancedQuantizationParameters(
        overflow_fix=nncf.OverflowFix.ENABLE if asked["reduced"] else nncf.OverflowFix.DISABLE,
        disable_bias_correction=True, smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1)),
)
(folder / "quantised.onnx").write_bytes(made.SerializeToString(deterministic=True))
"""


def nncf_version() -> str:
    """Return the installed version."""
    from importlib import metadata

    if find_spec("nncf") is None:
        raise EngineError(
            f"quantising with NNCF was asked for, and it is not installed. Fix: {install_command('nncf')}, or "
            "leave the option out: then ONNX Runtime's quantiser is used",
            engine="openvino",
        )
    return metadata.version("nncf")


def quantise_nncf(
    prepared: Prepared, samples: Iterable[dict[str, Any]], style: Style, leave: Sequence[str], folder: Path
) -> onnx.ModelProto:
    """Return the prepared graph quantised by NNCF. Slow: a process is started for it.

    Of the style it obeys `reduced`.
    """
    import json

    import numpy as np
    import onnx

    nncf_version()
    for index, sample in enumerate(samples):
        np.savez(folder / f"sample-{index:06}.npz", **sample)
    ops = {node.op_type for node in prepared.proto.graph.node}
    asked = {
        "leave": list(leave),
        "reduced": style.reduced,
        "transformer": "LayerNormalization" in ops and "Conv" not in ops,
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-c", _WORK, str(folder)],
        env={**os.environ, "NNCF_CI": "1"},  # no telemetry
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise EngineError(
            f"NNCF cannot quantise this model: {last[-1][:300] if last else f'exit status {done.returncode}'}. "
            "Fix: leave the option out, so that ONNX Runtime's quantiser is used",
            engine="openvino",
        )
    return onnx.load(str(folder / "quantised.onnx"))
