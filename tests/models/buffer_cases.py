# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models whose outputs may share memory with inputs, constants or one another, with their values from NumPy."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx import helper as h

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["CASES", "LARGE", "SMALL", "WIDTH", "BufferCase", "save"]

Arrays = dict[str, np.ndarray[Any, Any]]

WIDTH = 64
#: Rows of inputs that an engine may copy, and of inputs that it may share.
SMALL, LARGE = 2, 700

_W = np.random.default_rng(7).standard_normal((3, WIDTH)).astype(np.float32)
_ROW = _W[:1]


class BufferCase(NamedTuple):
    """One model.

    Attributes
    ----------
    name : str
    nodes : list of onnx.NodeProto
    inputs, outputs : dict of str to (dtype, shape)
        As declared in the file; the dimension ``"n"`` is the number of rows, ``"m"`` another size in each run; ``None``
        in place of a shape means that none is declared.
    compute : callable
        Inputs to outputs, in NumPy.
    constants : dict of str to array
    bindable : bool
        Whether the shapes of all outputs follow from those of the inputs.
    truly_declared : bool
        Whether outputs have the shapes that the file declares.
    """

    name: str
    nodes: list[onnx.NodeProto]
    inputs: dict[str, tuple[str, list[Any]]]
    outputs: dict[str, tuple[str, list[Any] | None]]
    compute: Callable[[Arrays], Arrays]
    constants: Arrays = MappingProxyType({})  # type: ignore[assignment]
    bindable: bool = True
    truly_declared: bool = True

    def model(self, rows: int | None = None) -> onnx.ModelProto:
        """Return the model, with `rows` in the place of the open dimension, if given."""

        def value(name: str, facts: tuple[str, list[Any] | None]) -> onnx.ValueInfoProto:
            dtype, shape = facts
            sizes = None if shape is None else [rows if size == "n" and rows is not None else size for size in shape]
            return h.make_tensor_value_info(name, h.np_dtype_to_tensor_dtype(np.dtype(dtype)), sizes)

        graph = h.make_graph(
            self.nodes,
            self.name,
            [value(*item) for item in self.inputs.items()],
            [value(*item) for item in self.outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)

    def feeds(self, seed: int, rows: int) -> Arrays:
        """Return new inputs."""
        random = np.random.default_rng((seed, rows))
        made: Arrays = {}
        for name, (dtype, shape) in self.inputs.items():
            sizes = [{"n": rows, "m": WIDTH + seed}.get(size, size) for size in shape]
            if dtype == "bool":
                made[name] = np.asarray(random.random(sizes) < 0.5)
            elif dtype.startswith("int"):
                made[name] = np.asarray(random.integers(-50, 50, sizes), dtype)
            else:
                made[name] = np.asarray(random.standard_normal(sizes), dtype)
        return made


def save(case: BufferCase, folder: Path, rows: int | None = None) -> Path:
    """Write the model of a case into a folder; see `BufferCase.model`."""
    path = folder / f"{case.name}-{rows}.onnx"
    onnx.save(case.model(rows), path)
    return path


def _relu(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.maximum(array, 0)


def _n(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return h.make_node(op, list(inputs), list(outputs), name=f"{op}_{'_'.join(outputs)}", **attributes)


_X: dict[str, tuple[str, list[Any]]] = {"x": ("float32", ["n", WIDTH])}
_ROWS: tuple[str, list[Any] | None] = ("float32", ["n", WIDTH])
_FREE: tuple[str, list[Any] | None] = ("float32", None)


def _ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def _view(name: str, node: onnx.NodeProto, view: Callable[[Any], Any], **constants: Any) -> BufferCase:
    """Return a case that gives a view `y` of its input, and something computed of the input and of the view."""
    nodes = [node, _n("Relu", ["x"], ["z"]), _n("Relu", ["y"], ["w"])]
    return BufferCase(
        name,
        nodes,
        _X,
        {"y": _FREE, "z": _ROWS, "w": _FREE},
        lambda f: {"y": view(f["x"]), "z": _relu(f["x"]), "w": _relu(view(f["x"]))},
        constants,
    )


def _subgraph(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
    return h.make_graph(nodes, name, [], [h.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)])


CASES: tuple[BufferCase, ...] = (
    BufferCase(
        "input_is_output",
        [_n("Relu", ["x"], ["z"])],
        _X,
        {"x": _ROWS, "z": _ROWS},
        lambda f: {"x": f["x"], "z": _relu(f["x"])},
    ),
    BufferCase("only_identity", [_n("Identity", ["x"], ["y"])], _X, {"y": _ROWS}, lambda f: {"y": f["x"]}),
    _view("identity", _n("Identity", ["x"], ["y"]), lambda x: x),
    _view("dropout", _n("Dropout", ["x"], ["y"]), lambda x: x),
    _view("reshape", _n("Reshape", ["x", "to"], ["y"]), lambda x: x.reshape(-1, 32, 2), to=_ints(-1, 32, 2)),
    _view("flatten", _n("Flatten", ["x"], ["y"], axis=0), lambda x: x.reshape(1, -1)),
    _view("unsqueeze", _n("Unsqueeze", ["x", "at"], ["y"]), lambda x: x[:, None], at=_ints(1)),
    _view("slice", _n("Slice", ["x", "from", "to", "at"], ["y"]), lambda x: x[:, :32],
          **{"from": _ints(0), "to": _ints(32), "at": _ints(1)}),
    _view("slice_of_all", _n("Slice", ["x", "from", "to", "at"], ["y"]), lambda x: x,
          **{"from": _ints(0), "to": _ints(1 << 40), "at": _ints(0)}),
    _view("transpose", _n("Transpose", ["x"], ["y"], perm=[1, 0]), lambda x: x.T),
    _view("cast", _n("Cast", ["x"], ["y"], to=TensorProto.FLOAT), lambda x: x),
    _view("concat_of_one", _n("Concat", ["x"], ["y"], axis=0), lambda x: x),
    _view("sum_of_one", _n("Sum", ["x"], ["y"]), lambda x: x),
    BufferCase(
        "views_of_views",
        [
            _n("Unsqueeze", ["x", "one"], ["a"]),
            _n("Identity", ["a"], ["b"]),
            _n("Squeeze", ["b", "one"], ["y"]),
            _n("Add", ["y", "row"], ["w"]),
            _n("Identity", ["w"], ["v"]),
        ],
        _X,
        {"y": _FREE, "w": _FREE, "v": _FREE, "b": _FREE},
        lambda f: {"y": f["x"], "w": f["x"] + _ROW, "v": f["x"] + _ROW, "b": f["x"][:, None]},
        {"one": _ints(1), "row": _ROW},
    ),
    BufferCase(
        "one_value_under_many_names",
        [
            _n("Relu", ["x"], ["y"]),
            _n("Identity", ["y"], ["z"]),
            _n("Reshape", ["y", "to"], ["w"]),
            _n("Dropout", ["z"], ["v"]),
            _n("Exp", ["w"], ["u"]),
        ],
        _X,
        {"y": _ROWS, "z": _ROWS, "w": _FREE, "v": _ROWS, "u": _FREE},
        lambda f: {
            "y": _relu(f["x"]),
            "z": _relu(f["x"]),
            "w": _relu(f["x"]).reshape(-1),
            "v": _relu(f["x"]),
            "u": np.exp(_relu(f["x"]).reshape(-1)),
        },
        {"to": _ints(-1)},
    ),
    BufferCase(
        "one_input_under_two_names",
        [_n("Identity", ["x"], ["y"]), _n("Identity", ["x"], ["z"]), _n("Relu", ["z"], ["w"])],
        _X,
        {"y": _ROWS, "z": _ROWS, "w": _ROWS},
        lambda f: {"y": f["x"], "z": f["x"], "w": _relu(f["x"])},
    ),
    BufferCase(
        "written_in_place",
        [
            _n("Reshape", ["x", "to"], ["a"]),
            _n("Relu", ["a"], ["b"]),
            _n("Neg", ["b"], ["c"]),
            _n("Reshape", ["c", "back"], ["y"]),
            _n("Sub", ["x", "y"], ["z"]),
        ],
        _X,
        {"y": _FREE, "z": _ROWS},
        lambda f: {"y": -_relu(f["x"]), "z": f["x"] + _relu(f["x"])},
        {"to": _ints(-1), "back": _ints(-1, WIDTH)},
    ),
    BufferCase(
        "constants",
        [
            _n("Identity", ["w"], ["v"]),
            _n("Constant", [], ["c"], value=numpy_helper.from_array(_W)),
            _n("Reshape", ["w", "to"], ["r"]),
            _n("Add", ["x", "row"], ["y"]),
        ],
        _X,
        {"w": ("float32", [3, WIDTH]), "v": ("float32", [3, WIDTH]), "c": ("float32", [3, WIDTH]), "r": _FREE,
         "y": _ROWS},
        lambda f: {"w": _W, "v": _W, "c": _W, "r": _W.reshape(-1), "y": f["x"] + _ROW},
        {"w": _W, "to": _ints(-1), "row": _ROW},
    ),
    BufferCase(
        "large_constant",
        [_n("Identity", ["w"], ["v"]), _n("Relu", ["x"], ["y"])],
        _X,
        {"w": _FREE, "v": _FREE, "y": _ROWS},
        lambda f: {"w": np.tile(_W, (200, 1)), "v": np.tile(_W, (200, 1)), "y": _relu(f["x"])},
        {"w": np.tile(_W, (200, 1))},
    ),
    BufferCase(
        "two_inputs",
        [_n("Add", ["a", "b"], ["y"]), _n("Identity", ["a"], ["z"]), _n("Identity", ["b"], ["w"])],
        {"a": _X["x"], "b": _X["x"]},
        {"y": _ROWS, "z": _ROWS, "w": _ROWS},
        lambda f: {"y": f["a"] + f["b"], "z": f["a"], "w": f["b"]},
    ),
    BufferCase(
        "inputs_swapped",
        [_n("Identity", ["b"], ["y"]), _n("Identity", ["a"], ["z"])],
        {"a": _X["x"], "b": _X["x"]},
        {"y": _ROWS, "z": _ROWS},
        lambda f: {"y": f["b"], "z": f["a"]},
    ),
    BufferCase(
        "unused_input",
        [_n("Relu", ["x"], ["y"])],
        {**_X, "unused": ("float32", ["n", 3])},
        {"y": _ROWS},
        lambda f: {"y": _relu(f["x"])},
    ),
    BufferCase(
        "split",
        [_n("Split", ["x", "parts"], ["y", "a"], axis=1), _n("Relu", ["a"], ["z"])],
        _X,
        {"y": _FREE, "a": _FREE, "z": _FREE},
        lambda f: {"y": f["x"][:, :16], "a": f["x"][:, 16:], "z": _relu(f["x"][:, 16:])},
        {"parts": _ints(16, WIDTH - 16)},
    ),
    BufferCase(
        "concat_of_views",
        [_n("Identity", ["x"], ["a"]), _n("Relu", ["x"], ["b"]), _n("Concat", ["a", "b"], ["y"], axis=0)],
        _X,
        {"y": _FREE, "b": _ROWS},
        lambda f: {"y": np.concatenate([f["x"], _relu(f["x"])]), "b": _relu(f["x"])},
    ),
    BufferCase(
        "scalars",
        [_n("Add", ["s", "s"], ["t"]), _n("Identity", ["s"], ["u"]), _n("Mul", ["x", "s"], ["y"])],
        {**_X, "s": ("float32", [])},
        {"t": ("float32", []), "u": ("float32", []), "y": _ROWS},
        lambda f: {"t": np.asarray(f["s"] + f["s"]), "u": f["s"], "y": f["x"] * f["s"]},
    ),
    BufferCase(
        "wrong_output_shape",
        [_n("Relu", ["x"], ["y"]), _n("Identity", ["x"], ["z"])],
        _X,
        {"y": ("float32", [1, WIDTH]), "z": ("float32", [5, WIDTH])},
        lambda f: {"y": _relu(f["x"]), "z": f["x"]},
        truly_declared=False,
    ),
    BufferCase(
        "careless_output_symbol",
        [_n("Transpose", ["x"], ["a"]), _n("Relu", ["a"], ["y"])],
        {"x": ("float32", ["n", "m"])},
        {"y": ("float32", ["n", "m"])},
        lambda f: {"y": _relu(f["x"].T)},
        truly_declared=False,
    ),
    BufferCase(
        "other_types",
        [
            _n("Identity", ["i"], ["j"]),
            _n("Neg", ["i"], ["k"]),
            _n("Not", ["b"], ["c"]),
            _n("Identity", ["b"], ["d"]),
        ],
        {"i": ("int32", ["n", WIDTH]), "b": ("bool", ["n", WIDTH])},
        {"j": ("int32", None), "k": ("int32", None), "c": ("bool", None), "d": ("bool", None)},
        lambda f: {"j": f["i"], "k": -f["i"], "c": ~f["b"], "d": f["b"]},
    ),
    BufferCase(
        "branches",
        [
            _n(
                "If",
                ["s"],
                ["y"],
                then_branch=_subgraph("then", [h.make_node("Identity", ["x"], ["then_out"])]),
                else_branch=_subgraph("else", [h.make_node("Relu", ["x"], ["else_out"])]),
            ),
            _n("Identity", ["x"], ["z"]),
        ],
        {**_X, "s": ("bool", [])},
        {"y": _FREE, "z": _ROWS},
        lambda f: {"y": f["x"] if f["s"] else _relu(f["x"]), "z": f["x"]},
    ),
    BufferCase(
        "sizes_from_values",
        [_n("NonZero", ["x"], ["i"]), _n("Identity", ["x"], ["y"])],
        _X,
        {"i": ("int64", None), "y": _ROWS},
        lambda f: {"i": np.stack(np.nonzero(f["x"])), "y": f["x"]},
        bindable=False,
    ),
)  # fmt: skip
