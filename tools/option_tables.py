# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the tables of ONNX Runtime's options into ``docs/engines/onnxruntime.md``, from the code that checks them.

``python tools/option_tables.py`` writes; ``--check`` only says whether the page is up to date (``make lint``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.options import CPU_OPTIONS, CUDA_OPTIONS, SESSION_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.onnxruntime.options import Option

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines" / "onnxruntime.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"


def values(option: Option) -> str:
    """Say which values an option takes."""
    if option.values is not None:
        return ", ".join(f"`{value}`" if value else "(empty)" for value in option.values)
    return f"{option.low} or more" if option.high >= 2**63 - 1 else f"{option.low} to {option.high}"


def table(options: Mapping[str, Option]) -> str:
    """Return one Markdown table of the options that a policy may give, and a line on those with a key of their own."""
    rows = [f"| `{n}` | {values(o)} | {o.meaning} |\n" for n, o in sorted(options.items()) if o.owned_by is None]
    owned = [f"`{n}` ({o.owned_by})" for n, o in sorted(options.items()) if o.owned_by is not None]
    text = "| option | values | meaning |\n|---|---|---|\n" + "".join(rows)
    return text + (f"\nSet elsewhere: {', '.join(owned)}.\n" if owned else "")


def page(text: str) -> str:
    """Return the page with fresh tables."""
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    parts = (("On `cuda:N`", CUDA_OPTIONS), ("On `cpu`", CPU_OPTIONS), ("Of the session, on both", SESSION_OPTIONS))
    tables = "".join(f"\n### {title}\n\n{table(options)}" for title, options in parts)
    return f"{head}{BEGIN}{tables}\n{END}{tail}"


def main() -> int:
    """Write or check the page."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = page(text)
    if fresh == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"error: {PAGE.name} does not match the code: run python tools/option_tables.py")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
