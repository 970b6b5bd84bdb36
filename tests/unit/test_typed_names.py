# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What type checkers see of the public names, and of the pages' programs, in a file of a user."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "python"
#: Pages whose programs open sessions, train, and call operations.
PAGES = ("README.md", "docs/quickstart.md", "docs/guides/pytorch.md", "docs/guides/tune-training.md")
PACKAGES = {
    "xpuruntime": (),
    "xpuruntime.pytorch": ("ops.fused_attention", "ops.fused_layernorm", "allocator.set_allocator"),
    "xpuruntime.pytorch.ops": (),
    "xpuruntime.training": (),
    "xpuruntime.ops": (),
    "xpuruntime.distributed": (),
}


def names_of(package: str) -> list[str]:
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(one.targets[0]): one.value for one in tree.body if isinstance(one, ast.Assign)}
    return list(ast.literal_eval(assigned["__all__"]))


RESULTS = """
import numpy as np
import xpuruntime as xrt
import xpuruntime.distributed
import xpuruntime.pytorch as xrt_torch
x = np.ones((2, 2), np.float32)
def step(rows: int) -> float: ...
def run(session: xrt.InferenceSession, buffers: dict[str, memoryview], ranks: xrt.distributed.Communicator) -> None:
    reveal_type(session.run({"x": x})["y"])
    reveal_type(session.run(buffers)["y"])
    reveal_type(ranks.all_reduce(x))
reveal_type(xrt.ops.attention(x, x, x, is_causal=True))
reveal_type(xrt.ops.layer_norm(x, residual=x))
reveal_type(xrt.ops.rms_norm(x, return_stats=True))
reveal_type(xrt.ops.matmul(x, x))
reveal_type(xrt.ops.conv2d(x, x))
reveal_type(xrt_torch.capture_graph(step, [1])(1))
"""


def test_mypy_knows_the_types_of_public_names_and_of_results(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    lines, reveals = [], []
    for index, (package, more) in enumerate(PACKAGES.items()):
        lines.append(f"import {package} as p{index}")
        names = names_of(package if package != "xpuruntime.training" else "xpuruntime.pytorch")
        reveals += [f"reveal_type(p{index}.{name})" for name in (*names, *more)]
    (tmp_path / "user.py").write_text(
        "\n".join([*lines, *reveals, "p1.autocast(fp17=True)", "p1.nothing", "p0.nothing"])
    )
    (tmp_path / "results.py").write_text(RESULTS)
    # PyTorch itself is not looked at, which takes a minute.
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {SOURCE}\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "user.py", "results.py"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "COLUMNS": "1000"},
    )  # fmt: skip
    assert not done.stderr
    revealed = re.findall(r'user\.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    assert len({line for line, _ in revealed}) == len(reveals) > 100
    written = [*lines, *reveals]
    assert [written[int(line) - 1] for line, kind in revealed if kind == "Any"] == []
    errors = [line for line in done.stdout.splitlines() if " error: " in line and line.startswith("user.py")]
    assert len(errors) == 3, errors
    assert "fp17" in errors[0]
    kinds = re.findall(r'results\.py:\d+: note: Revealed type is "([\w.]*)', done.stdout)
    assert [kind.rpartition(".")[2] for kind in kinds] == [
        "ndarray", "memoryview", "ndarray", "ndarray", "ndarray", "tuple", "ndarray", "ndarray", "float",
    ]  # fmt: skip


def test_pyright_knows_each_type_in_the_programs_of_the_pages_and_each_public_name(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("pyright", reason="pyright is not installed")
    if shutil.which("node") is None:
        pytest.skip("pyright needs node")
    # Unknown arguments come from PyTorch, which leaves some types open.
    settings = {"reportUnknownVariableType": "error", "reportAttributeAccessIssue": "error"}
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "off", "extraPaths": [str(SOURCE)], **settings})
    )
    for index, page in enumerate(PAGES):
        blocks = re.findall(
            r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        assert blocks
        (tmp_path / f"page{index}.py").write_text("\n".join(blocks))
    names = [f"{package}.{name}" for package in PACKAGES if "training" not in package for name in names_of(package)]
    imports = [f"import {package}" for package in PACKAGES]
    (tmp_path / "names.py").write_text("\n".join([*imports, *(f"reveal_type({name})" for name in names)]))
    (tmp_path / "unknown.py").write_text("def copy(value):\n    other = value\n    return other\n")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(done.stdout)["generalDiagnostics"]
    revealed = [entry["message"] for entry in found if entry["severity"] == "information"]
    assert len(revealed) == len(names)
    assert [message for message in revealed if re.search(r'is "(type\[)?(Any|Unknown)', message)] == []
    errors = {Path(entry["file"]).name: entry["message"] for entry in found if entry["severity"] == "error"}
    assert set(errors) == {"unknown.py"}, errors
