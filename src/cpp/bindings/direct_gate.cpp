// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "direct_gate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "call_context.h"
#include "call_facts.h"
#include "gate_state.h"
#include "gil.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr std::int64_t kMostRank = 3;
constexpr std::size_t kMostValues = 8;

using Product = TorchStatus (*)(TorchTensor, TorchTensor, TorchTensor);
using AddedProduct = TorchStatus (*)(TorchTensor, TorchTensor, TorchTensor, TorchTensor, double,
                                     double);

// What tells calls of one kind from others.
class Facts : public CallFacts {
 public:
  using CallFacts::CallFacts;
  bool put(const TorchShim& torch, const ProductTensors& tensors) noexcept {
    return (tensors.c == nullptr || add(torch, tensors.c)) && add(torch, tensors.a) &&
           add(torch, tensors.b) && (tensors.out == nullptr || add(torch, tensors.out));
  }
};

// The result of a product, as PyTorch's own kernels make it.
struct Result {
  std::int64_t rank = 0;
  std::array<std::int64_t, kMostRank> sizes{};
  std::array<std::int64_t, kMostRank> strides{};
  std::int32_t dtype = 0;
  std::int32_t device = 0;
  std::int32_t index = 0;

  bool describe(const TorchShim& torch, TorchTensor a, TorchTensor b) noexcept {
    std::int64_t rank_of_b = 0;
    std::int64_t* of_a = nullptr;
    std::int64_t* of_b = nullptr;
    if (torch.dim(a, &rank) != 0 || torch.dim(b, &rank_of_b) != 0 || rank != rank_of_b ||
        rank < 2 || rank > kMostRank || torch.sizes(a, &of_a) != 0 || torch.sizes(b, &of_b) != 0 ||
        torch.dtype(a, &dtype) != 0 || torch.device_type(a, &device) != 0 ||
        torch.device_index(a, &index) != 0) {
      return false;
    }
    const auto last = static_cast<std::size_t>(rank - 1);
    std::int64_t stride = 1;
    for (std::size_t i = last + 1; i-- > 0;) {
      sizes[i] = i == last ? of_b[i] : of_a[i];
      strides[i] = stride;
      stride *= std::max<std::int64_t>(sizes[i], 1);
    }
    return true;
  }

  bool fits(const TorchShim& torch, TorchTensor made) const noexcept {
    Result other;
    std::int64_t* of_sizes = nullptr;
    std::int64_t* of_strides = nullptr;
    return torch.dim(made, &other.rank) == 0 && other.rank == rank &&
           torch.sizes(made, &of_sizes) == 0 && torch.strides(made, &of_strides) == 0 &&
           torch.dtype(made, &other.dtype) == 0 && other.dtype == dtype &&
           torch.device_type(made, &other.device) == 0 && other.device == device &&
           torch.device_index(made, &other.index) == 0 && other.index == index &&
           std::equal(of_sizes, of_sizes + rank, sizes.data()) &&
           std::equal(of_strides, of_strides + rank, strides.data());
  }
};

PyObject* imported(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

}  // namespace

DirectGate::DirectGate(py::str name, py::object slow, py::object native, py::object keyset,
                       void* kernel, bool adds, bool into)
    : name_(std::move(name)),
      slow_(std::move(slow)),
      native_(std::move(native)),
      keyset_(std::move(keyset)),
      kernel_(kernel),
      adds_(adds),
      into_(into),
      number_(next_gate_number()) {}

void DirectGate::renew(py::object slow, py::object native) {
  slow_ = std::move(slow);
  native_ = std::move(native);
  number_.store(next_gate_number());
}

bool DirectGate::take(PyObject* const* values, Py_ssize_t count, PyObject* names,
                      ProductTensors& tensors) const noexcept {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count != (adds_ ? 3 : 2) || named != (into_ ? 1 : 0)) return false;
  if (into_ && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "out") != 0) {
    return false;
  }
  const TorchShim& torch = *torch_shim();
  const auto size = static_cast<std::size_t>(count);
  tensors.c = adds_ ? torch.tensor_of(values[0]) : nullptr;
  tensors.a = torch.tensor_of(values[size - 2]);
  tensors.b = torch.tensor_of(values[size - 1]);
  tensors.out = into_ ? torch.tensor_of(values[size]) : nullptr;
  return true;
}

bool DirectGate::knows(const ProductTensors& tensors) const noexcept {
  if (!facts_decide()) return false;
  Facts facts(first_fact(number_));
  return facts.put(*torch_shim(), tensors) && native_calls().has(facts.words());
}

bool DirectGate::run_native(const ProductTensors& tensors, TorchTensor* made) const noexcept {
  const TorchShim& torch = *torch_shim();
  TorchTensor out = tensors.out;
  if (out == nullptr) {
    Result result;
    if (!result.describe(torch, tensors.a, tensors.b) ||
        torch.empty(result.rank, result.sizes.data(), result.strides.data(), result.dtype,
                    result.device, result.index, &out) != 0) {
      return false;
    }
  }
  const TorchStatus status = adds_ ? reinterpret_cast<AddedProduct>(kernel_)(
                                         out, tensors.c, tensors.a, tensors.b, 1.0, 1.0)
                                   : reinterpret_cast<Product>(kernel_)(out, tensors.a, tensors.b);
  if (status != 0) {
    if (tensors.out == nullptr) torch.drop(out);
    return false;
  }
  if (tensors.out == nullptr) *made = out;
  return true;
}

PyObject* DirectGate::native_object(const ProductTensors& tensors, PyObject* out) const {
  TorchTensor made = nullptr;
  PyThreadState* const thread = PyEval_SaveThread();
  const bool done = run_native(tensors, &made);
  take_gil_back(thread);
  if (!done) return nullptr;
  if (into_) return py::reinterpret_borrow<py::object>(out).release().ptr();
  const TorchShim& torch = *torch_shim();
  const auto drop = [&torch](void* tensor) { torch.drop(tensor); };
  const std::unique_ptr<void, decltype(drop)> owned(made, drop);
  PyObject* const object = torch.wrap(made);
  if (object == nullptr) throw py::error_already_set();
  return object;
}

bool DirectGate::looks_made(PyObject* result, const ProductTensors& tensors) const noexcept {
  const TorchShim& torch = *torch_shim();
  Result expected;
  return expected.describe(torch, tensors.a, tensors.b) &&
         (into_ || expected.fits(torch, torch.tensor_of(result)));
}

PyObject* DirectGate::run_ours(PyObject* place, PyObject* const* values, Py_ssize_t count,
                               PyObject* names) const {
  static PyObject* const op = imported("xpuruntime._core", "op_matmul");
  static PyObject* const deterministic = imported("torch._C", "_get_deterministic_algorithms");
  ProductTensors tensors;
  if (!take(values, count, names, tensors)) {
    return nullptr;
  }
  // PyTorch's switch may change between two calls; the place is for one setting of it.
  const auto wanted = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(deterministic));
  if (!wanted) throw py::error_already_set();
  if ((wanted.ptr() == Py_True) != call_context(place).deterministic) return nullptr;
  const auto size = static_cast<std::size_t>(count);
  // place, a, b, bias, scale_a, scale_b, out, activation, out_dtype, phase, stream
  std::array<PyObject*, 11> all{};
  all.fill(Py_None);
  all[0] = place;
  all[1] = values[size - 2];
  all[2] = values[size - 1];
  if (adds_) all[3] = values[0];
  if (into_) all[6] = values[size];
  all[9] = phase_argument();
  PyObject* const done = PyObject_Vectorcall(op, all.data(), all.size(), nullptr);
  if (done == nullptr) {
    // Python does it again, and sees to what is refused.
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return done;
}

PyObject* DirectGate::ask(PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const auto size = static_cast<std::size_t>(count);
  const std::size_t all =
      size + (names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names)));
  if (all >= kMostValues) throw py::type_error("a matrix product has fewer arguments");
  std::array<PyObject*, kMostValues> with{};
  with[0] = keyset_.ptr();
  std::copy(values, values + all, with.begin() + 1);
  const py::object slow = slow_;
  const py::object native = native_;
  py::object place;
  const std::uint64_t number = state_number();
  const Verdict verdict = judge(name_.ptr(), values, count, names, &place);
  if (verdict == Verdict::kQuick) {
    if (PyObject* const done = run_ours(place.ptr(), values, count, names)) return done;
  }
  if (verdict == Verdict::kAsk || verdict == Verdict::kQuick) {
    return PyObject_Vectorcall(slow.ptr(), with.data(), size + 1, names);
  }
  ProductTensors tensors;
  Facts facts(first_fact(number_));
  const bool seen = verdict == Verdict::kAlways && take(values, count, names, tensors) &&
                    facts.put(*torch_shim(), tensors);
  if (seen && native_calls().has(facts.words())) {
    if (PyObject* const done = native_object(tensors, into_ ? values[count] : nullptr)) return done;
  }
  PyObject* const done = call_native(native.ptr(), with.data(), size + 1, names);
  // What PyTorch has refused is asked again.
  if (done == nullptr || !seen || !looks_made(done, tensors)) return done;
  auto kept = py::reinterpret_steal<py::object>(done);
  keep_native_call(facts.words(), number);
  return kept.release().ptr();
}

}  // namespace xpuruntime::bindings
