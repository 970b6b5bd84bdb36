// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../addon_abi.h"
#include "facts.h"
#include "gil.h"

namespace xpuruntime::torch_addon {

namespace py = pybind11;
using bindings::ReleaseGil;
using bindings::with_gil;
using torch_abi::Verdict;

/// The functions of `_core`.
const torch_abi::GuardFunctions& core();

/// What is known of one operator at one dispatch key while a kernel of this addon stands there.
/// Never dropped, since a thread may still be inside a kernel that has been removed.
struct Guard {
  py::object slow;    ///< the kernel in Python
  py::object keyset;  ///< that it is called with
  std::atomic<std::uint64_t> number{0};
};

/// A block in which the SDP backends of the process are as a call wants them.
class BackendScope {
 public:
  explicit BackendScope(std::uint64_t request) { core().begin_scope(request); }
  ~BackendScope() { core().end_scope(); }
  BackendScope(const BackendScope&) = delete;
  BackendScope& operator=(const BackendScope&) = delete;
};

// Arguments as Python has them. With the GIL.

inline py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}
inline py::object to_python(const at::Tensor& tensor) { return checked(THPVariable_Wrap(tensor)); }
inline py::object to_python(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? to_python(*tensor) : py::object(py::none());
}
inline py::object to_python(at::IntArrayRef values) {
  py::list made;
  for (const auto value : values) made.append(py::int_(value));
  return made;
}
template <std::size_t kCount>
py::object to_python(const std::array<bool, kCount>& mask) {
  py::list made;
  for (const bool one : mask) made.append(py::bool_(one));
  return made;
}
inline py::object to_python(bool flag) { return py::bool_(flag); }
inline py::object to_python(double number) { return py::float_(number); }
inline py::object to_python(const std::optional<double>& number) {
  return number ? py::object(py::float_(*number)) : py::object(py::none());
}
inline py::object to_python(const at::Scalar& number) {
  if (number.isComplex()) {
    const auto value = number.toComplexDouble();
    return checked(PyComplex_FromDoubles(value.real(), value.imag()));
  }
  if (number.isFloatingPoint()) return py::float_(number.toDouble());
  if (number.isBoolean()) return py::bool_(number.toBool());
  if (number.type() == at::kUInt64) return py::int_(number.toUInt64());
  return py::int_(number.toLong());
}

template <typename T>
constexpr bool kIsList = false;
template <>
inline constexpr bool kIsList<at::IntArrayRef> = true;
template <std::size_t kCount>
inline constexpr bool kIsList<std::array<bool, kCount>> = true;

template <typename T>
constexpr bool kIsArray =
    std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>;

/// The tensor of what a kernel in Python gave; one that is not defined for None.
inline at::Tensor to_tensor(PyObject* object, const char* name) {
  if (object == Py_None) return {};
  if (!THPVariable_Check(object)) {
    throw py::type_error(std::string("a kernel in Python of aten::") + name + " gave no tensor");
  }
  return THPVariable_Unpack(object);
}

/// Throws the error of Python that is set, as PyTorch's own kernels in Python do. With the GIL.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

/// What a function of `_core` returned; nothing where it refused the call, since Python sees to
/// what is refused. With the GIL.
template <std::size_t kCount>
py::object call_core(PyObject* function, const std::array<PyObject*, kCount>& values) {
  auto done = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(function, values.data(), values.size(), nullptr));
  if (done) return done;
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
  PyErr_Clear();
  return {};
}

inline PyObject* imported(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

/// A kernel over PyTorch's own kernel of the operator `Op`. It calls that one where `_core` knows
/// that it serves the call; a kernel of xpuruntime that needs nothing but the arrays with the GIL
/// alone; and otherwise asks Python.
template <typename Op, typename Signature = typename Op::Signature>
class Kernel;

template <typename Op, typename Result, typename... Arguments>
class Kernel<Op, Result(Arguments...)> final : public c10::OperatorKernel {
 public:
  using Native = Result (*)(Arguments...);
  static constexpr std::size_t kCount = sizeof...(Arguments);
  static constexpr bool kInto = std::is_reference_v<Result>;
  using Value = std::remove_reference_t<Result>;
  using Objects = std::array<py::object, kCount>;

  Kernel(Guard& guard, Native native) : guard_(&guard), native_(native) {}

  Result operator()(Arguments... arguments) {
    Facts facts(core().first_fact(guard_->number.load(std::memory_order_acquire)));
    const bool seen = Op::see(facts, arguments...);
    std::uint64_t request = 0;
    if (seen && core().find_native(facts.data(), facts.size(), &request)) {
      return run(request, arguments...);
    }
    Value made = with_gil([&] { return ask(seen ? &facts : nullptr, arguments...); });
    if constexpr (kInto) {
      return std::get<kCount - 1>(std::tie(arguments...));
    } else {
      return made;
    }
  }

 private:
  Result run(std::uint64_t request, Arguments... arguments) const {
    if constexpr (Op::kScopesBackends) {
      const BackendScope scope(request);
      return native_(arguments...);
    } else {
      return native_(arguments...);
    }
  }

  Value ask(const Facts* facts, Arguments... arguments) const {
    try {
      Objects objects;
      fill<false>(objects, arguments...);
      if (facts != nullptr) {
        if (auto made = decide(*facts, objects, arguments...)) return *std::move(made);
      }
      fill<true>(objects, arguments...);
      return call_python(objects, arguments...);
    } catch (py::error_already_set& error) {
      error.restore();
      throw_python_error();
    } catch (const py::builtin_exception& error) {
      error.set_error();
      throw_python_error();
    }
  }

  // Lists are for Python alone.
  template <bool kLists>
  static void fill(Objects& objects, Arguments... arguments) {
    std::size_t at = 0;
    const auto one = [&](const auto& value) {
      if constexpr (kIsList<std::decay_t<decltype(value)>> == kLists)
        objects[at] = to_python(value);
      ++at;
    };
    (one(arguments), ...);
  }

  std::optional<Value> decide(const Facts& facts, const Objects& objects,
                              Arguments... arguments) const {
    if (PyObject* const place = core().find_quick(facts.data(), facts.size())) {
      const auto kept = py::reinterpret_borrow<py::object>(place);
      return Op::xrt_kernel(place, objects, arguments...);
    }
    const std::uint64_t number = core().state_number();
    std::array<PyObject*, kCount> arrays{};
    std::size_t count = 0;
    std::size_t at = 0;
    const auto take = [&](const auto& value) {
      if constexpr (kIsArray<std::decay_t<decltype(value)>>) arrays[count++] = objects[at].ptr();
      ++at;
    };
    (take(arguments), ...);
    PyObject* const out = kInto ? arrays[--count] : nullptr;
    const py::str name(Op::mark(arguments...));
    PyObject* found = nullptr;
    std::uint64_t request = 0;
    const Verdict verdict = core().judge(name.ptr(), arrays.data(), count, out, Op::kPhase, &found,
                                         Op::kScopesBackends ? &request : nullptr);
    const auto place = py::reinterpret_steal<py::object>(found);
    if (verdict == Verdict::kError) throw py::error_already_set();
    if (verdict == Verdict::kQuick) {
      auto made = Op::xrt_kernel(place.ptr(), objects, arguments...);
      if (made) core().keep_quick(facts.data(), facts.size(), place.ptr(), number);
      return made;
    }
    if (verdict != Verdict::kAlways) return std::nullopt;
    std::optional<Value> made;
    try {
      const ReleaseGil unlocked;
      made.emplace(run(request, arguments...));
    } catch (const c10::Error&) {
      // Of one backend, which may not serve these lengths: Python looks for another, or raises it.
      if (request == 0) throw;
      return std::nullopt;
    }
    core().keep_native(facts.data(), facts.size(), number, request);  // PyTorch has refused nothing
    return made;
  }

  Value call_python(const Objects& objects, Arguments... arguments) const {
    std::array<PyObject*, kCount + 1> values{};
    const py::object slow = guard_->slow;
    values[0] = guard_->keyset.ptr();
    std::size_t size = 1;
    py::list names;
    std::size_t at = 0;
    const auto pass = [&](const auto& value) {
      const char* const name = Op::keyword(at);
      const bool omitted = [&] {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Scalar>) {
          return value.isIntegral(false) && value.equal(1);  // the default
        } else {
          return false;
        }
      }();
      if (!omitted) {
        if (name != nullptr) names.append(name);
        values[size++] = objects[at].ptr();
      }
      ++at;
    };
    (pass(arguments), ...);
    const py::tuple keywords(names);
    const auto done = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(slow.ptr(), values.data(), size - keywords.size(),
                            keywords.empty() ? nullptr : keywords.ptr()));
    if (!done) throw py::error_already_set();
    return results<Value>(done);
  }

  template <typename Made>
  static Made results(const py::object& done) {
    if constexpr (std::is_same_v<Made, at::Tensor>) {
      return to_tensor(done.ptr(), Op::kName);
    } else {
      constexpr std::size_t kResults = std::tuple_size_v<Made>;
      const auto all = py::reinterpret_steal<py::object>(PySequence_Tuple(done.ptr()));
      if (!all) throw py::error_already_set();
      if (PyTuple_GET_SIZE(all.ptr()) != static_cast<Py_ssize_t>(kResults)) {
        throw py::type_error(std::string("a kernel in Python of aten::") + Op::kName +
                             " gave another number of results");
      }
      return [&]<std::size_t... kAt>(std::index_sequence<kAt...> /*each*/) {
        return Made{to_tensor(PyTuple_GET_ITEM(all.ptr(), kAt), Op::kName)...};
      }(std::make_index_sequence<kResults>());
    }
  }

  Guard* guard_;
  Native native_;
};

/// Defaults of operators.
struct AnyOperator {
  static constexpr bool kScopesBackends = false;
  static constexpr const char* kPhase = nullptr;
  static constexpr const char* keyword(std::size_t /*at*/) { return nullptr; }
  template <typename... Arguments>
  static bool see(Facts& facts, const Arguments&... arguments) {
    return (facts.see(arguments) && ...);
  }
};

/// A kernel for an operator such as "mm.out" at a dispatch key, over what stands there. Empty where
/// the addon has none.
std::optional<c10::KernelFunction> kernel_for(const std::string& name, c10::DispatchKey key,
                                              Guard& guard);

}  // namespace xpuruntime::torch_addon
