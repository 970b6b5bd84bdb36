// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "bind.h"
#include "gil.h"
#include "guard_state.h"
#include "quick_product.h"

// Kernels of `mm` and `bmm` over PyTorch's stable C ABI: functions of `libtorch_cpu.so` and
// `libtorch_cuda.so` in C, found by their names. PyTorch hands tensors over in C, but no `Scalar`,
// and has no C function of its norms.

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

using Handle = void*;         // AtenTensorHandle
using Value = std::uint64_t;  // StableIValue
using Status = std::int32_t;
using BoxedKernel = void (*)(Value*, std::uint64_t, std::uint64_t);

constexpr std::uint64_t kTorchVersion = std::uint64_t{2} << 56U | std::uint64_t{10} << 48U;
constexpr std::size_t kMaxRank = 3;
constexpr std::size_t kMaxFacts = 1 + 3 * (1 + 2 * kMaxRank);

// PyTorch's C functions, and the two of Python that pass tensors to and from C.
struct Shim {
  Status (*dim)(Handle, std::int64_t*);
  Status (*sizes)(Handle, std::int64_t**);
  Status (*strides)(Handle, std::int64_t**);
  Status (*dtype)(Handle, std::int32_t*);
  Status (*device_type)(Handle, std::int32_t*);
  Status (*device_index)(Handle, std::int32_t*);
  Status (*data)(Handle, const void**);
  Status (*empty)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t,
                  std::int32_t, std::int32_t, Handle*);
  Status (*copy_handle)(Handle, Handle*);
  Status (*drop)(Handle);
  Status (*open_library)(const char*, const char*, const char*, std::uint32_t, void**);
  Status (*implement)(void*, const char*, BoxedKernel, std::uint64_t);
  Status (*close_library)(void*);
  PyObject* to_python;  // takes a list of capsules of handles, which it owns from then on
  PyObject* to_handle;  // gives a list of capsules of new handles
};

std::atomic<const Shim*> opened{nullptr};

const Shim& shim() noexcept { return *opened.load(std::memory_order_acquire); }

void* find_loaded(const char* library, const char* function) noexcept {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = dlsym(handle, function);
  dlclose(handle);  // gives back what dlopen has counted; PyTorch is never unloaded
  return found;
}

// Returns the name of the first function that is missing, or nothing.
std::string find_stable_abi(const py::object& to_python, const py::object& to_handle) {
  if (opened.load() != nullptr) return "";
  if (PyCFunction_Check(to_python.ptr()) == 0 || PyCFunction_Check(to_handle.ptr()) == 0) {
    return "functions in C that take and give lists of tensors";
  }
  Shim found{};
  const auto take = [](auto& function, const char* name) {
    function =
        reinterpret_cast<std::decay_t<decltype(function)>>(find_loaded("libtorch_cpu.so", name));
    return function != nullptr ? "" : name;
  };
  for (const std::string_view missing :
       {take(found.dim, "aoti_torch_get_dim"), take(found.sizes, "aoti_torch_get_sizes"),
        take(found.strides, "aoti_torch_get_strides"), take(found.dtype, "aoti_torch_get_dtype"),
        take(found.device_type, "aoti_torch_get_device_type"),
        take(found.device_index, "aoti_torch_get_device_index"),
        take(found.data, "torch_get_const_data_ptr"), take(found.empty, "aoti_torch_empty_strided"),
        take(found.copy_handle, "aoti_torch_new_tensor_handle"),
        take(found.drop, "aoti_torch_delete_tensor_object"),
        take(found.open_library, "aoti_torch_library_init_impl"),
        take(found.implement, "torch_library_impl"),
        take(found.close_library, "aoti_torch_delete_library_object")}) {
    if (!missing.empty()) return std::string(missing);
  }
  found.to_python = py::object(to_python).release().ptr();
  found.to_handle = py::object(to_handle).release().ptr();
  opened.store(new Shim(found), std::memory_order_release);  // for as long as the process lives
  return "";
}

// What owns a tensor of PyTorch's.
class Owned {
 public:
  explicit Owned(Handle handle = nullptr) noexcept : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&&) = delete;
  ~Owned() {
    if (handle_ != nullptr) shim().drop(handle_);
  }
  Handle get() const noexcept { return handle_; }
  Handle* put() noexcept { return &handle_; }
  Handle release() noexcept { return std::exchange(handle_, nullptr); }

 private:
  Handle handle_;
};

// The first item of the list that one of PyTorch's functions in C gives for a list of one. Nothing
// in Python runs in between, where Ctrl-C could be raised after a handle has changed its owner.
py::object of_one(PyObject* function, const py::object& item) {
  const auto items = py::reinterpret_steal<py::object>(PyList_New(1));
  if (!items) throw py::error_already_set();
  PyList_SET_ITEM(items.ptr(), 0, Py_NewRef(item.ptr()));
  const auto made = py::reinterpret_steal<py::object>(PyObject_CallOneArg(function, items.ptr()));
  if (!made) throw py::error_already_set();
  PyObject* const first = PyList_Check(made.ptr()) ? PyList_GetItem(made.ptr(), 0) : nullptr;
  if (first == nullptr) throw py::value_error("PyTorch gave no list of one item");
  return py::reinterpret_borrow<py::object>(first);
}

// The one object of Python of a tensor. With the GIL.
py::object to_python(Handle handle) {
  Owned copy;
  if (shim().copy_handle(handle, copy.put()) != 0) throw py::value_error("no handle of a tensor");
  const auto capsule =
      py::reinterpret_steal<py::object>(PyCapsule_New(copy.get(), nullptr, nullptr));
  if (!capsule) throw py::error_already_set();
  py::object made = of_one(shim().to_python, capsule);
  (void)copy.release();
  return made;
}

Owned to_handle(const py::object& tensor) {
  const py::object capsule = of_one(shim().to_handle, tensor);
  void* const handle = PyCapsule_GetPointer(capsule.ptr(), nullptr);
  if (handle == nullptr) throw py::error_already_set();
  return Owned(handle);
}

struct Operands {
  Handle a = nullptr;
  Handle b = nullptr;
  Handle out = nullptr;  // where the result goes, if it is given
};

// Shape, strides, type, device and alignment of the operands.
class Facts {
 public:
  explicit Facts(std::uint64_t first) noexcept { words_[0] = first; }
  std::span<const std::uint64_t> words() const noexcept { return {words_.data(), size_}; }

  bool add(const Operands& given) noexcept {
    return add(given.a) && add(given.b) && (given.out == nullptr || add(given.out));
  }

 private:
  bool add(Handle tensor) noexcept {
    const Shim& torch = shim();
    std::int64_t rank = 0;
    std::array<std::int64_t*, 2> dims{};
    std::int32_t dtype = 0;
    std::int32_t device = 0;
    std::int32_t index = 0;
    const void* data = nullptr;
    if (torch.dim(tensor, &rank) != 0 || rank > static_cast<std::int64_t>(kMaxRank) ||
        torch.sizes(tensor, dims.data()) != 0 || torch.strides(tensor, &dims[1]) != 0 ||
        torch.dtype(tensor, &dtype) != 0 || torch.device_type(tensor, &device) != 0 ||
        torch.device_index(tensor, &index) != 0 || torch.data(tensor, &data) != 0) {
      return false;
    }
    const auto byte = [](auto value) { return static_cast<std::uint64_t>(value) & 0xFFU; };
    words_[size_++] = byte(rank) | byte(device) << 8U | byte(index) << 16U |
                      byte(reinterpret_cast<std::uintptr_t>(data) % 16) << 24U |
                      static_cast<std::uint64_t>(static_cast<std::uint32_t>(dtype)) << 32U;
    for (const std::int64_t* values : dims) {
      for (std::int64_t i = 0; i < rank; ++i) {
        words_[size_++] = static_cast<std::uint64_t>(values[i]);
      }
    }
    return true;
  }

  std::array<std::uint64_t, kMaxFacts> words_{};
  std::size_t size_ = 1;
};

// A product as PyTorch's own kernel makes it: nothing where its C function refuses the call.
bool multiply(void* function, const Operands& given, Owned& made) noexcept {
  const Shim& torch = shim();
  Handle out = given.out;
  if (out == nullptr) {
    std::int64_t rank = 0;
    std::int64_t* of_a = nullptr;
    std::int64_t* of_b = nullptr;
    std::int32_t dtype = 0;
    std::int32_t device = 0;
    std::int32_t index = 0;
    if (torch.dim(given.a, &rank) != 0 || torch.sizes(given.a, &of_a) != 0 ||
        torch.sizes(given.b, &of_b) != 0 || torch.dtype(given.a, &dtype) != 0 ||
        torch.device_type(given.a, &device) != 0 || torch.device_index(given.a, &index) != 0) {
      return false;
    }
    std::array<std::int64_t, kMaxRank> sizes{};
    std::array<std::int64_t, kMaxRank> strides{};
    std::int64_t stride = 1;
    const auto last = static_cast<std::size_t>(rank - 1);
    for (std::size_t i = last + 1; i-- > 0;) {
      sizes[i] = i == last ? of_b[i] : of_a[i];
      strides[i] = stride;
      stride *= std::max<std::int64_t>(sizes[i], 1);
    }
    if (torch.empty(rank, sizes.data(), strides.data(), dtype, device, index, made.put()) != 0) {
      return false;
    }
    out = made.get();
  }
  using Function = Status (*)(Handle, Handle, Handle);
  return reinterpret_cast<Function>(function)(out, given.a, given.b) == 0;
}

// Never dropped, since a thread may still be inside a kernel that has been removed.
struct Guard {
  py::str name;
  void* function = nullptr;  // PyTorch's, of the product into a tensor
  bool into = false;
  py::object slow;    // the kernel in Python, called with a keyset, then the operands
  py::object native;  // PyTorch's, called like it
  py::object keyset;
  std::atomic<std::uint64_t> number{0};
};

constexpr std::array<std::string_view, 4> kNames = {"mm", "mm.out", "bmm", "bmm.out"};
constexpr std::array<std::string_view, 2> kKeys = {"CPU", "CUDA"};
constexpr std::size_t kSlots = kNames.size() * kKeys.size();

std::array<std::atomic<Guard*>, kSlots> guards{};

// A product's arguments as Python has them.
struct Call {
  std::array<PyObject*, 4> values;  // keyset, a, b, and where the result goes, or null
  PyObject* names = nullptr;        // of the last one
  std::span<PyObject* const> arrays() const noexcept { return {values.data() + 1, 2}; }
  PyObject* out() const noexcept { return values[3]; }
};

// What the kernel gives that is known to serve a call of these facts; nothing where Python decides.
py::object decide(const Guard& guard, const Call& call, const Facts& facts) {
  if (PyObject* const place = quick_place(facts.words())) {
    const auto kept = py::reinterpret_borrow<py::object>(place);
    return quick_product(place, call.arrays(), call.out(), Py_None);
  }
  const std::uint64_t number = state_number();
  const Judgement found = judge(guard.name.ptr(), call.arrays(), call.out());
  if (found.verdict == Verdict::kAsk) return {};
  if (found.verdict == Verdict::kQuick) {
    py::object made = quick_product(found.place.ptr(), call.arrays(), call.out(), found.phase);
    if (made) keep_quick_call(facts.words(), found.place.ptr(), number);
    return made;
  }
  const py::object native = guard.native;
  auto made = py::reinterpret_steal<py::object>(
      call_native(native.ptr(), call.values.data(), 3, call.names));
  if (!made) throw py::error_already_set();
  if (found.verdict == Verdict::kAlways) keep_native_call(facts.words(), number);
  return made;
}

// What `decide` gives, else what Python does.
Owned ask(const Guard& guard, const Operands& given, const Facts* facts) {
  std::array<py::object, 3> objects = {to_python(given.a), to_python(given.b), {}};
  if (guard.into) objects[2] = to_python(given.out);
  static PyObject* const names = py::make_tuple("out").release().ptr();
  const Call call = {{guard.keyset.ptr(), objects[0].ptr(), objects[1].ptr(), objects[2].ptr()},
                     guard.into ? names : nullptr};
  py::object made;
  if (facts != nullptr) made = decide(guard, call, *facts);
  if (!made) {
    const py::object slow = guard.slow;
    made = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(slow.ptr(), call.values.data(), 3, call.names));
    if (!made) throw py::error_already_set();
  }
  return to_handle(made);
}

void serve(const Guard& guard, Value* values) {
  const auto take = [&](std::size_t at) { return Owned(reinterpret_cast<Handle>(values[at])); };
  const Owned a = take(0);
  const Owned b = take(1);
  Owned out(guard.into ? reinterpret_cast<Handle>(values[2]) : nullptr);
  const Operands given{a.get(), b.get(), out.get()};
  Facts facts(first_fact(guard.number.load(std::memory_order_acquire)));
  const bool seen = facts.add(given);
  Owned made;
  if (seen && facts_decide() && native_calls().has(facts.words()) &&
      multiply(guard.function, given, made)) {
    values[0] = reinterpret_cast<Value>(guard.into ? out.release() : made.release());
    return;
  }
  Owned answer = with_gil([&] { return ask(guard, given, seen ? &facts : nullptr); });
  values[0] = reinterpret_cast<Value>(answer.release());
}

template <std::size_t kSlot>
void enter(Value* values, std::uint64_t /*arguments*/, std::uint64_t /*results*/) {
  serve(*guards[kSlot].load(std::memory_order_acquire), values);
}

template <std::size_t... kSlot>
constexpr std::array<BoxedKernel, kSlots> entries(std::index_sequence<kSlot...> /*all*/) {
  return {enter<kSlot>...};
}

// What removes a kernel when it is called, or None where PyTorch refuses it.
py::object implement(const std::string& space, const std::string& key, const std::string& name,
                     BoxedKernel kernel) {
  const Shim& torch = shim();
  void* library = nullptr;
  if (torch.open_library(space.c_str(), key.c_str(), "xpuruntime", 0, &library) != 0) {
    return py::none();
  }
  if (torch.implement(library, (space + "::" + name).c_str(), kernel, kTorchVersion) != 0) {
    torch.close_library(library);
    return py::none();
  }
  return py::cpp_function([library, closed = false]() mutable {
    if (!std::exchange(closed, true)) shim().close_library(library);
  });
}

py::object place_stable_kernel(const std::string& name, const std::string& key,
                               const py::object& slow, const py::object& native,
                               const py::object& keyset) {
  static constexpr auto kEntries = entries(std::make_index_sequence<kSlots>());
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  const auto* const at = std::find(kKeys.begin(), kKeys.end(), key);
  if (opened.load() == nullptr || found == kNames.end() || at == kKeys.end()) return py::none();
  const std::string device = key == "CUDA" ? "cuda" : "cpu";
  void* const function =
      find_loaded(("libtorch_" + device + ".so").c_str(),
                  ("aoti_torch_" + device + "_" + name.substr(0, name.find('.')) + "_out").c_str());
  if (function == nullptr) return py::none();
  const auto slot = static_cast<std::size_t>((found - kNames.begin()) * 2 + (at - kKeys.begin()));
  if (guards[slot].load() == nullptr) guards[slot].store(new Guard);
  Guard& guard = *guards[slot].load();
  guard.name = name;
  guard.function = function;
  guard.into = name.ends_with(".out");
  guard.slow = slow;
  guard.native = native;
  guard.keyset = keyset;
  guard.number.store(next_guard_number(), std::memory_order_release);
  return implement("aten", key, name, kEntries[slot]);
}

// Raises LookupError, as an error of Python's that passes through PyTorch.
void raise(Value* values, std::uint64_t /*arguments*/, std::uint64_t /*results*/) {
  const Owned argument(reinterpret_cast<Handle>(std::exchange(values[0], 0)));
  const AcquireGil gil;
  PyErr_SetString(PyExc_LookupError, "raised by xpuruntime, to see whether it arrives");
  throw py::error_already_set();
}

}  // namespace

void bind_stable_product(py::module_& module) {
  module.def(
      "find_stable_abi", find_stable_abi, py::arg("to_python"), py::arg("to_handle"),
      "Find PyTorch's stable C ABI. Both arguments are functions in C that take and give lists.\n\n"
      "Returns the first function that is missing, or nothing.");
  module.def("place_stable_kernel", place_stable_kernel, py::arg("name"), py::arg("key"),
             py::arg("slow"), py::arg("native"), py::arg("keyset"),
             "Put a kernel in C over a product. Returns what removes it, or None.");
  module.def(
      "place_raising_kernel",
      [](const std::string& space, const std::string& name) {
        return implement(space, "CPU", name, raise);
      },
      py::arg("space"), py::arg("name"),
      "Put a kernel that raises LookupError in place. Returns what removes it, or None.");
}

}  // namespace xpuruntime::bindings
