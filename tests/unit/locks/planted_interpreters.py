# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interpreters of other environments: this one, with code that runs as it starts, and with variables."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def interpreter(folder: Path, *, customize: str = "", variables: str = "") -> str:
    """Return a side whose interpreter sets variables and runs Python code as it starts."""
    folder.mkdir()
    if customize:
        (folder / "sitecustomize.py").write_text(textwrap.dedent(customize))
        variables += f'export PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
    script = folder / "python"
    script.write_text(f'#!/bin/sh\n{variables}exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return f"py:{script}"


#: Every session of ONNX Runtime is opened without optimizations of the graph: another engine's default.
UNOPTIMISED = """
    import onnxruntime as ort

    own = ort.InferenceSession.__init__

    def opened(self, path, sess_options=None, *args, **kwargs):
        sess_options = sess_options or ort.SessionOptions()
        sess_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        own(self, path, sess_options, *args, **kwargs)

    ort.InferenceSession.__init__ = opened
"""
#: The package states another version.
ANOTHER_VERSION = """
    import importlib.metadata as metadata
    import pathlib

    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        planted = pathlib.Path(__file__).parent / (name.replace("-", "_") + "-9.9.9.dist-info")
        planted.mkdir(exist_ok=True)
        (planted / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 9.9.9\\n")
"""
