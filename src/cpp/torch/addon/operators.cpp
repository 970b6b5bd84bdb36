// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_rms_norm_backward_cuda_dispatch.h>
#include <ATen/ops/_fused_rms_norm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/_fused_rms_norm_cuda_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cuda_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_backward_cuda_dispatch.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_cuda_dispatch.h>
#include <ATen/ops/scaled_dot_product_attention_compositeimplicitautograd_dispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <limits>
#include <string>
#include <tuple>

#include "guard.h"

// PyTorch's own kernels of an operator, by the dispatch key.
#ifdef XPURUNTIME_TORCH_WITH_CUDA
#define XPURUNTIME_CPU_AND_CUDA(function)                                                \
  static Signature* native(c10::DispatchKey key) {                                       \
    return key == c10::DispatchKey::CPU    ? static_cast<Signature*>(at::cpu::function)  \
           : key == c10::DispatchKey::CUDA ? static_cast<Signature*>(at::cuda::function) \
                                           : nullptr;                                    \
  }
#define XPURUNTIME_ON_CUDA(function) static_cast<Signature*>(at::cuda::function)
#else
#define XPURUNTIME_CPU_AND_CUDA(function)                                                       \
  static Signature* native(c10::DispatchKey key) {                                              \
    return key == c10::DispatchKey::CPU ? static_cast<Signature*>(at::cpu::function) : nullptr; \
  }
#define XPURUNTIME_ON_CUDA(function) nullptr
#endif

namespace xpuruntime::torch_addon {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// --- matrix products

std::optional<Tensor> our_product(PyObject* place, PyObject* a, PyObject* b, PyObject* c,
                                  PyObject* out) {
  static PyObject* const op = imported("xpuruntime._core", "op_matmul");
  static PyObject* const deterministic = py::str("deterministic").release().ptr();
  // PyTorch's switch may change between two calls; the place is for one setting of it.
  const py::object wanted = checked(PyObject_GetAttr(place, deterministic));
  if ((wanted.ptr() == Py_True) != at::globalContext().deterministicAlgorithms()) return {};
  // place, a, b, bias, scale_a, scale_b, out, activation, out_dtype, phase, stream
  const std::array<PyObject*, 11> all = {
      place, a, b, c, Py_None, Py_None, out, Py_None, Py_None, core().phase(), Py_None};
  const py::object done = call_core(op, all);
  if (!done) return {};
  return to_tensor(done.ptr(), "mm");
}

template <std::size_t kAddends, bool kHasOut>
struct Product : AnyOperator {
  // (c,) a, b(, beta, alpha)(, out)
  static constexpr std::size_t kOut = kAddends == 0 ? 2 : 5;
  static constexpr const char* keyword(std::size_t at) {
    if (kHasOut && at == kOut) return "out";
    if (kAddends == 1 && at == 3) return "beta";
    return kAddends == 1 && at == 4 ? "alpha" : nullptr;
  }
  template <typename Objects, typename... Arguments>
  static std::optional<Tensor> xrt_kernel(PyObject* place, const Objects& given,
                                          const Arguments&... /*arguments*/) {
    PyObject* out = Py_None;
    PyObject* c = Py_None;
    if constexpr (kHasOut) out = given[kOut].ptr();
    if constexpr (kAddends == 1) c = given[0].ptr();
    return our_product(place, given[kAddends].ptr(), given[kAddends + 1].ptr(), c, out);
  }
};

#define XPURUNTIME_PRODUCT(type, text, addends, into, function, ...) \
  struct type : Product<addends, into> {                             \
    using Signature = __VA_ARGS__;                                   \
    static constexpr const char* kName = text;                       \
    XPURUNTIME_CPU_AND_CUDA(function)                                \
    template <typename... Arguments>                                 \
    static std::string mark(const Arguments&... /*arguments*/) {     \
      return text;                                                   \
    }                                                                \
  };

using Multiply = Tensor(const Tensor&, const Tensor&);
using MultiplyInto = Tensor&(const Tensor&, const Tensor&, Tensor&);
using Add = Tensor(const Tensor&, const Tensor&, const Tensor&, const at::Scalar&,
                   const at::Scalar&);
using AddInto = Tensor&(const Tensor&, const Tensor&, const Tensor&, const at::Scalar&,
                        const at::Scalar&, Tensor&);
XPURUNTIME_PRODUCT(Mm, "mm", 0, false, mm, Multiply)
XPURUNTIME_PRODUCT(MmOut, "mm.out", 0, true, mm_outf, MultiplyInto)
XPURUNTIME_PRODUCT(Bmm, "bmm", 0, false, bmm, Multiply)
XPURUNTIME_PRODUCT(BmmOut, "bmm.out", 0, true, bmm_outf, MultiplyInto)
XPURUNTIME_PRODUCT(Addmm, "addmm", 1, false, addmm, Add)
XPURUNTIME_PRODUCT(AddmmOut, "addmm.out", 1, true, addmm_outf, AddInto)
XPURUNTIME_PRODUCT(Baddbmm, "baddbmm", 1, false, baddbmm, Add)
XPURUNTIME_PRODUCT(BaddbmmOut, "baddbmm.out", 1, true, baddbmm_outf, AddInto)

// --- norms

std::string norm_mark(const char* name, at::IntArrayRef shape, const bool* mask,
                      std::size_t count) {
  std::string made(name);
  if (mask != nullptr) made += ';';
  for (std::size_t i = 0; i < count; ++i) made += mask[i] ? '1' : '0';
  for (const auto size : shape) made += ';' + std::to_string(size);
  return made;
}

// Statistics: xpuruntime's kernels have [..], and PyTorch's [.., 1].
py::object our_stats(const Tensor& stats) { return to_python(stats.squeeze(-1)); }

template <std::size_t... kAt>
auto norm_results(const py::object& done, std::index_sequence<kAt...> /*statistics*/) {
  const auto at = [&](std::size_t i) {
    return to_tensor(PyTuple_GET_ITEM(done.ptr(), static_cast<Py_ssize_t>(i)), "norm");
  };
  return std::make_tuple(at(0), at(kAt + 1).unsqueeze(-1)...);
}

template <std::size_t kStatistics>
auto our_norm(PyObject* place, bool rms, PyObject* x, PyObject* weight, PyObject* bias,
              const py::object& eps) {
  static PyObject* const op = imported("xpuruntime._core", "op_norm");
  using Made = decltype(norm_results({}, std::make_index_sequence<kStatistics>()));
  // place, rms, x, residual, weight, bias, ..., want_stats, eps, phase, stream
  const std::array<PyObject*, 13> all = {place,     rms ? Py_True : Py_False,
                                         x,         Py_None,
                                         weight,    bias,
                                         Py_None,   Py_None,
                                         Py_False,  Py_True,
                                         eps.ptr(), core().phase(),
                                         Py_None};
  const py::object done = call_core(op, all);
  if (!done) return std::optional<Made>();
  return std::optional<Made>(norm_results(done, std::make_index_sequence<kStatistics>()));
}

bool our_norm_backward(PyObject* place, bool rms, PyObject* grad, PyObject* x, PyObject* weight,
                       const Tensor* mean, const Tensor& rstd, const bool* mask, Tensor* made) {
  static PyObject* const op = imported("xpuruntime._core", "op_norm_backward");
  const bool want_bias = !rms && mask[2];
  const py::object of_mean = mean == nullptr ? py::object(py::none()) : our_stats(*mean);
  const py::object of_rstd = our_stats(rstd);
  const auto flag = [](bool value) { return value ? Py_True : Py_False; };
  const std::array<PyObject*, 12> all = {
      place,           flag(rms),     grad,    x,       weight,
      of_mean.ptr(),   of_rstd.ptr(), Py_None, Py_None, flag(mask[1]),
      flag(want_bias), Py_None};
  const py::object done = call_core(op, all);
  if (!done) return false;
  const bool many = mask[1] || want_bias;
  const auto at = [&](Py_ssize_t i) {
    return to_tensor(many ? PyTuple_GET_ITEM(done.ptr(), i) : done.ptr(), "norm");
  };
  if (mask[0]) made[0] = at(0);
  if (mask[1]) made[1] = at(1);
  if (want_bias) made[2] = at(PyTuple_GET_SIZE(done.ptr()) - 1);
  return true;
}

struct LayerNorm : AnyOperator {
  using Signature = Three(const Tensor&, at::IntArrayRef, const OptionalTensor&,
                          const OptionalTensor&, double);
  static constexpr const char* kName = "native_layer_norm";
  XPURUNTIME_CPU_AND_CUDA(native_layer_norm)
  static std::string mark(const Tensor& /*x*/, at::IntArrayRef shape, const OptionalTensor&,
                          const OptionalTensor&, double /*eps*/) {
    return norm_mark(kName, shape, nullptr, 0);
  }
  template <typename Objects, typename... Arguments>
  static std::optional<Three> xrt_kernel(PyObject* place, const Objects& given,
                                         const Arguments&...) {
    return our_norm<2>(place, false, given[0].ptr(), given[2].ptr(), given[3].ptr(), given[4]);
  }
};

struct LayerNormBackward : AnyOperator {
  using Mask = std::array<bool, 3>;
  using Signature = Three(const Tensor&, const Tensor&, at::IntArrayRef, const Tensor&,
                          const Tensor&, const OptionalTensor&, const OptionalTensor&, Mask);
  static constexpr const char* kName = "native_layer_norm_backward";
  static constexpr const char* kPhase = "backward";
  XPURUNTIME_CPU_AND_CUDA(native_layer_norm_backward)
  static std::string mark(const Tensor&, const Tensor&, at::IntArrayRef shape, const Tensor&,
                          const Tensor&, const OptionalTensor&, const OptionalTensor&, Mask mask) {
    return norm_mark(kName, shape, mask.data(), mask.size());
  }
  template <typename Objects>
  static std::optional<Three> xrt_kernel(PyObject* place, const Objects& given, const Tensor&,
                                         const Tensor&, at::IntArrayRef, const Tensor& mean,
                                         const Tensor& rstd, const OptionalTensor&,
                                         const OptionalTensor&, Mask mask) {
    std::array<Tensor, 3> made;
    if (!our_norm_backward(place, false, given[0].ptr(), given[1].ptr(), given[5].ptr(), &mean,
                           rstd, mask.data(), made.data())) {
      return {};
    }
    return Three(made[0], made[1], made[2]);
  }
};

struct RmsNorm : AnyOperator {
  using Signature = Two(const Tensor&, at::IntArrayRef, const OptionalTensor&,
                        std::optional<double>);
  static constexpr const char* kName = "_fused_rms_norm";
  static Signature* native(c10::DispatchKey key) {
    // Off CUDA it is made of other operations.
    return key == c10::DispatchKey::CPU    ? at::compositeimplicitautograd::_fused_rms_norm
           : key == c10::DispatchKey::CUDA ? XPURUNTIME_ON_CUDA(_fused_rms_norm)
                                           : nullptr;
  }
  static std::string mark(const Tensor&, at::IntArrayRef shape, const OptionalTensor&,
                          const std::optional<double>&) {
    return norm_mark(kName, shape, nullptr, 0);
  }
  template <typename Objects>
  static std::optional<Two> xrt_kernel(PyObject* place, const Objects& given, const Tensor& x,
                                       at::IntArrayRef, const OptionalTensor&,
                                       const std::optional<double>& eps) {
    const double wanted =
        eps.value_or(x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                    : std::numeric_limits<float>::epsilon());
    return our_norm<1>(place, true, given[0].ptr(), given[2].ptr(), Py_None, py::float_(wanted));
  }
};

struct RmsNormBackward : AnyOperator {
  using Mask = std::array<bool, 2>;
  using Signature = Two(const Tensor&, const Tensor&, at::IntArrayRef, const Tensor&,
                        const OptionalTensor&, Mask);
  static constexpr const char* kName = "_fused_rms_norm_backward";
  static constexpr const char* kPhase = "backward";
  static Signature* native(c10::DispatchKey key) {
    return key == c10::DispatchKey::CUDA ? XPURUNTIME_ON_CUDA(_fused_rms_norm_backward) : nullptr;
  }
  static std::string mark(const Tensor&, const Tensor&, at::IntArrayRef shape, const Tensor&,
                          const OptionalTensor&, Mask mask) {
    return norm_mark(kName, shape, mask.data(), mask.size());
  }
  template <typename Objects>
  static std::optional<Two> xrt_kernel(PyObject* place, const Objects& given, const Tensor&,
                                       const Tensor&, at::IntArrayRef, const Tensor& rstd,
                                       const OptionalTensor&, Mask mask) {
    std::array<Tensor, 3> made;
    if (!our_norm_backward(place, true, given[0].ptr(), given[1].ptr(), given[4].ptr(), nullptr,
                           rstd, mask.data(), made.data())) {
      return {};
    }
    return Two(made[0], made[1]);
  }
};

// --- attention

struct Attention : AnyOperator {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                           double, bool, std::optional<double>, bool);
  static constexpr const char* kName = "scaled_dot_product_attention";
  static constexpr bool kScopesBackends = true;
  static constexpr const char* keyword(std::size_t at) {
    return at == 6 ? "scale" : at == 7 ? "enable_gqa" : nullptr;
  }
  static Signature* native(c10::DispatchKey key) {
    return key == c10::DispatchKey::CompositeImplicitAutograd
               ? at::compositeimplicitautograd::scaled_dot_product_attention
               : nullptr;
  }

  // As xpuruntime.pytorch.dispatch.overrides.attention writes them.
  static std::uint32_t flags(const Tensor& query, const Tensor& key, const Tensor& value,
                             const OptionalTensor& mask, double dropout, bool causal,
                             bool grouped) {
    const bool records = at::GradMode::is_enabled();
    const auto bit = [](bool flag, unsigned at) { return (flag ? 1U : 0U) << at; };
    const bool needs = query.requires_grad() || key.requires_grad() || value.requires_grad();
    const bool learns = mask && mask->defined() && mask->requires_grad();
    return (dropout == 0  ? 0U
            : dropout < 1 ? 1U
                          : 2U) |
           bit(causal, 2) | bit(grouped, 3) | bit(records && needs, 4) | bit(records && learns, 5) |
           bit(at::globalContext().deterministicAlgorithms(), 6);
  }
  static bool see(Facts& facts, const Tensor& query, const Tensor& key, const Tensor& value,
                  const OptionalTensor& mask, double dropout, bool causal,
                  const std::optional<double>& /*scale*/, bool grouped) {
    if (c10::impl::TorchDispatchModeTLS::any_modes_set(false)) return false;
    if (!is_plain(query) || !is_plain(key) || !is_plain(value)) return false;
    return facts.add(flags(query, key, value, mask, dropout, causal, grouped)) &&
           facts.add(query) && facts.add(key) && facts.add(value) && facts.see(mask);
  }
  static std::string mark(const Tensor& query, const Tensor& key, const Tensor& value,
                          const OptionalTensor& mask, double dropout, bool causal,
                          const std::optional<double>& /*scale*/, bool grouped) {
    return "sdpa;" + std::to_string(flags(query, key, value, mask, dropout, causal, grouped));
  }
  // Of a call whose gradient nobody asks for, and that drops nothing.
  template <typename Objects>
  static std::optional<Tensor> xrt_kernel(PyObject* place, const Objects& given,
                                          const Tensor& query, const Tensor&, const Tensor&,
                                          const OptionalTensor&, double, bool causal,
                                          const std::optional<double>&, bool) {
    static PyObject* const op = imported("xpuruntime._core", "op_attention");
    static PyObject* const top_left = py::str("top_left").release().ptr();
    static PyObject* const transforms =
        imported("xpuruntime.pytorch.attention.limits", "transforms_and_tangents");
    // What maps or differentiates the call looks on in Python.
    if (py::len(checked(PyObject_CallNoArgs(transforms))) > 0) return {};
    const Tensor out = at::empty_like(query);
    const py::object of_out = to_python(out);
    const py::float_ no_dropout(0.0);
    // place, q, k, v, mask, rng, out, want_lse, causal, scale, dropout_p, phase, stream
    const std::array<PyObject*, 13> all = {
        place,          given[0].ptr(),   given[1].ptr(),
        given[2].ptr(), given[3].ptr(),   Py_None,
        of_out.ptr(),   Py_False,         causal ? top_left : Py_False,
        given[6].ptr(), no_dropout.ptr(), core().phase(),
        Py_None};
    if (!call_core(op, all)) return {};
    return out;
  }
};

template <typename Op>
std::optional<c10::KernelFunction> kernel_of(c10::DispatchKey key, Guard& guard) {
  auto* const native = Op::native(key);
  if (native == nullptr) return {};
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel<Op>>(
      std::make_unique<Kernel<Op>>(guard, native));
}

template <typename... Ops>
std::optional<c10::KernelFunction> find_kernel(const std::string& name, c10::DispatchKey key,
                                               Guard& guard) {
  std::optional<c10::KernelFunction> found;
  ((name == Ops::kName ? void(found = kernel_of<Ops>(key, guard)) : void()), ...);
  return found;
}

}  // namespace

std::optional<c10::KernelFunction> kernel_for(const std::string& name, c10::DispatchKey key,
                                              Guard& guard) {
  return find_kernel<Mm, MmOut, Bmm, BmmOut, Addmm, AddmmOut, Baddbmm, BaddbmmOut, LayerNorm,
                     LayerNormBackward, RmsNorm, RmsNormBackward, Attention>(name, key, guard);
}

}  // namespace xpuruntime::torch_addon
