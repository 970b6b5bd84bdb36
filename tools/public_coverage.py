# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Print how much of the public functions and methods the tests ran; fail where it is less than the floor.

``XPURUNTIME_PUBLIC_COVERAGE=FOLDER make test`` has coverage.py record quick tests, without the processes that they
start: before Python 3.12 one test of four, as recording makes a test half as long again.
``python tools/public_coverage.py FOLDER`` reads what it wrote.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from coverage import Coverage

SOURCE = Path(__file__).resolve().parent.parent / "src" / "python" / "xpuruntime"
#: Packages with a public surface of their own.
PACKAGES = (
    "xpuruntime",
    "xpuruntime.ops",
    "xpuruntime.pytorch",
    "xpuruntime.pytorch.ops",
    "xpuruntime.distributed",
    "xpuruntime.serving",
)
#: Percent of the functions and methods that were called, and of the lines in them that ran; raise them with the tests.
FLOOR = (64, 52)


class Share(NamedTuple):
    """Lines of a function's body, and those that ran."""

    name: str
    lines: set[int]
    ran: set[int]


def recorded(test: str) -> bool:
    """Whether a test is one of those that are recorded, by its name: the figures are a lower bound."""
    return sys.version_info >= (3, 12) or zlib.crc32(test.encode()) % 4 == 0


def recorder(folder: str | Path) -> Coverage:
    """Return what records which lines of the package run, into files of a folder."""
    from coverage import Coverage

    coverage = Coverage(str(Path(folder) / "data"), data_suffix=True, config_file=False, include=[f"{SOURCE}/*"])
    coverage.set_option("run:disable_warnings", ["trace-changed", "no-data-collected"])
    if sys.version_info >= (3, 12):
        coverage.set_option("run:core", "sysmon")  # hardly any cost
    return coverage


def public_functions() -> Iterator[tuple[str, CodeType]]:
    """Yield the dotted names and the code of public functions, and of methods of public classes, each once."""
    seen = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            members = {f"{name}.{key}": value for key, value in vars(thing).items()} if inspect.isclass(thing) else {}
            for key, value in {name: thing, **members}.items():
                code = code_of(value)
                own = code is not None and code.co_filename.startswith(str(SOURCE))
                if own and code not in seen and not key.rpartition(".")[2].startswith("_"):
                    seen.add(code)
                    yield f"{package}.{key}", code


def code_of(thing: Any) -> CodeType | None:
    """Return the code of a function, or of what a property or a decorator wraps; else nothing."""
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    elif isinstance(thing, property):
        thing = thing.fget
    elif isinstance(thing, functools.cached_property):
        thing = thing.func
    thing = inspect.unwrap(thing) if callable(thing) else None
    return thing.__code__ if isinstance(thing, FunctionType) else None


@functools.cache
def bodies(path: str) -> dict[int, range]:
    """Return the lines of each function's body, by the first line of the function or of its decorators."""
    return {
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]): range(
            node.body[0].lineno, (node.end_lineno or node.lineno) + 1
        )
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def shares(coverage: Coverage) -> list[Share]:
    """Return what ran of each public function that has more than a docstring."""
    analysis = functools.cache(coverage.analysis2)
    found = []
    for name, code in public_functions():
        _, statements, _, missing, _ = analysis(code.co_filename)
        lines = set(statements) & set(bodies(code.co_filename)[code.co_firstlineno])
        if lines:
            found.append(Share(name, lines, lines - set(missing)))
    return found


def main(folder: str) -> int:
    """Print the figure and what was not called."""
    coverage = recorder(folder)
    coverage.combine([folder], keep=True)
    found = shares(coverage)
    called = [share for share in found if share.ran]
    assert found, f"no public function of {SOURCE} is in the files that this Python imports"
    lines, ran = (sum(len(getattr(share, part)) for share in found) for part in ("lines", "ran"))
    figures = 100 * len(called) / len(found), 100 * ran / lines
    print(f"public functions and methods that the tests called: {len(called)} of {len(found)}, {figures[0]:.1f} %")
    print(f"their lines that ran: {ran:,} of {lines:,}, {figures[1]:.1f} %")
    print("not called:", *(share.name for share in found if not share.ran), sep="\n  ")
    low = any(figure < floor for figure, floor in zip(figures, FLOOR, strict=True))
    if low:
        print(f"FAILED: the floors are {FLOOR[0]} % and {FLOOR[1]} %")
    return int(low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
