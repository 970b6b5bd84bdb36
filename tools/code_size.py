# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Print the size of the Python sources by package, as the table of ``docs/design/packages.md`` has it.

``python tools/code_size.py [EARLIER_TREE]``: a checkout of an earlier revision is compared with this one. Code is lines
that are not blank and hold no comment or docstring alone; imports are code.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("src/python/xpuruntime")
#: What was added after the revision that the page compares with, by subject: files and folders of nothing else.
ADDED = {
    "kernels of other packages": (
        "pytorch/providers/", "pytorch/adapters/", "pytorch/attention/advised.py", "pytorch/coverage/class_code.py",
        "pytorch/coverage/model_operations.py", "policies/advisories.py", "ops/torch_kernels.py",
    ),
    "language models that generate": (
        "generation/", "pytorch/generation/", "pytorch/weights.py", "pytorch/call_scope/generation_",
        "engines/generation.py", "engines/onnxruntime_genai/", "engines/openvino_genai/", "engines/torch/decoder_",
        "engines/torch/observing/decoder_rows.py", "inference/generation.py", "inference/comparing_generation.py",
        "cli/generating.py",
    ),
    "integrations, index, history, logs": (
        "integrations/", "locks/folder_index.py", "locks/history.py", "runtime/telemetry.py",
    ),
    "many GPUs": ("pytorch/rank_agreement.py", "pytorch/step_tuning/ranks.py"),
}  # fmt: skip
#: Features and the files that would go with each; the page says with which of them the tree would reach its limits.
FEATURES = {
    "server": ("serving/",),
    "capture, step tuning, memory pools and parity in PyTorch": (
        "pytorch/capture/", "pytorch/step_tuning/", "pytorch/allocator/", "pytorch/training_lock.py",
        "pytorch/layer_parity/",
    ),
    "tuning of sessions": ("tuning/",),
    "TensorRT": ("engines/tensorrt/",),
    "OpenVINO": ("engines/openvino/",),
    "QNN": ("engines/qnn/",),
    "rewriting of patterns for ONNX Runtime": ("engines/onnxruntime/rewriting/",),
    "quantization": ("engines/quantization/",),
    "conformance suites for users": ("testing/", "serving/conformance/"),
    "collectives": ("distributed/",),
    "export to other servers and tools": ("engines/native_export/", "locks/export/"),
    "upgrades and bisection of versions": (
        "locks/bisect_versions.py", "locks/environments.py", "locks/worker_side/", "locks/relock.py",
    ),
    "determinism grades": ("locks/determinism/",),
}  # fmt: skip
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    """Lines and lines of code of one file."""

    lines: int
    code: int


def measure(path: Path) -> Size:
    """Return the size of one file."""
    text = path.read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return Size(text.count("\n"), len(code))


def sizes(folder: Path) -> dict[str, Size]:
    """Return the size of every Python file in a folder, by its path in it."""
    return {path.relative_to(folder).as_posix(): measure(path) for path in sorted(folder.rglob("*.py"))}


def subject_of(path: str) -> str | None:
    """Return the added subject that a file belongs to alone."""
    return next((subject for subject, parts in ADDED.items() if path.startswith(parts)), None)


def print_subjects(head: str, subjects: dict[str, tuple[str, ...]], files: dict[str, Size]) -> None:
    """Print a table with the size of each subject."""
    print(f"| {head} | lines / code / files |\n|---|---:|")
    for subject, parts in subjects.items():
        print("|", subject, "|", cell({path: size for path, size in files.items() if path.startswith(parts)}), "|")


def cell(files: dict[str, Size]) -> str:
    """Return lines, lines of code and files, as one cell of a table."""
    return f"{sum(s.lines for s in files.values()):,} / {sum(s.code for s in files.values()):,} / {len(files)}"


def in_package(files: dict[str, Size], name: str) -> dict[str, Size]:
    """Return the files of one package; of the top level for an empty name."""
    return {path: size for path, size in files.items() if path.rpartition("/")[0].partition("/")[0] == name}


def main() -> None:
    """Print the tables."""
    now = sizes(ROOT / SOURCE)
    for subject, parts in (ADDED | FEATURES).items():
        if gone := [part for part in parts if not any(path.startswith(part) for path in now)]:
            sys.exit(f"{subject}: no file begins with {', '.join(gone)}. Fix: correct the file names in {__file__}")
    trees = {"now": now, "without the additions": {path: size for path, size in now.items() if not subject_of(path)}}
    if len(sys.argv) > 1:
        trees = {"before": sizes(Path(sys.argv[1]) / SOURCE), **trees}
    tests = {"tests before": Path(sys.argv[1])} if len(sys.argv) > 1 else {}
    units = {head: sizes(tree / "tests" / "unit") for head, tree in {**tests, "tests now": ROOT}.items()}
    columns = {**trees, **units}
    print("| package |", " | ".join(columns), "|\n|---|" + "---:|" * len(columns))
    for name in sorted({path.rpartition("/")[0].partition("/")[0] for files in trees.values() for path in files}):
        cells = [cell(in_package(files, name)) for files in columns.values()]
        print("|", f"`{name}`" if name else "top level", "|", " | ".join(cells), "|")
    print("| all |", " | ".join(cell(files) for files in columns.values()), "|\n")
    medians = {tree: statistics.median(size.lines for size in files.values()) for tree, files in trees.items()}
    print("Median lines of a file:", ", ".join(f"{median:g} {tree}" for tree, median in medians.items()), end="\n\n")
    print_subjects("added", ADDED, now)
    print()
    print_subjects("feature", FEATURES, trees["without the additions"])


if __name__ == "__main__":
    main()
