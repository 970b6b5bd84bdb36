// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "gate_state.h"
#include "operator_kind.h"
#include "torch_cxx.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// Layer norm: x, shape, weight, bias, eps.
using LayerNorm = ThreeTensors (*)(const void*, IntegerList, const OptionalTensor&,
                                   const OptionalTensor&, double);
// grad, x, shape, mean, rstd, weight, bias, mask
using LayerNormBackward = ThreeTensors (*)(const void*, const void*, IntegerList, const void*,
                                           const void*, const OptionalTensor&,
                                           const OptionalTensor&, std::array<bool, 3>);
// RMS norm: x, shape, weight, eps.
using RmsNorm = TwoTensors (*)(const void*, IntegerList, const OptionalTensor&,
                               std::optional<double>);
// grad, x, shape, rstd, weight, mask
using RmsNormBackward = TwoTensors (*)(const void*, const void*, IntegerList, const void*,
                                       const OptionalTensor&, std::array<bool, 2>);

template <typename Tensors, std::size_t... kAt>
void give(OperatorCall& call, const Tensors& made, std::index_sequence<kAt...> /*each*/) {
  (call.give(kAt, std::get<kAt>(made).handle()), ...);
}

template <std::size_t kCount>
std::array<bool, kCount> mask_of(std::uint32_t bits) {
  std::array<bool, kCount> mask{};
  for (std::size_t i = 0; i < kCount; ++i) mask[i] = (bits >> i & 1U) != 0;
  return mask;
}

void run_layer_norm(void* function, OperatorCall& call) {
  const auto made = reinterpret_cast<LayerNorm>(function)(
      call.tensor(0), IntegerList(call.integers()), OptionalTensor(call.tensor(2)),
      OptionalTensor(call.tensor(3)), call.number(4));
  give(call, made, std::make_index_sequence<3>());
}

void run_layer_norm_backward(void* function, OperatorCall& call) {
  const auto made = reinterpret_cast<LayerNormBackward>(function)(
      call.tensor(0), call.tensor(1), IntegerList(call.integers()), call.tensor(3), call.tensor(4),
      OptionalTensor(call.tensor(5)), OptionalTensor(call.tensor(6)), mask_of<3>(call.bits(7)));
  give(call, made, std::make_index_sequence<3>());
}

void run_rms_norm(void* function, OperatorCall& call) {
  const auto made =
      reinterpret_cast<RmsNorm>(function)(call.tensor(0), IntegerList(call.integers()),
                                          OptionalTensor(call.tensor(2)), call.optional_number(3));
  give(call, made, std::make_index_sequence<2>());
}

void run_rms_norm_backward(void* function, OperatorCall& call) {
  const auto made = reinterpret_cast<RmsNormBackward>(function)(
      call.tensor(0), call.tensor(1), IntegerList(call.integers()), call.tensor(3),
      OptionalTensor(call.tensor(4)), mask_of<2>(call.bits(5)));
  give(call, made, std::make_index_sequence<2>());
}

constexpr const char* kIntegers = "N3c108ArrayRefIlEE";

std::string_view library_of(std::string_view key) {
  return key == "CPU" ? "libtorch_cpu.so" : key == "CUDA" ? "libtorch_cuda.so" : "";
}

std::string space_of(std::string_view key) { return key == "CPU" ? "3cpu" : "4cuda"; }

std::string layer_norm(std::string_view key) {
  return "_ZN2at" + space_of(key) + "17native_layer_normERKNS_6TensorE" + kIntegers +
         "RKSt8optionalIS1_ESA_d";
}

std::string layer_norm_backward(std::string_view key) {
  return "_ZN2at" + space_of(key) + "26native_layer_norm_backwardERKNS_6TensorES3_" + kIntegers +
         "S3_S3_RKSt8optionalIS1_ESA_St5arrayIbLm3EE";
}

// Off CUDA it is made of other operations.
std::string rms_norm(std::string_view key) {
  const std::string space = key == "CPU" ? "25compositeimplicitautograd" : "4cuda";
  return "_ZN2at" + space + "15_fused_rms_normERKNS_6TensorE" + kIntegers +
         "RKSt8optionalIS1_ES7_IdE";
}

std::string rms_norm_backward(std::string_view key) {
  return "_ZN2at" + space_of(key) + "24_fused_rms_norm_backwardERKNS_6TensorES3_" + kIntegers +
         "S3_RKSt8optionalIS1_ESt5arrayIbLm2EE";
}

bool describe(const OperatorCall& call, CallFacts& facts) {
  const TorchShim& torch = *torch_shim();
  for (std::size_t i = 0; i < call.size(); ++i) {
    switch (call.signature().arguments[i]) {
      case 't':
      case 'o': {
        TorchTensor tensor = call.tensor(i);
        if (!facts.add(tensor != nullptr) || (tensor != nullptr && !facts.add(torch, tensor))) {
          return false;
        }
        break;
      }
      case 'm':
        if (!facts.add(call.bits(i))) return false;
        break;
      case 'l':
        for (const std::int64_t size : call.integers()) {
          if (!facts.add(static_cast<std::uint64_t>(size))) return false;
        }
        break;
      default:
        break;  // kernels are given eps, and do not depend on it
    }
  }
  return true;
}

// "native_layer_norm_backward;111;768"
std::string mark(const OperatorCall& call) {
  std::string made(call.signature().name);
  if (call.signature().arguments.back() == 'm') {
    const std::size_t last = call.size() - 1;
    made += ';';
    for (std::size_t i = 0; i < call.signature().results; ++i) {
      made += (call.bits(last) >> i & 1U) != 0 ? '1' : '0';
    }
  }
  for (const std::int64_t size : call.integers()) made += ';' + std::to_string(size);
  return made;
}

// By kernels of ours, of one dimension that is normalized.

py::object core_function(const char* name) {
  return py::module_::import("xpuruntime._core").attr(name);
}

using Sizes = std::vector<std::int64_t>;

TorchTensor viewed(TorchTensor tensor, const Sizes& sizes) {
  Sizes strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  std::int64_t offset = 0;
  TorchTensor made = nullptr;
  const TorchValueShim& torch = torch_values();
  if (torch.offset(tensor, &offset) != 0 ||
      torch.view(tensor, static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(),
                 offset, &made) != 0) {
    throw std::runtime_error("PyTorch makes no view of a tensor");
  }
  return made;
}

Sizes sizes_of(TorchTensor tensor) {
  const TorchShim& torch = *torch_shim();
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  if (torch.dim(tensor, &rank) != 0 || torch.sizes(tensor, &sizes) != 0) {
    throw std::runtime_error("PyTorch does not say the shape of a tensor");
  }
  return Sizes(sizes, sizes + rank);
}

void give_copy(OperatorCall& call, std::size_t at, const py::handle& object) {
  const TorchShim& torch = *torch_shim();
  TorchTensor made = nullptr;
  if (torch.copy_handle(torch.tensor_of(object.ptr()), &made) != 0) {
    throw std::runtime_error("PyTorch makes no handle of a tensor");
  }
  call.give(at, made);
}

// As PyTorch keeps them: [.., 1], where ours are [..].
void give_stats(OperatorCall& call, std::size_t at, const py::handle& object) {
  TorchTensor stats = torch_shim()->tensor_of(object.ptr());
  Sizes sizes = sizes_of(stats);
  sizes.push_back(1);
  call.give(at, viewed(stats, sizes));
}

// [..] of [.., 1], which is contiguous.
py::object our_stats(TorchTensor stats) {
  Sizes sizes = sizes_of(stats);
  if (sizes.empty()) throw std::runtime_error("statistics without a dimension");
  sizes.pop_back();
  const TorchShim& torch = *torch_shim();
  const auto drop = [&torch](void* tensor) { torch.drop(tensor); };
  const std::unique_ptr<void, decltype(drop)> owned(viewed(stats, sizes), drop);
  auto made = py::reinterpret_steal<py::object>(torch.wrap(owned.get()));
  if (!made) throw py::error_already_set();
  return made;
}

using Objects = std::span<const py::object>;

bool our_norm(PyObject* place, const Objects& given, OperatorCall& call, bool rms) {
  static PyObject* const op = core_function("op_norm").release().ptr();
  const py::object bias = rms ? py::none() : given[3];
  py::object eps = given[call.size() - 1];
  if (eps.is_none()) {
    std::int32_t dtype = 0;
    static auto* const wide = reinterpret_cast<std::int32_t (*)()>(
        find_loaded("libtorch_cpu.so", "aoti_torch_dtype_float64"));
    if (wide == nullptr || torch_shim()->dtype(call.tensor(0), &dtype) != 0) return false;
    eps = py::float_(dtype == wide() ? std::numeric_limits<double>::epsilon()
                                     : std::numeric_limits<float>::epsilon());
  }
  // place, rms, x, residual, weight, bias, ..., want_stats, eps, phase, stream
  const std::array<PyObject*, 13> all = {place,          rms ? Py_True : Py_False,
                                         given[0].ptr(), Py_None,
                                         given[2].ptr(), bias.ptr(),
                                         Py_None,        Py_None,
                                         Py_False,       Py_True,
                                         eps.ptr(),      phase_argument(),
                                         Py_None};
  const py::object done = call_core(op, all);
  if (!done) return false;
  const auto made = py::reinterpret_borrow<py::tuple>(done);
  give_copy(call, 0, made[0]);
  for (std::size_t i = 1; i < call.signature().results; ++i) give_stats(call, i, made[i]);
  return true;
}

bool our_layer_norm(PyObject* place, Objects given, OperatorCall& call) {
  return our_norm(place, given, call, false);
}

bool our_rms_norm(PyObject* place, Objects given, OperatorCall& call) {
  return our_norm(place, given, call, true);
}

bool our_norm_backward(PyObject* place, const Objects& given, OperatorCall& call, bool rms) {
  static PyObject* const op = core_function("op_norm_backward").release().ptr();
  const std::uint32_t mask = call.bits(call.size() - 1);
  const bool want_weight = (mask & 2U) != 0;
  const bool want_bias = (mask & 4U) != 0;
  const py::object mean = rms ? py::none() : our_stats(call.tensor(3));
  const py::object rstd = our_stats(call.tensor(rms ? 3 : 4));
  const auto flag = [](bool value) { return value ? Py_True : Py_False; };
  const std::array<PyObject*, 12> all = {
      place,           flag(rms),  given[0].ptr(), given[1].ptr(), given[rms ? 4 : 5].ptr(),
      mean.ptr(),      rstd.ptr(), Py_None,        Py_None,        flag(want_weight),
      flag(want_bias), Py_None};
  const py::object done = call_core(op, all);
  if (!done) return false;
  py::tuple made =
      want_weight || want_bias ? py::reinterpret_borrow<py::tuple>(done) : py::make_tuple(done);
  const auto put = [&](std::size_t at, bool wanted, std::size_t from) {
    if (wanted) return give_copy(call, at, made[from]);
    TorchTensor nothing = nullptr;
    if (torch_values().make_undefined(&nothing) != 0) {
      throw std::runtime_error("PyTorch makes no tensor that is not defined");
    }
    call.give(at, nothing);
  };
  put(0, (mask & 1U) != 0, 0);
  put(1, want_weight, 1);
  if (!rms) put(2, want_bias, made.size() - 1);
  return true;
}

bool our_layer_norm_backward(PyObject* place, Objects given, OperatorCall& call) {
  return our_norm_backward(place, given, call, false);
}

bool our_rms_norm_backward(PyObject* place, Objects given, OperatorCall& call) {
  return our_norm_backward(place, given, call, true);
}

}  // namespace

std::span<const OperatorKind> norm_kinds() {
  using namespace std::string_view_literals;
  static const std::array<OperatorKind, 4> kinds = {{
      {{"native_layer_norm", "tloof", 3},
       "\0\2\3"sv,
       nullptr,
       library_of,
       layer_norm,
       run_layer_norm,
       describe,
       mark,
       our_layer_norm},
      {{"native_layer_norm_backward", "ttlttoom", 3},
       "\0\1\3\4\5\6"sv,
       "backward",
       library_of,
       layer_norm_backward,
       run_layer_norm_backward,
       describe,
       mark,
       our_layer_norm_backward},
      {{"_fused_rms_norm", "tlog", 2},
       "\0\2"sv,
       nullptr,
       library_of,
       rms_norm,
       run_rms_norm,
       describe,
       mark,
       our_rms_norm},
      {{"_fused_rms_norm_backward", "ttltom", 2},
       "\0\1\3\4"sv,
       "backward",
       library_of,
       rms_norm_backward,
       run_rms_norm_backward,
       describe,
       mark,
       our_rms_norm_backward},
  }};
  return kinds;
}

}  // namespace xpuruntime::bindings
