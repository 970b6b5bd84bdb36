# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Find the fenced blocks of a Markdown page.

Every Python block and every ``xrt`` line of a console block is run. Comments just before a block say otherwise:
``<!-- needs: cuda -->`` or ``<!-- needs: torch, openvino -->`` (run where all of these are: see `NEEDS`),
``<!-- exit: 1 -->`` (of a console block) or ``<!-- not run: reason -->``.

A ``text`` block right below is what was printed, as far as it is shown: ``...`` stands for more. Figures may differ,
but not on a line of whole numbers alone, such as predictions and shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
MARKS = re.compile(r"(?:<!-- [^>]*? -->\s*)+\Z")
MARK = re.compile(r"<!-- (needs|exit|not run): ([^>]*?) -->")


def has_cuda() -> bool:
    from xpuruntime.runtime.snapshot import machine_snapshot

    return bool(machine_snapshot().cuda)


def has_nccl() -> bool:
    from xpuruntime.runtime.libraries.loading import find_library

    return find_spec("nccl") is not None and bool(find_library("nccl", 2))


def has_module(name: str) -> Callable[[], bool]:
    return lambda: find_spec(name) is not None


#: What a block may need, whether it is here, and how to get it.
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "cuda": (has_cuda, "needs a CUDA device"),
    "openvino": (has_module("openvino"), "needs openvino: make engines"),
    "genai": (has_module("onnxruntime_genai"), "needs onnxruntime-genai: make engines"),
    "qnn": (has_module("onnxruntime_qnn"), "needs onnxruntime-qnn: make engines"),
    "tensorrt-rtx": (has_module("tensorrt_rtx"), "needs tensorrt_rtx: make engines"),
    "nccl": (has_nccl, "needs NCCL: pip install nccl4py nvidia-nccl-cu13"),
    "torch": (has_module("torch"), "needs torch"),
    "transformers": (has_module("transformers"), "needs transformers: pip install transformers"),
    "lightning": (has_module("lightning"), "needs lightning: pip install lightning"),
    "accelerate": (has_module("accelerate"), "needs accelerate: pip install accelerate"),
    "torchao": (has_module("torchao"), "needs torchao: pip install 'xpuruntime[torchao]'"),
    "serve": (has_module("uvicorn"), "needs uvicorn: pip install 'xpuruntime[serve]'"),
    "opentelemetry": (has_module("opentelemetry.sdk"), "needs opentelemetry-sdk: pip install opentelemetry-sdk"),
    "onnxscript": (has_module("onnxscript"), "needs onnxscript, which comes with xpuruntime[torch]"),
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    body: str
    marks: dict[str, str] = field(default_factory=dict)
    shown: str = ""

    def missing(self) -> list[str]:
        """Say what this block needs and this machine has not."""
        words = [word.strip() for word in self.marks.get("needs", "").split(",") if word.strip()]
        return [NEEDS[word][1] for word in words if not NEEDS[word][0]()]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    results: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        before = MARKS.search(text[: match.start()])
        marks = dict(MARK.findall(before[0])) if before else {}
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 2
        if match["language"] == "text" and results and not text[end : match.start()].strip():
            results[-1] = replace(results[-1], shown=body)
        results.append(Block(page, line, match["language"], body, marks))
        end = match.end()
    return results


_WHOLE_NUMBERS = re.compile(r"[\[(]?\d[\d, ]*[\])]?")


def shape(text: str) -> str:
    """Return a text without figures, units of time, bars, rules and runs of blanks, which differ from run to run."""
    text = re.sub(r"[─━#]+", " ", text)
    text = re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?%?", "N", text)
    return re.sub(r"\s+", " ", re.sub(r"\bN (?:[nuµm]s|s)\b", "N s", text))


def not_printed(shown: str, printed: str) -> list[str]:
    """Return the lines of an excerpt that are not in what was printed."""
    found, lines = shape(printed), {line.strip() for line in printed.splitlines()}
    return [
        line
        for line in shown.splitlines()
        if (_WHOLE_NUMBERS.fullmatch(line.strip()) and line.strip() not in lines)
        or any(piece not in found for part in line.split("...") if (piece := shape(part).strip()))
    ]


def pages() -> list[Path]:
    """Return every page that users read."""
    named = [ROOT / name for name in ("README.md", "README.ko.md", "CONTRIBUTING.md", "examples/README.md")]
    return [*named, *sorted((ROOT / "docs").rglob("*.md"))]
