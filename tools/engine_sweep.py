# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compare every operator that an engine takes with ONNX Runtime, and the differences with the engine's known errors.

``python tools/engine_sweep.py openvino`` runs the cases of `sweep_cases`: models of the single-node test cases of the
`onnx` package and of recurrent nodes, each with every element type that the operator's schema allows, in every version
of the operator from opset 13 on, with static and open sizes, with operands that are inputs or constants, and with the
case's own and with edge values. Those of `contrib_operators` have one type and version, and static and open sizes.
Engines that take open sizes also get NaN and inputs without elements, in one type and version.

It fails on a difference that no row of the engine's ``known_errors.json`` is about, and on a row that no case
shows. Cases run in processes of their own, so that one which ends its process costs only itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.reference
from contrib_operators import UNITS as CONTRIB_UNITS
from contrib_operators import operators
from onnx import numpy_helper
from onnx_backend_suite import DEVICES, directly, version
from sweep_cases import HALVES, RECURRENT, TYPES, Case, bases, floating, opsets_of, type_code, variants

from xpuruntime.engines.known_errors import applies_to, inputs_with_errors, known_errors, nodes_with_errors
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.errors import ModelError
from xpuruntime.runtime.telemetry import log_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

#: Results that are rounded to an integer: one unit apart, they are equal.
UNITS = {"DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "Resize", *CONTRIB_UNITS}
#: Of a float outside of the range of an integer, ONNX does not define the cast.
CASTS = {"Cast", "CastLike"}
#: ONNX's reference ignores their input sequence_lens: it computes only what ONNX Runtime refuses.
SIMPLIFIED = set(RECURRENT)
#: ONNX's reference interpolates integers with integer weights.
WITHOUT_REFERENCE = {"GridSample", "Resize"}
#: Engines that take no open sizes, and engines without infinities and NaN.
STATIC, FINITE = {"qnn"}, {"qnn"}
#: Seconds of a case, after which its process ends, and cases of a process: QNN's simulator hangs after thousands.
_LONGEST, _BATCH = 120, 400


def truths(case: Case) -> Iterator[list[Any]]:
    """Yield what ONNX Runtime computes, ONNX's reference, and ONNX Runtime in fp32: an engine may follow each."""
    wide = _widened(case)
    ways: list[Callable[[], list[Any]]] = [
        lambda: directly("onnxruntime", case.model)(list(case.feeds.values())),
        lambda: onnx.reference.ReferenceEvaluator(case.model).run(None, case.feeds),
        lambda: directly("onnxruntime", wide.model)(list(wide.feeds.values())),
    ]
    node = case.model.graph.node[0]
    first = case.feeds.get(node.input[0])
    weights = node.op_type in WITHOUT_REFERENCE and first is not None and not floating(first.dtype)
    if weights or (node.op_type in SIMPLIFIED and node.input[4:5] > [""]):
        del ways[1]
    for compute in ways if node.op_type not in CASTS else ways[:2]:
        with contextlib.suppress(Exception):
            yield [np.asarray(result) for result in compute()]


def _widened(case: Case) -> Case:
    """Return a case with its floats in fp32, of which ONNX Runtime takes all operators."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    floats = {*map(type_code, HALVES), onnx.TensorProto.DOUBLE}
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in floats:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for tensor in model.graph.initializer:
        if tensor.data_type in floats:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    feeds = {
        name: value.astype(np.float32) if type_code(value.dtype) in floats else value
        for name, value in case.feeds.items()
    }
    return Case(case.name, model, feeds)


def difference(want: Any, got: Any, step: float, unit: int = 0, *, ends: bool = False) -> str:
    """Say where two results differ: integers by more than a unit, but for those outside of int32. Empty: nowhere.

    Floats near the end of their type may overflow, unless `ends` says that they must be equal.
    """
    if want.dtype not in TYPES.values():
        return ""
    if want.shape != got.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    exact, near = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if floating(want.dtype):
            if want.dtype == np.float64:  # which a plan says is computed in fp32
                step = max(step, 1e-6)
            top = np.inf if ends else 1e30 if step < min(HALVES.values()) else 6e4
            scale = np.abs(exact[np.isfinite(exact)]).max(initial=0)
            same = np.isclose(near, exact, rtol=step, atol=step / 10 * (1 + scale), equal_nan=True) | (
                np.abs(exact) > top
            )
        else:
            apart = np.abs(near - exact) <= unit if unit else want == got.astype(want.dtype)
            same = apart | (exact >= 2**31) | (exact < -(2**31))
    return "" if same.all() else f"{got[~same][:3].tolist()} instead of {want[~same][:3].tolist()}"


def wrong(engine: str, case: Case) -> str | None:
    """Return how an engine's results differ from ONNX's; empty where they do not, ``None`` where nothing is known.

    That is where the engine refuses the model, or nothing else computes it.
    """
    used = [*case.feeds.values(), *map(numpy_helper.to_array, case.model.graph.initializer)]
    finite = engine in FINITE and case.model.graph.node[0].op_type != "IsNaN"
    if finite and any(floating(value.dtype) and (np.abs(value) > 6e4).any() for value in used):
        return None  # they overflow
    step = max((HALVES.get(value.dtype, 1e-3) for value in used), default=1e-3)
    if engine == "qnn":
        step = max(step, 2e-2)
    elif case.model.graph.node[0].op_type in CASTS:
        step = 0
    try:
        got = [np.asarray(result) for result in directly(engine, case.model)(list(case.feeds.values()))]
    except Exception:
        return None
    found = None
    for want in truths(case):
        pairs = list(zip(*_defined(case, want, got), strict=False))
        if engine in FINITE:
            pairs = [_finite(*pair) for pair in pairs]
        unit, ends = int(case.name.split(" | ")[0] in UNITS), " | no elements" in case.name
        said = next((text for both in pairs if (text := difference(*both, step, unit, ends=ends))), "")
        if not said:
            return ""
        found = found or said
    return found


def _finite(want: Any, got: Any) -> tuple[Any, Any]:
    if not floating(want.dtype) or want.shape != got.shape:
        return want, got
    finite = np.isfinite(want)
    return want[finite], got[finite]


def _defined(case: Case, want: list[Any], got: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what ONNX defines of results: neither casts out of range, nor places of the largest of equal values."""
    op = case.model.graph.node[0].op_type
    if op == "MaxPool":
        return want[:1], got[:1]
    if op in CASTS and want[0].dtype.kind in "iub" and want[0].shape == got[0].shape:
        (source, *_) = (value for name, value in case.feeds.items() if name == case.model.graph.node[0].input[0])
        if floating(source.dtype):
            limits = np.iinfo(want[0].dtype) if want[0].dtype.kind != "b" else np.finfo(np.float16)
            inside = (source > float(limits.min)) & (source < float(limits.max))
            return [want[0][inside]], [got[0][inside]]
    return want, got


def work(engine: str, batch: Sequence[Case], out: Path) -> None:
    """Write a line of JSON for each case of a batch."""
    warnings.simplefilter("ignore")
    rows = known_errors(engine)
    with out.open("w", encoding="utf-8") as file:
        for case in batch:
            differs = wrong(engine, case)
            named = []
            with contextlib.suppress(ModelError):
                info = inspect_bytes(case.model)
                named = [row.id for _, row in nodes_with_errors(info, rows)]
                about = ((row, inputs_with_errors(info, row)) for row in rows if row.values)
                named += [row.id for row, names in about if _held(row.values, case, names)]
            file.write(json.dumps({"case": case.name, "wrong": differs, "rows": named}) + "\n")
            file.flush()


def _held(values: str, case: Case, names: Collection[str]) -> bool:
    """Whether one of the inputs holds what a row is about."""
    arrays = [case.feeds[name] for name in names]
    if values == "empty":
        return any(not array.size for array in arrays)
    return any(floating(array.dtype) and np.isnan(array).any() for array in arrays)


def sweep(engine: str, processes: int, ops: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield what came of each case: how it differs, ``None`` where it was not compared, and the rows about it."""
    left = variants(ops, static=engine in STATIC)
    with tempfile.TemporaryDirectory() as folder:
        running = [_Batch(engine, batch, Path(folder) / f"{place}.jsonl") for place, batch in _batches(left, processes)]
        while running:
            time.sleep(0.1)
            for batch in [*running]:
                if batch.ended():
                    yield from batch.rows()
                    cases_ = batch.left or list(islice(left, _BATCH))
                    running.remove(batch)
                    running += [_Batch(engine, cases_, batch.out)] if cases_ else []


def _batches(left: Iterator[Case], number: int) -> Iterator[tuple[int, list[Case]]]:
    return ((place, cases_) for place in range(number) if (cases_ := list(islice(left, _BATCH))))


class _Batch:
    """Cases in a process of their own, which ends with them, or with a case that takes longer than `_LONGEST`."""

    def __init__(self, engine: str, batch: list[Case], out: Path) -> None:
        out.write_text("", encoding="utf-8")
        self.out, self.batch, self.left = out, batch, list[Case]()
        self._process = multiprocessing.get_context("fork").Process(target=_quietly, args=(engine, batch, out))
        self._process.start()

    def ended(self) -> bool:
        if time.time() - self.out.stat().st_mtime > _LONGEST:
            self._process.kill()
            self._process.join()
        return not self._process.is_alive()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the cases that ended, and of the case that ended the process; `left` are the others."""
        rows = [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]
        at, status = len(rows), self._process.exitcode
        if at == len(self.batch):
            return rows
        if status == 1:
            raise SystemExit(f"{self.batch[at].name}: an error of the sweep itself")
        alone = at == 0  # else an earlier case may be the cause: it runs again, alone
        self.left = self.batch[at + alone :]
        return [*rows, {"ended": self.batch[at].name, "alone": alone, "status": status}]


def _quietly(engine: str, batch: Sequence[Case], out: Path) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    work(engine, batch, out)


def main(arguments: Sequence[str]) -> int:
    """Sweep engines, print what differs, and fail where that is not what their tables say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what came of each case, a line each")
    parser.add_argument("--ops", nargs="*", default=[], help="operators, where not all")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("xpuruntime.steps").setLevel(logging.INFO)
    known = {base.model.graph.node[0].op_type for base in bases()}
    ops = {op for op in known if opsets_of(op)} | {operator.name for operator in operators()}
    ops = ops.intersection(options.ops or ops)
    failed = False
    with Path(options.json or os.devnull).open("w", encoding="utf-8") as file:
        for engine in options.engines:
            rows, begun = [], set[str]()
            for row in sweep(engine, options.jobs, options.ops):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                op = str(row.get("case") or row["ended"]).split(" | ")[0]
                if op not in begun:
                    begun.add(op)
                    log_step(f"{engine}: {op}", len(begun), len(ops))
            failed |= not report(engine, rows, options.ops)
    return int(failed)


def report(engine: str, found: list[dict[str, Any]], ops: Collection[str] = ()) -> bool:
    """Print the outcome of a sweep; whether it is what the engine's table says."""
    here = version(engine)
    number, device = here.rpartition(" ")[2], DEVICES.get(engine, "cpu")
    rows = {row.id: row for row in known_errors(engine) if applies_to(row, number, device)}
    shown = Counter(name for row in found if row.get("wrong") for name in row["rows"])
    compared = [row for row in found if row.get("wrong") is not None]
    about = Counter(name for row in compared for name in row["rows"])
    new: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in compared:
        if row["wrong"] and not rows.keys() & row["rows"]:
            op, _, types, *_ = row["case"].split(" | ")
            new[op, types].append(row)
    gone = [name for name, row in rows.items() if not shown[name] and _swept(row, ops)]
    print(f"{here}: {len(new)} differences without a row, {len(gone)} rows without a difference")
    taken = {row["case"].split(" | ")[0] for row in compared}
    print(f"  {len(compared)} of {len(found)} cases compared, of {len(taken)} operators")
    print(f"  {'row':40} {'cases':>6} {'differ':>7}")
    for name in sorted(about.keys() & rows.keys() | set(gone)):
        print(f"  {name:40} {about[name]:6} {shown[name]:7}{'   gone' if name in gone else ''}")
    for (op, types), cases_ in sorted(new.items()):
        print(f"  new: {op} ({types}), {len(cases_)} cases, such as {cases_[0]['case']}: {cases_[0]['wrong']}")
    for row in found:
        if "ended" in row:
            print(f"  ended its process with {row['status']}, {'' if row['alone'] else 'not '}alone: {row['ended']}")
    return not new and not gone


def _swept(row: Any, ops: Collection[str]) -> bool:
    """Whether a model of a single node can show a row, and all of its operators are swept."""
    alone = not (row.saturates or row.dequantized or row.where == "subgraph")
    return alone and (not ops or set(row.ops) <= set(ops))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
