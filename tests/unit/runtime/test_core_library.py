# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The core as a file: what it links, how large it is, and that its stub tells the truth."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

import xpuruntime
from xpuruntime import _core

LIBRARY = Path(_core.__file__)
PACKAGE = Path(xpuruntime.__file__).parent
#: Each describes a part of `_core`; classes with `Protocol` or `TypedDict` describe types only.
STUBS = [PACKAGE / "_core.pyi", *sorted(PACKAGE.glob("_core_stubs/*.pyi"))]


def test_it_links_no_vendor_library():
    if shutil.which("ldd") is None:
        pytest.skip("ldd is not installed")
    linked = subprocess.run(["ldd", LIBRARY], check=True, capture_output=True, text=True).stdout.lower()
    assert "libc.so" in linked
    for vendor in ("cuda", "cudnn", "cublas", "nvinfer", "openvino", "onnxruntime", "nccl", "nvrtc"):
        assert vendor not in linked


def test_it_is_small():
    assert LIBRARY.stat().st_size < 60 * 2**20


def test_it_exports_only_its_entry_point():
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert "PyInit__core" in names
    assert not {name for name in names if name.startswith("cuda")}


def test_the_stub_names_what_there_is():
    def public(names):
        return {name for name in names if not name.startswith("_")}

    def is_type_only(node):
        return any(ast.unparse(base) in {"Protocol", "TypedDict"} for base in node.bases)

    body = [node for stub in STUBS for node in ast.parse(stub.read_text(encoding="utf-8")).body]
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef) and not is_type_only(node)}
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    constants = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and node.value is None}
    assert public(dir(_core)) == public(classes) | functions | public(constants)
    for name, node in classes.items():
        members = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        assert public(vars(getattr(_core, name))) == public(members), name
