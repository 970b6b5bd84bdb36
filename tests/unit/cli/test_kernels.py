# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xrt kernels`: every kernel, with what it serves and whether it can be used here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from xpuruntime import ops

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
OPS = {
    "matmul", "attention", "attention_backward", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward",
    "conv", "conv_input_gradient", "conv_weight_gradient",
}  # fmt: skip


def test_all_of_them_as_json(xrt: Any) -> None:
    result = xrt("kernels", "--json")
    assert (result.code, result.err) == (0, "")
    found = result.json()
    assert found["schema"] == "xpuruntime.kernels/1"
    assert found["kernels"] == json.loads(json.dumps([kernel.to_dict() for kernel in ops.kernels()]))
    assert {kernel["op"] for kernel in found["kernels"]} == OPS
    for kernel in found["kernels"]:
        assert kernel["id"].startswith(kernel["backend"] + ".")
        assert kernel["description"]
        assert kernel["limits"]
        assert kernel["available"] == (kernel["reason"] == "")
        assert kernel["version"] or not kernel["available"]


def test_those_of_one_operation(xrt: Any) -> None:
    kernels = xrt("kernels", "matmul", "--json").json()["kernels"]
    assert {"cpu.blas", "cpu.reference", "null.null"} <= {kernel["id"] for kernel in kernels}
    assert {kernel["op"] for kernel in kernels} == {"matmul"}
    order = [kernel["id"] for kernel in kernels]
    assert order == [kernel.id for kernel in ops.kernels("matmul")]


def test_kernels_for_pytorch_alone_follow(xrt: Any) -> None:
    shown = xrt("kernels", "attention_backward").out
    assert "torch.flash " in shown
    assert "torch.mm" not in shown
    found = xrt("kernels", "rope", "--json").json()
    assert found["kernels"] == []
    assert {"liger.rope", "quack.rope"} <= set(found["pytorch"])


def test_the_table(xrt: Any) -> None:
    result = xrt("kernels", "rms_norm")
    assert (result.code, result.err) == (0, "")
    assert "cpu.vectorised" in result.out
    assert "cpu.blas" not in result.out
    lines = result.out.splitlines()
    place = next(index for index, line in enumerate(lines) if "cpu.reference" in line)
    assert lines[place].split() == ["cpu.reference", "yes"], "a row is one line"
    assert lines[place + 1].startswith("     serves: the definition"), "a long text is below its row"


def test_a_reason_is_shown_once(xrt: Any) -> None:
    shown = xrt("kernels").out
    for reason in {kernel.reason for kernel in ops.kernels() if not kernel.available}:
        assert shown.count(reason) == 1
    named = [line for line in shown.splitlines() if line.startswith("  ") and "serves: " not in line]
    assert max(map(len, named)) <= 140


def test_an_unknown_operation(xrt: Any) -> None:
    for arguments in (("nonsense",), ("nonsense", "--json")):
        result = xrt("kernels", *arguments)
        assert result.code == 2
        message = result.err if len(arguments) == 1 else result.json()["error"]["message"]
        for words in ("'nonsense'", *OPS):
            assert words in message.replace("\n", " ")
    assert result.json()["error"]["type"] == "InputError"


def test_the_reference_names_every_field(xrt: Any) -> None:
    fields = set(xrt("kernels", "conv", "--json").json()["kernels"][0])
    section = PAGE.read_text().partition("## xrt kernels")[2].partition("\n## ")[0]
    assert fields == {word for word in re.findall(r"`(\w+)`", section) if word in fields}


def test_a_terminal_shows_a_row_for_each_kernel(xrt: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", xrt("kernels").out)
    ids = {kernel.id for kernel in ops.kernels()}
    rows = [line.split()[0] for line in shown.splitlines() if line.split() and line.split()[0] in ids]
    assert sorted(rows) == sorted(ids)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "`xrt kernels matmul`" in " ".join(shown.split())


def test_a_terminal_shows_no_paths_of_libraries(xrt: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = " ".join(xrt("doctor").out.split())
    assert "libraries that are loaded, pipe it into less" in shown
    assert "libraries loaded in this process" not in shown
