# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the tables of vendor options, ``docs/reference/options.md``, from the code that checks them.

``python tools/option_tables.py`` writes; ``--check`` only says whether the page is up to date (``make lint``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.options import (
    COREML_OPTIONS,
    CPU_OPTIONS,
    CUDA_OPTIONS,
    DML_OPTIONS,
    DML_SESSION_OPTIONS,
    MIGRAPHX_OPTIONS,
    SESSION_OPTIONS,
)
from xpuruntime.engines.openvino.options import CPU_OPTIONS as OPENVINO_CPU_OPTIONS
from xpuruntime.engines.openvino.options import GPU_OPTIONS as OPENVINO_GPU_OPTIONS
from xpuruntime.engines.openvino.options import GRAPH_OPTIONS as OPENVINO_GRAPH_OPTIONS
from xpuruntime.engines.openvino.options import NPU_OPTIONS as OPENVINO_NPU_OPTIONS
from xpuruntime.engines.qnn.options import GRAPH_OPTIONS as QNN_GRAPH_OPTIONS
from xpuruntime.engines.qnn.options import OPTIONS as QNN_OPTIONS
from xpuruntime.engines.qnn.options import TARGET_OPTIONS as QNN_TARGET_OPTIONS
from xpuruntime.engines.tensorrt.options import BUILD_OPTIONS, RUN_OPTIONS, TEXT_OPTIONS
from xpuruntime.engines.torch.options import OPTIONS as TORCH_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.options import Option

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"
INTRO = """\
# Vendor options

<!-- Written by tools/option_tables.py from the code that checks the options. Do not edit. -->

`execution.provider_options` of a policy takes these, under the name of the engine. A name or a value that is not here
is refused. What an option does in a session is on the pages of the [engines](../engines/index.md).
"""


def values(option: Option) -> str:
    """Say which values an option takes."""
    if option.values is not None:
        return ", ".join(f"`{value}`" if value else "(empty)" for value in option.values)
    if option.text:
        return "text"
    return f"{option.low} or more" if option.high >= 2**63 - 1 else f"{option.low} to {option.high}"


def table(options: Mapping[str, Option]) -> str:
    """Return one Markdown table of the options that a policy may give, and a line on those with a key of their own."""
    rows = [f"| `{n}` | {values(o)} | {o.meaning} |\n" for n, o in sorted(options.items()) if o.owned_by is None]
    owned = [f"`{n}` ({o.owned_by})" for n, o in sorted(options.items()) if o.owned_by is not None]
    text = "| option | values | meaning |\n|---|---|---|\n" + "".join(rows)
    return text + (f"\nSet elsewhere: {', '.join(owned)}.\n" if owned else "")


#: Page of an engine to the titles of its tables, and the options in each.
PARTS: dict[str, tuple[tuple[str, Mapping[str, Option]], ...]] = {
    "onnxruntime.md": (
        ("On `cuda:N`", CUDA_OPTIONS),
        ("On `cpu`", CPU_OPTIONS),
        ("On `rocm:N`", MIGRAPHX_OPTIONS),
        ("On `metal`", COREML_OPTIONS),
        ("On `dml:N`", DML_OPTIONS),
        ("Of the session, on `dml:N`", DML_SESSION_OPTIONS),
        ("Of the session, on all", SESSION_OPTIONS),
    ),
    "openvino.md": (
        ("On `cpu`", OPENVINO_CPU_OPTIONS),
        ("On `gpu`", OPENVINO_GPU_OPTIONS),
        ("On `npu`", OPENVINO_NPU_OPTIONS),
        ("Of the graph, on all", OPENVINO_GRAPH_OPTIONS),
    ),
    "qnn.md": (
        ("Of the chip", QNN_TARGET_OPTIONS),
        ("Of the graph", QNN_GRAPH_OPTIONS),
        ("Of the provider", QNN_OPTIONS),
    ),
    "tensorrt.md": (
        ("Of the build", BUILD_OPTIONS),
        ("Of the run", RUN_OPTIONS),
        ("Targets and caches", TEXT_OPTIONS),
    ),
    "torch.md": (("Of the session", TORCH_OPTIONS),),
}


#: Page of an engine to its title.
TITLES = {
    "onnxruntime.md": "ONNX Runtime",
    "openvino.md": "OpenVINO",
    "qnn.md": "QNN",
    "tensorrt.md": "TensorRT",
    "torch.md": "PyTorch",
}


def page() -> str:
    """Return the page."""
    sections = [INTRO]
    for name, parts in PARTS.items():
        sections.append(f"\n## {TITLES[name]}\n\nHow they are used: [{TITLES[name]}](../engines/{name}#options).\n")
        sections += [
            f"\n### {TITLES[name]}: {title[0].lower()}{title[1:]}\n\n{table(options)}" for title, options in parts
        ]
    return "".join(sections)


def main() -> int:
    """Write or check the page."""
    fresh = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"error: {PAGE.name} does not match the code: run python tools/option_tables.py")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
