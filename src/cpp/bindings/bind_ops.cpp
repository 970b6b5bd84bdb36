// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
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

// The parameters of each function, in the order in which Python passes them; `_core.OP_PARAMETERS`
// in Python, and the stubs have the same.
constexpr std::array kMatmul{"context", "a",          "b",         "bias",  "scale_a", "scale_b",
                             "out",     "activation", "out_dtype", "phase", "stream"};
constexpr std::array kAttention{"context",   "q",     "k",          "v",         "mask",
                                "rng",       "out",   "return_lse", "is_causal", "scale",
                                "dropout_p", "phase", "stream"};
constexpr std::array kAttentionBackward{
    "context", "grad_out", "q",      "k",      "v",         "out",   "lse",       "mask",
    "rng",     "grad_q",   "grad_k", "grad_v", "is_causal", "scale", "dropout_p", "stream"};
constexpr std::array kNorm{"context", "rms",   "x",       "residual",   "weight",
                           "bias",    "out",   "sum_out", "return_sum", "return_stats",
                           "eps",     "phase", "stream"};
constexpr std::array kNormBackward{"context", "rms",         "grad_out",  "x",
                                   "weight",  "mean",        "rstd",      "grad_sum",
                                   "grad_x",  "want_weight", "want_bias", "stream"};
constexpr std::array kConv{"context", "x",        "weight", "bias",       "out",   "stride",
                           "padding", "dilation", "groups", "activation", "phase", "stream"};
constexpr std::array kConvInputGradient{"context", "grad_out", "weight",   "grad_x", "input_size",
                                        "stride",  "padding",  "dilation", "groups", "stream"};
constexpr std::array kConvWeightGradient{"context",     "grad_out", "x",       "grad_weight",
                                         "kernel_size", "stride",   "padding", "dilation",
                                         "groups",      "stream"};

py::object matmul(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kMatmul> args(values, count, "op_matmul");
  CallSite& site = *args.context().site;
  MatmulOptions options;
  options.allow_tf32 = args.context().allow_tf32;
  options.deterministic = args.context().deterministic;
  const auto inputs = args.arrays<"a", "b", "bias", "scale_a", "scale_b">();
  const auto& [a, b, bias, scale_a, scale_b] = inputs;
  options.activation = argument::activation(args.object<"activation">());
  options.out_dtype = argument::out_dtype(args.object<"out_dtype">());
  options.phase = argument::phase(args.object<"phase">());
  OpCall call = make_matmul(
      {a.operand(), b.operand(), bias.operand(), scale_a.operand(), scale_b.operand()}, options);
  return run_call(site, call, inputs, {args.object<"out">()}, args.object<"stream">());
}

template <const auto& kParameters>
AttentionOptions attention_options(const Arguments<kParameters>& args) {
  AttentionOptions options;
  options.allow_tf32 = args.context().allow_tf32;
  options.deterministic = args.context().deterministic;
  options.causal = argument::causal(args.template object<"is_causal">());
  options.scale = args.template optional_number<"scale">();
  options.dropout_p = static_cast<float>(args.template number<"dropout_p">());
  return options;
}

py::object attention(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kAttention> args(values, count, "op_attention");
  CallSite& site = *args.context().site;
  const auto inputs = args.arrays<"q", "k", "v", "mask", "rng">();
  const auto& [q, k, v, mask, rng] = inputs;
  AttentionOptions options = attention_options(args);
  options.want_lse = args.flag<"return_lse">();
  options.phase = argument::phase(args.object<"phase">());
  OpCall call = make_attention(
      {q.operand(), k.operand(), v.operand(), mask.operand(), rng.operand()}, options);
  return run_call(site, call, inputs, {args.object<"out">()}, args.object<"stream">());
}

py::object attention_backward(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kAttentionBackward> args(values, count, "op_attention_backward");
  CallSite& site = *args.context().site;
  const auto inputs = args.arrays<"grad_out", "q", "k", "v", "out", "lse", "mask", "rng">();
  const auto& [grad_out, q, k, v, out, lse, mask, rng] = inputs;
  const AttentionOptions options = attention_options(args);
  OpCall call = make_attention_backward(
      grad_out.operand(), {q.operand(), k.operand(), v.operand(), mask.operand(), rng.operand()},
      out.operand(), lse.operand(), options);
  return run_call(site, call, inputs,
                  {args.object<"grad_q">(), args.object<"grad_k">(), args.object<"grad_v">()},
                  args.object<"stream">());
}

py::object norm(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kNorm> args(values, count, "op_norm");
  CallSite& site = *args.context().site;
  NormOptions options;
  options.deterministic = args.context().deterministic;
  options.rms = args.flag<"rms">();
  const auto inputs = args.arrays<"x", "residual", "weight", "bias">();
  const auto& [x, residual, weight, bias] = inputs;
  options.want_sum = args.flag<"return_sum">();
  options.want_stats = args.flag<"return_stats">();
  options.epsilon = args.number<"eps">();
  options.phase = argument::phase(args.object<"phase">());
  OpCall call =
      make_norm({x.operand(), residual.operand(), weight.operand(), bias.operand()}, options);
  PyObject* const sum_out = options.want_sum ? args.object<"sum_out">() : Py_None;
  return run_call(site, call, inputs, {args.object<"out">(), sum_out}, args.object<"stream">());
}

py::object norm_backward(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kNormBackward> args(values, count, "op_norm_backward");
  CallSite& site = *args.context().site;
  NormBackwardOptions options;
  options.deterministic = args.context().deterministic;
  options.rms = args.flag<"rms">();
  const auto inputs = args.arrays<"grad_out", "x", "weight", "mean", "rstd", "grad_sum">();
  const auto& [grad_y, x, weight, mean, rstd, grad_sum] = inputs;
  options.want_weight = args.flag<"want_weight">();
  options.want_bias = args.flag<"want_bias">();
  options.bias_dtype = x.operand().dtype;
  OpCall call = make_norm_backward({grad_y.operand(), x.operand(), weight.operand(), mean.operand(),
                                    rstd.operand(), grad_sum.operand()},
                                   options);
  return run_call(site, call, inputs, {args.object<"grad_x">()}, args.object<"stream">());
}

template <const auto& kParameters>
ConvOptions conv_options(const Arguments<kParameters>& args) {
  ConvOptions options;
  options.allow_tf32 = args.context().allow_tf32;
  options.deterministic = args.context().deterministic;
  options.stride = args.template integers<"stride", 2>();
  options.padding = args.template integers<"padding", 4>();
  options.dilation = args.template integers<"dilation", 2>();
  options.groups = args.template integers<"groups", 1>()[0];
  return options;
}

py::object conv(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kConv> args(values, count, "op_conv2d");
  CallSite& site = *args.context().site;
  const auto inputs = args.arrays<"x", "weight", "bias">();
  const auto& [x, weight, bias] = inputs;
  ConvOptions options = conv_options(args);
  options.activation = argument::activation(args.object<"activation">());
  options.phase = argument::phase(args.object<"phase">());
  OpCall call = make_conv({x.operand(), weight.operand(), bias.operand()}, options);
  return run_call(site, call, inputs, {args.object<"out">()}, args.object<"stream">());
}

py::object conv_input_gradient(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kConvInputGradient> args(values, count, "op_conv2d_input_gradient");
  CallSite& site = *args.context().site;
  const auto inputs = args.arrays<"grad_out", "weight">();
  const auto& [grad_out, weight] = inputs;
  const auto size = args.integers<"input_size", 2>();
  const ConvOptions options = conv_options(args);
  OpCall call = make_conv_input_gradient(grad_out.operand(), weight.operand(), size, options);
  return run_call(site, call, inputs, {args.object<"grad_x">()}, args.object<"stream">());
}

py::object conv_weight_gradient(PyObject* const* values, Py_ssize_t count) {
  const Arguments<kConvWeightGradient> args(values, count, "op_conv2d_weight_gradient");
  CallSite& site = *args.context().site;
  const auto inputs = args.arrays<"grad_out", "x">();
  const auto& [grad_out, x] = inputs;
  const auto size = args.integers<"kernel_size", 2>();
  const ConvOptions options = conv_options(args);
  OpCall call = make_conv_weight_gradient(grad_out.operand(), x.operand(), size, options);
  return run_call(site, call, inputs, {args.object<"grad_weight">()}, args.object<"stream">());
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

struct Method {
  PyMethodDef definition;
  std::span<const char* const> parameters;
};

template <py::object (*kFunction)(PyObject* const*, Py_ssize_t)>
Method method(const char* name, std::span<const char* const> parameters, const char* text) {
  return {{name, as_method<kFunction>(), METH_FASTCALL, text}, parameters};
}

Method methods[] = {
    method<matmul>("op_matmul", kMatmul, "For xpuruntime.ops.matmul."),
    method<attention>("op_attention", kAttention, "For xpuruntime.ops.attention."),
    method<attention_backward>("op_attention_backward", kAttentionBackward,
                               "For xpuruntime.ops.attention_backward."),
    method<norm>("op_norm", kNorm, "For the norms of xpuruntime.ops."),
    method<norm_backward>("op_norm_backward", kNormBackward, "For the norms of xpuruntime.ops."),
    method<conv>("op_conv2d", kConv, "For xpuruntime.ops.conv2d."),
    method<conv_input_gradient>("op_conv2d_input_gradient", kConvInputGradient,
                                "For xpuruntime.ops.conv2d_input_gradient."),
    method<conv_weight_gradient>("op_conv2d_weight_gradient", kConvWeightGradient,
                                 "For xpuruntime.ops.conv2d_weight_gradient."),
};

}  // namespace

void bind_ops(py::module_& module) {
  bind_call_context(module);
  py::dict parameters;
  for (Method& one : methods) {
    const char* const name = one.definition.ml_name;
    module.attr(name) =
        py::reinterpret_steal<py::object>(PyCFunction_New(&one.definition, nullptr));
    py::list names;
    for (const char* const parameter : one.parameters) names.append(parameter);
    parameters[name] = py::tuple(names);
  }
  module.attr("OP_PARAMETERS") = parameters;
  module.def("measure_choose", measure_choose,
             "Nanoseconds of a choice that was made before, by what is chosen for.");
}

}  // namespace xpuruntime::bindings
