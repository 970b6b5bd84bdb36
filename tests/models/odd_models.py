# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX files that the standard does not allow, or barely, and that ONNX Runtime opens and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx import helper as h

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ODD", "feeds"]

SHAPE = (1, 3, 4, 4)
_ONE = numpy_helper.from_array(np.full((1, 3, 1, 1), 2.5, np.float32), "b")

#: Name to what builds the model; each has the input ``x``, some another one, which `feeds` has too.
ODD: dict[str, Callable[[], onnx.ModelProto]] = {}


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs for one of the models."""
    initial = {tensor.name for tensor in model.graph.initializer}
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    values: dict[str, Any] = {"x": x, "flag": np.array(True), "s": np.float32(3)}
    return {value.name: np.asarray(values[value.name]) for value in model.graph.input if value.name not in initial}


def _odd(build: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
    ODD[build.__name__] = build
    return build


def _info(name: str, shape: Sequence[Any] | None = SHAPE, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, kind, shape)


def _model(
    nodes: Sequence[onnx.NodeProto],
    *,
    opset: int = 17,
    ir: int = 9,
    initial: Sequence[onnx.TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[onnx.ValueInfoProto] | None = None,
    domains: dict[str, int] | None = None,
) -> onnx.ModelProto:
    graph = h.make_graph(
        list(nodes), "g", list(inputs or [_info("x")]), list(outputs or [_info("y", None)]), list(initial)
    )
    imports = [h.make_opsetid("", opset), *(h.make_opsetid(*item) for item in (domains or {}).items())]
    return h.make_model(graph, opset_imports=imports, ir_version=ir)


def _add(**options: Any) -> onnx.ModelProto:
    return _model([h.make_node("Add", ["x", "b"], ["y"], name="add")], initial=[_ONE], **options)


def _n(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return h.make_node(op, list(inputs), list(outputs), **attributes)


@_odd
def image_scaler() -> onnx.ModelProto:
    return _model([_n("ImageScaler", ["x"], ["y"], bias=[1.0, 2.0, 3.0], scale=2.0)], opset=7, ir=3)


@_odd
def contrib_gelu() -> onnx.ModelProto:
    return _model([_n("Gelu", ["x"], ["y"], domain="com.microsoft")], domains={"com.microsoft": 1})


@_odd
def contrib_domain_not_imported() -> onnx.ModelProto:
    return _model([_n("Gelu", ["x"], ["y"], domain="com.microsoft")])


@_odd
def crop_of_the_standard_domain() -> onnx.ModelProto:
    return _model([_n("Crop", ["x"], ["y"], border=[1, 1, 1, 1])], opset=9, ir=4)


@_odd
def parametric_softplus() -> onnx.ModelProto:
    return _model([_n("ParametricSoftplus", ["x"], ["y"], alpha=0.5, beta=2.0)], opset=9, ir=4)


@_odd
def scaled_tanh() -> onnx.ModelProto:
    return _model([_n("ScaledTanh", ["x"], ["y"], alpha=0.5, beta=2.0)], opset=9, ir=4)


@_odd
def thresholded_relu_of_opset_1() -> onnx.ModelProto:
    return _model([_n("ThresholdedRelu", ["x"], ["y"], alpha=0.5)], opset=9, ir=4)


@_odd
def mean_variance_normalization() -> onnx.ModelProto:
    return _model([_n("MeanVarianceNormalization", ["x"], ["y"], across_channels=0)], opset=8, ir=3)


@_odd
def simplified_layer_norm() -> onnx.ModelProto:
    scale = numpy_helper.from_array(np.full(4, 2, np.float32), "g")
    return _model([_n("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-5)], initial=[scale])


@_odd
def layer_norm_before_its_opset() -> onnx.ModelProto:
    scale = numpy_helper.from_array(np.full(4, 2, np.float32), "g")
    return _model([_n("LayerNormalization", ["x", "g"], ["y"])], opset=12, ir=7, initial=[scale])


@_odd
def ir_3_weights_not_listed() -> onnx.ModelProto:
    return _add(opset=8, ir=3)


@_odd
def ir_3_weights_listed() -> onnx.ModelProto:
    return _add(opset=8, ir=3, inputs=[_info("x"), _info("b", (1, 3, 1, 1))])


@_odd
def weights_listed_as_inputs() -> onnx.ModelProto:
    return _add(inputs=[_info("x"), _info("b", (1, 3, 1, 1))])


@_odd
def output_without_a_type() -> onnx.ModelProto:
    return _add(outputs=[onnx.ValueInfoProto(name="y")])


@_odd
def further_output_without_a_type() -> onnx.ModelProto:
    nodes = [_n("Add", ["x", "b"], ["a"], name="add"), _n("Relu", ["a"], ["y"], name="relu")]
    return _model(nodes, initial=[_ONE], outputs=[_info("y"), onnx.ValueInfoProto(name="a")])


@_odd
def intermediate_without_a_type() -> onnx.ModelProto:
    made = _model([_n("Add", ["x", "b"], ["a"]), _n("Relu", ["a"], ["y"])], initial=[_ONE])
    made.graph.value_info.add().name = "a"
    return made


@_odd
def graph_without_a_name() -> onnx.ModelProto:
    name = _add()
    name.graph.name = ""
    return name


@_odd
def nodes_without_names() -> onnx.ModelProto:
    return _model([_n("Add", ["x", "b"], ["a"]), _n("Relu", ["a"], ["y"])], initial=[_ONE])


@_odd
def nodes_out_of_order() -> onnx.ModelProto:
    return _model([_n("Relu", ["a"], ["y"], name="relu"), _n("Add", ["x", "b"], ["a"], name="add")], initial=[_ONE])


@_odd
def unused_weights() -> onnx.ModelProto:
    spare = [numpy_helper.from_array(np.zeros((9, 9), np.float32), f"spare{i}") for i in range(3)]
    return _model([_n("Add", ["x", "b"], ["y"])], initial=[_ONE, *spare])


@_odd
def one_weight_twice() -> onnx.ModelProto:
    return _model([_n("Add", ["x", "b"], ["y"])], initial=[_ONE, _ONE])


@_odd
def unused_input() -> onnx.ModelProto:
    return _add(inputs=[_info("x"), _info("s", ())])


@_odd
def unused_node() -> onnx.ModelProto:
    return _model([_n("Add", ["x", "b"], ["y"]), _n("Relu", ["x"], ["dead"])], initial=[_ONE])


@_odd
def input_is_output() -> onnx.ModelProto:
    return _model([_n("Relu", ["x"], ["y"])], outputs=[_info("x"), _info("y")])


@_odd
def weight_is_output() -> onnx.ModelProto:
    return _model([_n("Add", ["x", "b"], ["y"])], initial=[_ONE], outputs=[_info("y"), _info("b", (1, 3, 1, 1))])


@_odd
def no_nodes() -> onnx.ModelProto:
    return _model([], outputs=[_info("x")])


@_odd
def wrong_output_shape() -> onnx.ModelProto:
    return _add(outputs=[_info("y", (7, 3, 4, 4))])


@_odd
def wrong_output_rank() -> onnx.ModelProto:
    return _add(outputs=[_info("y", ("n", "m"))])


@_odd
def wrong_intermediate_shape() -> onnx.ModelProto:
    shape = _model([_n("Add", ["x", "b"], ["a"]), _n("Relu", ["a"], ["y"])], initial=[_ONE])
    shape.graph.value_info.append(_info("a", (9, 9, 9, 9)))
    return shape


@_odd
def open_sizes_by_words() -> onnx.ModelProto:
    return _add(inputs=[_info("x", ("?", 3, "?", "-1"))])


@_odd
def negative_sizes() -> onnx.ModelProto:
    return _add(inputs=[_info("x", (-1, 3, -1, -1))])


@_odd
def domain_by_its_long_name() -> onnx.ModelProto:
    name = _add()
    name.opset_import[0].domain = "ai.onnx"
    name.graph.node[0].domain = "ai.onnx"
    return name


@_odd
def domain_imported_twice() -> onnx.ModelProto:
    twice = _add()
    twice.opset_import.append(h.make_opsetid("ai.onnx", 17))
    return twice


@_odd
def unknown_domain_imported() -> onnx.ModelProto:
    return _add(domains={"org.nobody": 3})


@_odd
def ml_domain_not_imported() -> onnx.ModelProto:
    return _model([_n("Binarizer", ["x"], ["y"], domain="ai.onnx.ml", threshold=0.1)])


@_odd
def old_ir() -> onnx.ModelProto:
    return _model([_n("Relu", ["x"], ["y"])], opset=6, ir=3)


@_odd
def batch_norm_that_trains() -> onnx.ModelProto:
    names = ["scale", "bias", "mean", "var"]
    initial = [numpy_helper.from_array(np.full(3, i + 1, np.float32), name) for i, name in enumerate(names)]
    outputs = ["y", "new_mean", "new_var"]
    node = _n("BatchNormalization", ["x", *names], outputs, training_mode=1)
    return _model([node], initial=initial, outputs=[_info(name, None) for name in outputs])


@_odd
def dropout_with_a_mask() -> onnx.ModelProto:
    outputs = [_info("y"), _info("mask", None, TensorProto.BOOL)]
    return _model([_n("Dropout", ["x"], ["y", "mask"])], outputs=outputs)


@_odd
def dropout_that_trains_at_ratio_zero() -> onnx.ModelProto:
    initial = [numpy_helper.from_array(np.float32(0), "r"), numpy_helper.from_array(np.array(True), "t")]
    return _model([_n("Dropout", ["x", "r", "t"], ["y"])], initial=initial)


@_odd
def local_function() -> onnx.ModelProto:
    function = _model([_n("Twice", ["x"], ["y"], domain="mine", name="call")], domains={"mine": 1})
    body = [_n("Add", ["p", "p"], ["q"])]
    function.functions.append(h.make_function("mine", "Twice", ["p"], ["q"], body, [h.make_opsetid("", 17)]))
    return function


@_odd
def local_function_of_a_standard_name() -> onnx.ModelProto:
    function = _model([_n("Swish2", ["x"], ["y"], domain="mine", name="call")], domains={"mine": 1})
    body = [_n("Sigmoid", ["p"], ["s"]), _n("Mul", ["p", "s"], ["q"])]
    function.functions.append(h.make_function("mine", "Swish2", ["p"], ["q"], body, [h.make_opsetid("", 17)]))
    return function


@_odd
def branches_that_read_outer_values() -> onnx.ModelProto:
    then = h.make_graph([_n("Add", ["x", "b"], ["t"])], "then", [], [_info("t", None)])
    other = h.make_graph([_n("Mul", ["x", "b"], ["e"])], "else", [], [_info("e", None)])
    node = _n("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    return _model([node], initial=[_ONE], inputs=[_info("x"), _info("flag", (), TensorProto.BOOL)])


@_odd
def subgraph_output_without_a_type() -> onnx.ModelProto:
    made = branches_that_read_outer_values()
    for attribute in made.graph.node[0].attribute:
        attribute.g.output[0].ClearField("type")
    return made


@_odd
def same_names_in_both_branches() -> onnx.ModelProto:
    then = h.make_graph([_n("Add", ["x", "b"], ["r"], name="n")], "g", [], [_info("r", None)])
    other = h.make_graph([_n("Mul", ["x", "b"], ["r"], name="n")], "g", [], [_info("r", None)])
    node = _n("If", ["flag"], ["y"], then_branch=then, else_branch=other, name="n")
    return _model([node], initial=[_ONE], inputs=[_info("x"), _info("flag", (), TensorProto.BOOL)])


@_odd
def empty_optional_inputs() -> onnx.ModelProto:
    high = numpy_helper.from_array(np.float32(0.5), "high")
    return _model([_n("Clip", ["x", "", "high"], ["y"])], initial=[high])


@_odd
def empty_inputs_at_the_end() -> onnx.ModelProto:
    return _model([_n("Clip", ["x", "", ""], ["y"])])


@_odd
def unnamed_output_of_a_node() -> onnx.ModelProto:
    return _model([_n("MaxPool", ["x"], ["y", ""], kernel_shape=[2, 2])])


@_odd
def metadata_and_doc_strings() -> onnx.ModelProto:
    strings = _add()
    strings.doc_string = "d" * 1000
    strings.metadata_props.add(key="k", value="1")
    strings.metadata_props.add(key="k", value="2")
    strings.producer_name, strings.domain, strings.model_version = "", "", -5
    return strings


@_odd
def data_by_fields_of_its_type() -> onnx.ModelProto:
    tensor = h.make_tensor("b", TensorProto.FLOAT, (1, 3, 1, 1), [1.0, 2.0, 3.0])
    return _model([_n("Add", ["x", "b"], ["y"])], initial=[tensor])


@_odd
def weight_without_elements() -> onnx.ModelProto:
    empty = numpy_helper.from_array(np.zeros((1, 0, 4, 4), np.float32), "none")
    return _model([_n("Concat", ["x", "none"], ["y"], axis=1)], initial=[empty])


@_odd
def sparse_weight() -> onnx.ModelProto:
    values = h.make_tensor("b", TensorProto.FLOAT, [2], [4.0, 5.0])
    indices = h.make_tensor("at", TensorProto.INT64, [2], [1, 14])
    weight = _model([_n("MatMul", ["x", "b"], ["y"])])
    weight.graph.sparse_initializer.append(h.make_sparse_tensor(values, indices, [4, 4]))
    return weight


@_odd
def constant_by_each_attribute() -> onnx.ModelProto:
    nodes = [
        _n("Constant", [], ["c"], value_float=2.0),
        _n("Constant", [], ["i"], value_ints=[1, 48]),
        _n("Mul", ["x", "c"], ["m"]),
        _n("Reshape", ["m", "i"], ["y"]),
    ]
    return _model(nodes)


@_odd
def names_that_are_no_identifiers() -> onnx.ModelProto:
    nodes = [_n("Add", ["x", "b"], ["a/b:0 ünï"], name="scope/add:0;1,2"), _n("Relu", ["a/b:0 ünï"], ["y"], name="é")]
    return _model(nodes, initial=[_ONE])


@_odd
def inputs_listed_twice_as_value_info() -> onnx.ModelProto:
    info = _add()
    info.graph.value_info.append(_info("x"))
    info.graph.value_info.append(_info("y"))
    return info


@_odd
def one_output_listed_twice() -> onnx.ModelProto:
    return _add(outputs=[_info("y"), _info("y")])


@_odd
def newest_opset_with_old_ir() -> onnx.ModelProto:
    return _model([_n("Relu", ["x"], ["y"])], opset=21, ir=8)


@_odd
def empty_value_info() -> onnx.ModelProto:
    info = _add()
    info.graph.value_info.add()
    return info


@_odd
def training_info() -> onnx.ModelProto:
    info = _add()
    info.training_info.add()
    return info


@_odd
def quantization_annotation() -> onnx.ModelProto:
    annotation = _add()
    annotation.graph.quantization_annotation.add().tensor_name = "x"
    return annotation


@_odd
def input_without_a_rank() -> onnx.ModelProto:
    return _add(inputs=[_info("x", None)])


@_odd
def subgraph_that_reads_a_later_node() -> onnx.ModelProto:
    then = h.make_graph([_n("Add", ["late", "b"], ["t"])], "then", [], [_info("t", None)])
    other = h.make_graph([_n("Mul", ["x", "b"], ["e"])], "else", [], [_info("e", None)])
    node = _n("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    late = _n("Relu", ["x"], ["late"])
    return _model([node, late], initial=[_ONE], inputs=[_info("x"), _info("flag", (), TensorProto.BOOL)])


@_odd
def contrib_operator_in_a_branch() -> onnx.ModelProto:
    then = h.make_graph([_n("ParametricSoftplus", ["x"], ["t"], alpha=1.0, beta=1.0)], "t", [], [_info("t", None)])
    other = h.make_graph([_n("Gelu", ["x"], ["e"], domain="com.microsoft")], "e", [], [_info("e", None)])
    node = _n("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    return _model([node], opset=9, ir=4, inputs=[_info("x"), _info("flag", (), TensorProto.BOOL)])


@_odd
def contrib_operator_in_a_function() -> onnx.ModelProto:
    function = _model([_n("Mine", ["x"], ["y"], domain="mine")], domains={"mine": 1, "com.microsoft": 1})
    body = [_n("Gelu", ["p"], ["q"], domain="com.microsoft")]
    imports = [h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)]
    function.functions.append(h.make_function("mine", "Mine", ["p"], ["q"], body, imports))
    return function


@_odd
def weight_with_its_data_twice() -> onnx.ModelProto:
    twice = _add()
    twice.graph.initializer[0].float_data.extend([1.0, 2.0, 3.0])
    return twice
