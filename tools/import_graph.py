# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Print the test files that reach a module of xpuruntime most directly, by their import statements.

``python tools/import_graph.py src/python/xpuruntime/errors.py`` names the tests that import the module, or import a
public name of it from a package. Where there is none, these are the tests of the modules that import it.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "python" / "xpuruntime"
TESTS = ROOT / "tests"


def module_name(path: Path, top: Path) -> str:
    """Return the dotted name of a file of the package, whose parent folder is ``top``."""
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of the syntax tree of a file; a walk takes longer than the parser."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def dotted_name(node: ast.AST) -> str:
    """Return a name with its attributes, such as ``ast.walk``, and an empty text for every other expression."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(attributes)]) if isinstance(node, ast.Name) else ""


@functools.cache
def runtime_imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, wherever in it, except those for type checkers only."""
    typing_only = {
        id(node)
        for block in syntax_nodes(path)
        if isinstance(block, ast.If) and dotted_name(block.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for child in block.body
        for node in ast.walk(child)
    }
    return [
        node
        for node in syntax_nodes(path)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in typing_only
    ]


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the names of those of the modules that a file imports, wherever in the file."""
    names = set()
    for node in runtime_imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.level == 0 and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in inner}
    return names & modules.keys()


def module_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return for each module of the package the modules of it that it imports, wherever in the file."""
    modules = {module_name(path, source.parent): path for path in sorted(source.rglob("*.py"))}
    return {name: imported_modules(path, modules) - {name} for name, path in modules.items()}


def public_names(modules: dict[str, Path]) -> dict[str, str]:
    """Return the modules that define the public names of packages, such as ``xpuruntime.lock``."""
    origins = {
        f"{package}.{alias.asname or alias.name}": (node.module, alias.name)
        for package, path in modules.items()
        if path.name == "__init__.py"
        for node in syntax_nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in modules
        for alias in node.names
        if f"{package}.{alias.asname or alias.name}" not in modules
    }
    resolved = {}
    for name, (module, inner) in origins.items():
        while f"{module}.{inner}" in origins:
            module, inner = origins[f"{module}.{inner}"]
        resolved[name] = module
    return resolved


@functools.cache
def used_names(path: Path) -> set[str]:
    """Return the dotted names of xpuruntime that a file imports, and those that it looks up in an imported module."""
    names: set[str] = set()
    spelled: dict[str, str] = {}
    for node in syntax_nodes(path):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "xpuruntime":
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            spelled |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.partition(".")[0] == "xpuruntime"]
            names |= {alias.name for alias in ours}
            spelled |= {alias.asname or "xpuruntime": alias.name if alias.asname else "xpuruntime" for alias in ours}
    for node in syntax_nodes(path):
        if isinstance(node, ast.Attribute):
            head, dot, rest = dotted_name(node).partition(".")
            names |= {f"{spelled[head]}{dot}{rest}"} if head in spelled else set()
    return names


def nearest_tests(files: list[Path]) -> list[Path]:
    """Return the test files that reach each source file in the fewest imports, helpers of tests not counted."""
    modules = {module_name(path, SOURCE.parent): path for path in sorted(SOURCE.rglob("*.py"))}
    origins = public_names(modules)
    used = {path: used_names(path) for path in sorted(TESTS.rglob("*.py")) if "gpu" not in path.parts}
    helpers = {path.stem: path for path in used if not path.name.startswith(("test_", "conftest"))}
    reached = {path: {origins.get(name, name) for name in names} for path, names in used.items()}
    for path in used:
        for helper in imported_modules(path, helpers):
            reached[path] |= reached[helpers[helper]]
    graph = module_graph()
    tests: set[Path] = set()
    for file in files:
        seen = level = {module_name(file.resolve(), SOURCE.parent)}
        nearest: set[Path] = set()
        while level and not nearest:
            nearest = {path for path, names in reached.items() if path.name.startswith("test_") and names & level}
            level = {name for name, imported in graph.items() if imported & level} - seen
            seen = seen | level
        tests |= nearest
    return sorted(tests)


def main() -> int:
    """Print the test files of the source files; return 1 when there are none."""
    files = [Path(name) for name in sys.argv[1:]]
    if not files or not all(file.is_file() and file.resolve().is_relative_to(SOURCE) for file in files):
        print(f"not a file of {SOURCE.relative_to(ROOT)}. Fix: python {Path(__file__).relative_to(ROOT)} "
              f"{SOURCE.relative_to(ROOT)}/errors.py", file=sys.stderr)  # fmt: skip
        return 2
    tests = nearest_tests(files)
    print(*(path.relative_to(ROOT) for path in tests), sep="\n")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
