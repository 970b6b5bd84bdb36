// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>

#include "array_argument.h"
#include "bind.h"
#include "gil.h"
#include "op_arguments.h"
#include "xpuruntime/attention_op.h"
#include "xpuruntime/conv_op.h"
#include "xpuruntime/matmul_op.h"
#include "xpuruntime/norm_op.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

py::object matmul(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 11, "matmul");
  const CallPlace place = args.next_place();
  const auto inputs = args.next_arrays({"a", "b", "bias", "scale_a", "scale_b"});
  const auto& [a, b, bias, scale_a, scale_b] = inputs;
  PyObject* const out = args.next();
  MatmulOptions options;
  options.activation = args.next_activation();
  options.out_dtype = args.next_dtype();
  options.allow_tf32 = place.allow_tf32;
  options.deterministic = place.deterministic;
  options.phase = args.next_phase();
  OpCall call = make_matmul(
      {a.operand(), b.operand(), bias.operand(), scale_a.operand(), scale_b.operand()}, options);
  return run_call(place.site, call, inputs, {out}, args.next());
}

AttentionOptions attention_options(PositionalArguments& args, const CallPlace& place) {
  AttentionOptions options;
  options.causal = args.next_causal();
  options.scale = args.next_optional_number("scale");
  options.dropout_p = static_cast<float>(args.next_number("dropout_p"));
  options.allow_tf32 = place.allow_tf32;
  options.deterministic = place.deterministic;
  return options;
}

py::object attention(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 13, "attention");
  const CallPlace place = args.next_place();
  const auto inputs = args.next_arrays({"q", "k", "v", "mask", "rng"});
  const auto& [q, k, v, mask, rng] = inputs;
  PyObject* const out = args.next();
  const bool want_lse = args.next_flag();
  AttentionOptions options = attention_options(args, place);
  options.want_lse = want_lse;
  options.phase = args.next_phase();
  OpCall call = make_attention(
      {q.operand(), k.operand(), v.operand(), mask.operand(), rng.operand()}, options);
  return run_call(place.site, call, inputs, {out}, args.next());
}

py::object attention_backward(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 16, "attention_backward");
  const CallPlace place = args.next_place();
  const auto inputs = args.next_arrays({"grad_out", "q", "k", "v", "out", "lse", "mask", "rng"});
  const auto& [grad_out, q, k, v, out, lse, mask, rng] = inputs;
  PyObject* const grad_q = args.next();
  PyObject* const grad_k = args.next();
  PyObject* const grad_v = args.next();
  const AttentionOptions options = attention_options(args, place);
  OpCall call = make_attention_backward(
      grad_out.operand(), {q.operand(), k.operand(), v.operand(), mask.operand(), rng.operand()},
      out.operand(), lse.operand(), options);
  return run_call(place.site, call, inputs, {grad_q, grad_k, grad_v}, args.next());
}

py::object norm(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 13, "norm");
  const CallPlace place = args.next_place();
  NormOptions options;
  options.rms = args.next_flag();
  const auto inputs = args.next_arrays({"x", "residual", "weight", "bias"});
  const auto& [x, residual, weight, bias] = inputs;
  PyObject* const out = args.next();
  PyObject* const sum_out = args.next();
  options.want_sum = args.next_flag();
  options.want_stats = args.next_flag();
  options.epsilon = args.next_number("eps");
  options.deterministic = place.deterministic;
  options.phase = args.next_phase();
  OpCall call =
      make_norm({x.operand(), residual.operand(), weight.operand(), bias.operand()}, options);
  return run_call(place.site, call, inputs, {out, options.want_sum ? sum_out : Py_None},
                  args.next());
}

py::object norm_backward(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 12, "norm_backward");
  const CallPlace place = args.next_place();
  NormBackwardOptions options;
  options.rms = args.next_flag();
  const auto inputs = args.next_arrays({"grad_out", "x", "weight", "mean", "rstd", "grad_sum"});
  const auto& [grad_y, x, weight, mean, rstd, grad_sum] = inputs;
  PyObject* const grad_x = args.next();
  options.want_weight = args.next_flag();
  options.want_bias = args.next_flag();
  options.deterministic = place.deterministic;
  options.bias_dtype = x.operand().dtype;
  OpCall call = make_norm_backward({grad_y.operand(), x.operand(), weight.operand(), mean.operand(),
                                    rstd.operand(), grad_sum.operand()},
                                   options);
  return run_call(place.site, call, inputs, {grad_x}, args.next());
}

py::object conv(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 12, "conv2d");
  const CallPlace place = args.next_place();
  const auto inputs = args.next_arrays({"x", "weight", "bias"});
  const auto& [x, weight, bias] = inputs;
  PyObject* const out = args.next();
  ConvOptions options;
  options.stride = args.next_integers<2>("stride");
  options.padding = args.next_integers<4>("padding");
  options.dilation = args.next_integers<2>("dilation");
  options.groups = args.next_integers<1>("groups")[0];
  options.activation = args.next_activation();
  options.allow_tf32 = place.allow_tf32;
  options.deterministic = place.deterministic;
  options.phase = args.next_phase();
  OpCall call = make_conv({x.operand(), weight.operand(), bias.operand()}, options);
  return run_call(place.site, call, inputs, {out}, args.next());
}

ConvOptions gradient_options(PositionalArguments& args, const CallPlace& place) {
  ConvOptions options;
  options.stride = args.next_integers<2>("stride");
  options.padding = args.next_integers<4>("padding");
  options.dilation = args.next_integers<2>("dilation");
  options.groups = args.next_integers<1>("groups")[0];
  options.allow_tf32 = place.allow_tf32;
  options.deterministic = place.deterministic;
  return options;
}

py::object conv_input_gradient(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 10, "conv2d_input_gradient");
  const CallPlace place = args.next_place();
  const auto inputs = args.next_arrays({"grad_out", "weight"});
  const auto& [grad_out, weight] = inputs;
  PyObject* const grad_x = args.next();
  const auto size = args.next_integers<2>("input_size");
  const ConvOptions options = gradient_options(args, place);
  OpCall call = make_conv_input_gradient(grad_out.operand(), weight.operand(), size, options);
  return run_call(place.site, call, inputs, {grad_x}, args.next());
}

py::object conv_weight_gradient(PyObject* const* values, Py_ssize_t count) {
  PositionalArguments args(values, count, 10, "conv2d_weight_gradient");
  const CallPlace place = args.next_place();
  const auto inputs = args.next_arrays({"grad_out", "x"});
  const auto& [grad_out, x] = inputs;
  PyObject* const grad_weight = args.next();
  const auto size = args.next_integers<2>("kernel_size");
  const ConvOptions options = gradient_options(args, place);
  OpCall call = make_conv_weight_gradient(grad_out.operand(), x.operand(), size, options);
  return run_call(place.site, call, inputs, {grad_weight}, args.next());
}

Operand described(const char* name, std::initializer_list<std::int64_t> shape, const void* data) {
  Operand operand;
  operand.name = name;
  operand.absent = false;
  operand.dtype = {2, 32, 1};
  operand.data = const_cast<void*>(data);
  operand.rank = static_cast<std::uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), operand.shape.begin());
  set_dense_strides(operand);
  return operand;
}

// Nanoseconds of a choice that was made before.
double time_choose(CallSite& site, const OpDesc& op) {
  constexpr int kCalls = 1'000'000;
  (void)site.choose(op, 0);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) (void)site.choose(op, 0);
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / kCalls;
}

std::map<std::string, double> measure_choose() {
  alignas(256) static const std::array<float, 64> memory{};
  CallSite site(Dispatcher::instance(), std::make_shared<const KernelRules>(), {}, {},
                {"null.null"});
  const auto matrix = [&](const char* name) { return described(name, {4, 4}, memory.data()); };
  const auto heads = [&](const char* name) { return described(name, {1, 2, 4, 4}, memory.data()); };
  OpCall product = make_matmul({matrix("a"), matrix("b"), {}, {}, {}}, {});
  product.set(slots::Matmul::kOut, matrix("out"));
  OpCall gradient =
      make_attention_backward(heads("grad_out"), {heads("q"), heads("k"), heads("v"), {}, {}},
                              heads("out"), described("lse", {1, 2, 4}, memory.data()), {});
  using Slot = slots::AttentionBackward;
  for (const std::size_t slot : {Slot::kGradQ, Slot::kGradK, Slot::kGradV}) {
    gradient.set(slot, heads("gradient"));
  }
  const ReleaseGil unlocked;
  return {{"matmul (3 operands)", time_choose(site, product.desc)},
          {"attention_backward (9 operands)", time_choose(site, gradient.desc)}};
}

template <py::object (*kFunction)(PyObject* const*, Py_ssize_t)>
PyObject* guarded(PyObject*, PyObject* const* values, Py_ssize_t count) noexcept {
  try {
    return kFunction(values, count).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <py::object (*kFunction)(PyObject* const*, Py_ssize_t)>
PyCFunction as_method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(guarded<kFunction>));
}

PyMethodDef methods[] = {
    {"op_matmul", as_method<matmul>(), METH_FASTCALL, "For xpuruntime.ops.matmul."},
    {"op_attention", as_method<attention>(), METH_FASTCALL, "For xpuruntime.ops.attention."},
    {"op_attention_backward", as_method<attention_backward>(), METH_FASTCALL,
     "For xpuruntime.ops.attention_backward."},
    {"op_norm", as_method<norm>(), METH_FASTCALL, "For the norms of xpuruntime.ops."},
    {"op_norm_backward", as_method<norm_backward>(), METH_FASTCALL,
     "For the norms of xpuruntime.ops."},
    {"op_conv2d", as_method<conv>(), METH_FASTCALL, "For xpuruntime.ops.conv2d."},
    {"op_conv2d_input_gradient", as_method<conv_input_gradient>(), METH_FASTCALL,
     "For xpuruntime.ops.conv2d_input_gradient."},
    {"op_conv2d_weight_gradient", as_method<conv_weight_gradient>(), METH_FASTCALL,
     "For xpuruntime.ops.conv2d_weight_gradient."},
};

}  // namespace

void bind_ops(py::module_& module) {
  for (PyMethodDef& method : methods) {
    module.attr(method.ml_name) =
        py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
  }
  module.def("measure_choose", measure_choose,
             "Nanoseconds of a choice that was made before, by what is chosen for.");
}

}  // namespace xpuruntime::bindings
