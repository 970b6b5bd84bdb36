# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Our kernels as operators of ONNX Runtime: rules, threads, lifetimes, and what is refused."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from custom_op_models import (
    Normal,
    assert_close,
    decisions_of,
    model,
    name_rules,
    node,
    open_session,
)

from xpuruntime import _core

F32 = np.float32
randn = Normal(12)
RowsAndK: Any = {"a": ("fp32", ["n", 8]), "b": ("fp32", [8, 6])}


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    _core.Dispatcher.instance().clear_decisions()


def product(rules: _core.OnnxRuntimeRules, **attributes: Any) -> bytes:
    return model([node("MatMul", ["a", "b"], ["y"], rules, **attributes)], RowsAndK, {"y": "fp32"})


def run(session: Any, rows: int = 4) -> Any:
    a, b = randn(rows, 8), randn(8, 6)
    (y,) = session.run(None, {"a": a, "b": b})
    assert_close(y, a.astype(np.float64) @ b, "fp32")
    return y


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_a_node_without_a_source_name_goes_by_its_own() -> None:
    rules = name_rules(matmul="cpu.blas")
    made = node("MatMul", ["a", "b"], ["y"], rules, name="own")
    del made.attribute[next(i for i, a in enumerate(made.attribute) if a.name == "node")]
    run(open_session(model([made], RowsAndK, {"y": "fp32"})))
    assert [d["node"] for d in _core.Dispatcher.instance().decisions()] == ["own"]


def test_strict_rules_refuse_and_the_session_stays_usable() -> None:
    rules = name_rules(rules=[{"match": {"m": 2}, "use": "cublas.cublasLt"}], matmul="cpu.blas")
    session = open_session(product(rules))
    run(session)
    with pytest.raises(Exception, match=r"cublas\.cublasLt.*MatMul|MatMul.*cublas\.cublasLt") as refused:
        run(session, 2)
    assert "NOT_IMPLEMENTED" in str(refused.value)
    assert "cpu.blas" in str(refused.value)
    run(session)


# ---- lifetimes ------------------------------------------------------------------------------------------------------


def test_sessions_keep_rules_whose_handle_is_gone_and_new_ones_do_not_find_them() -> None:
    rules = name_rules(matmul="cpu.reference")
    source = product(rules)
    session = open_session(source)
    del rules
    gc.collect()
    run(session)
    assert decisions_of("MatMul_y")[0]["chosen"] == "cpu.reference"
    with pytest.raises(Exception, match=r"xpuruntime\.MatMul 'source/MatMul_y': the kernel rules 'rules-.*not known"):
        open_session(source)


def test_names_of_another_process_are_not_mistaken(tmp_path: Path) -> None:
    path = tmp_path / "rewritten.onnx"
    path.write_bytes(product(name_rules(matmul="cpu.blas")))
    program = (
        "import sys; from custom_op_models import *\n"
        "mine = [name_rules() for _ in range(50)]\n"
        "try: open_session(open(sys.argv[1], 'rb').read())\n"
        "except Exception as error: print(error)"
    )
    folder = str(Path(__file__).parents[3] / "models")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n" + program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "is not known" in done.stdout or "are not known here" in done.stdout
    assert "xpuruntime.InferenceSession" in done.stdout


# ---- threads --------------------------------------------------------------------------------------------------------


# ---- what is refused ------------------------------------------------------------------------------------------------


def opening(op: str, dtypes: dict[str, str], **attributes: Any) -> None:
    rules = name_rules()
    made = node(op, list(dtypes), ["y"], rules, **attributes)
    open_session(model([made], {n: (d, None) for n, d in dtypes.items()}, {"y": dtypes[next(iter(dtypes))]}))


@pytest.mark.parametrize(
    ("op", "dtypes", "words"),
    [
        ("MatMul", {"a": "fp32", "b": "fp16"}, "input 'B' is float16 and input 'A' is float32"),
        ("Conv", {"x": "fp16", "w": "fp16", "b": "fp32"}, "input 'B' is float32 and input 'X' is float16"),
        ("LayerNormalization", {"x": "fp32", "s": "fp16"}, "input 'scale' is float16"),
        ("Attention", {"q": "fp16", "k": "fp16", "v": "bf16"}, "input 'V' is bfloat16"),
        ("Attention", {"q": "fp16", "k": "fp16", "v": "fp16", "m": "bf16"}, "input 'mask' is bfloat16"),
    ],
)
def test_mixed_dtypes_are_refused_when_the_session_is_made(op: str, dtypes: dict[str, str], words: str) -> None:
    with pytest.raises(Exception, match=rf"xpuruntime\.{op} 'source/{op}_y': {words}"):
        opening(op, dtypes)


def test_other_dtypes_are_refused_when_the_session_is_made() -> None:
    with pytest.raises(Exception, match=r"Type 'tensor\(bool\)' of input parameter \(a\) of operator \(MatMul\)"):
        opening("MatMul", {"a": "bool", "b": "bool"})


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [
        ("MatMul", {"activation": "swish"}, "activation 'swish' is not known. Fix: choose one of none, relu"),
        ("MatMul", {"activation": 1}, "the attribute 'activation' is of another kind"),
        ("MatMul", {"trans_a": "yes"}, "the attribute 'trans_a' is of another kind"),
        ("Conv", {"strides": 2}, "the attribute 'strides' is no list of ints"),
        ("Conv", {"group": 2**40}, "the attribute 'group' has 1099511627776, which is out of range"),
        ("RMSNormalization", {"epsilon": 1}, "the attribute 'epsilon' is of another kind"),
        ("Attention", {"is_causal": 3}, "the attribute 'is_causal' is 3; expected 0"),
        ("Attention", {"q_num_heads": -1}, "q_num_heads and kv_num_heads are -1 and 0"),
    ],
)
def test_wrong_attributes_are_refused_when_the_session_is_made(op: str, attributes: dict[str, Any], words: str) -> None:
    operands = {"Conv": "xw", "Attention": "qkv"}.get(op, "ab")
    with pytest.raises(Exception, match=words):
        opening(op, dict.fromkeys(operands, "fp32"), **attributes)


def test_a_node_without_rules_is_refused() -> None:
    made = node("MatMul", ["a", "b"], ["y"], name_rules())
    del made.attribute[next(i for i, a in enumerate(made.attribute) if a.name == "rules")]
    with pytest.raises(Exception, match="the attribute 'rules' is missing"):
        open_session(model([made], RowsAndK, {"y": "fp32"}))


@pytest.mark.parametrize(
    ("op", "shapes", "attributes", "words"),
    [
        ("MatMul", [(4, 8), (7, 6)], {}, r"'A' \[4, 8\] float32 on cpu and 'B' \[7, 6\]"),
        ("MatMul", [(8,), (8, 6)], {}, r"'A' \[8\] .* has fewer than 2 dimensions"),
        ("MatMul", [(4, 8), (8, 6), (5,)], {}, r"'bias' \[5\]"),
        ("MatMul", [(2, 1, 4, 8), (1, 3, 8, 6)], {}, "would have to be repeated along some of its batch dimensions"),
        ("MatMul", [(1,) * 9, (1, 1)], {}, "9 dimensions, and at most 8 are possible"),
        ("Conv", [(1, 2, 5, 5, 5), (2, 2, 3, 3, 3)], {}, "other convolutions are not served here"),
        ("Conv", [(1, 2, 5, 5), (2, 2, 3, 3)], {"strides": [1]}, "'strides' has 1 numbers; expected 2"),
        ("Conv", [(1, 2, 5, 5), (2, 2, 3, 3)], {"pads": [-1, 0, 0, 0]}, "padding has -1"),
        ("Conv", [(1, 2, 5, 5), (2, 2, 7, 7)], {}, "reaches over 7 elements"),
        ("LayerNormalization", [(3, 4), (4,)], {"axis": 2}, "'axis' is 2, and 'X'"),
        ("LayerNormalization", [(3, 4), (3,)], {}, r"'scale' \[3\]"),
        (
            "Attention",
            [(1, 4, 8), (1, 4, 8), (1, 4, 8)],
            {},
            "cannot be split into heads: the attribute 'q_num_heads' is 0",
        ),
        ("Attention", [(1, 4, 8), (1, 4, 8), (1, 4, 8)], {"q_num_heads": 3}, "cannot be split into heads"),
        ("Attention", [(1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {}, "3 heads, which is no multiple of the 2"),
    ],
)
def test_wrong_shapes_are_refused_in_the_run(op: str, shapes: Any, attributes: dict[str, Any], words: str) -> None:
    names = "abcd"[: len(shapes)]
    rules = name_rules()
    made = node(op, list(names), ["y"], rules, **attributes)
    session = open_session(model([made], dict.fromkeys(names, ("fp32", None)), {"y": "fp32"}))
    for _ in range(2):  # an error is not kept
        with pytest.raises(Exception, match=words) as refused:
            session.run(None, {n: np.ones(s, F32) for n, s in zip(names, shapes, strict=True)})
        assert "INVALID_ARGUMENT" in str(refused.value)
        assert f"{op}_y" in str(refused.value)


def test_a_kernel_that_fails_ends_the_run_with_its_message() -> None:
    """A kernel in Python, called from a thread of ONNX Runtime: what it raises becomes the error of the run."""

    class Backend:
        name, device_type = "failing", "cpu"

        def available(self) -> tuple[bool, str]:
            return True, ""

        def version(self) -> str:
            return "1"

    class Kernel:
        id, op, description, limits, automatic = "failing.matmul", "matmul", "fails", "all", False

        def supports(self, desc: dict[str, Any]) -> tuple[bool, str]:
            return True, ""

        def prepare(self, desc: dict[str, Any], config: str) -> Callable[..., None]:
            def launch(operands: dict[str, Any], stream: int) -> None:
                msg = "the kernel is broken"
                raise RuntimeError(msg)

            return launch

    _core.register_python_kernel(Backend(), Kernel())
    try:
        rules = name_rules(matmul="failing.matmul")
        session = open_session(product(rules))
        with pytest.raises(Exception, match="the kernel is broken"):
            run(session)
    finally:
        _core.KernelRegistry.instance().remove("failing")
    rules = name_rules(matmul="cpu.blas")
    run(open_session(product(rules)))
