// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "tensor_layout.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// Ranks of which sizes and strides lie in the tensor itself; PyTorch keeps those of others apart.
constexpr std::size_t kMostRank = 5;
constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::size_t kShapeWords = 1 + 2 * kMostRank;
// The least sizes of a tensor's object and of a storage's so far.
constexpr std::size_t kTensorSize = 192;
constexpr std::size_t kStorageSize = 56;
constexpr std::uintptr_t kAlignment = 16;
constexpr std::size_t kTypes = 256;

// Offsets in a tensor's object.
struct Layout {
  std::uint64_t plain_keys = 0;
  std::size_t keys = 0;
  std::size_t storage = 0;
  std::size_t shape = 0;   // rank, then sizes, then strides
  std::size_t offset = 0;  // of the first element in its storage, in elements
  std::size_t dtype = 0;
  std::size_t device = 0;  // type, index, and whether there is one; a byte each
  std::size_t data = 0;    // in the storage's object
  // Bytes of an element by the number of its type; 0 of types that are not known.
  std::array<std::uint8_t, kTypes> item_sizes{};
};

std::atomic<const Layout*> opened{nullptr};

template <typename T>
T value_at(const char* object, std::size_t offset) noexcept {
  T value{};
  std::memcpy(&value, object + offset, sizeof value);
  return value;
}

std::uint8_t low_bits(std::uintptr_t address) noexcept {
  return static_cast<std::uint8_t>(address % kAlignment);
}

bool has_plain_keys(const Layout& layout, const char* object) noexcept {
  const auto keys = value_at<std::uint64_t>(object, layout.keys);
  return keys != 0 && (keys & ~layout.plain_keys) == 0;
}

bool read_where_they_lie(const Layout& layout, const char* object, TensorTraits& traits) noexcept {
  const auto* const storage =
      reinterpret_cast<const char*>(value_at<std::uintptr_t>(object, layout.storage));
  const auto rank = value_at<std::uint64_t>(object, layout.shape);
  const std::size_t dtype = value_at<std::uint16_t>(object, layout.dtype);
  if (storage == nullptr || rank > kMostRank || dtype >= kTypes || layout.item_sizes[dtype] == 0) {
    return false;
  }
  const auto* const sizes = reinterpret_cast<const std::int64_t*>(object + layout.shape + kWord);
  traits.rank = static_cast<std::int64_t>(rank);
  traits.sizes = sizes;
  traits.strides = sizes + kMostRank;
  traits.dtype = static_cast<std::int32_t>(dtype);
  traits.device = value_at<std::uint8_t>(object, layout.device);
  traits.index = value_at<std::uint8_t>(object, layout.device + 1);
  const std::uint64_t bytes =
      value_at<std::uint64_t>(object, layout.offset) * layout.item_sizes[dtype];
  traits.alignment = low_bits(value_at<std::uintptr_t>(storage, layout.data) + bytes);
  return true;
}

// A tensor to find a layout by, and what Python says of it.
struct Sample {
  py::object tensor;
  const char* object = nullptr;
  std::uint64_t keys = 0;
  bool plain = true;
  std::uintptr_t storage = 0;
  std::uintptr_t data = 0;  // of the storage
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> shape;
  TensorTraits told;  // by PyTorch's functions

  Sample(const py::object& from, bool is_plain) : tensor(from), plain(is_plain) {
    const TorchShim& torch = *torch_shim();
    TorchTensor handle = torch.tensor_of(from.ptr());
    object = object_of(handle);
    keys = py::module_::import("torch")
               .attr("_C")
               .attr("_dispatch_keys")(from)
               .attr("raw_repr")()
               .cast<std::uint64_t>();
    if (!plain) return;
    const py::object kept = from.attr("untyped_storage")();
    storage = kept.attr("_cdata").cast<std::uintptr_t>();
    data = kept.attr("data_ptr")().cast<std::uintptr_t>();
    offset = from.attr("storage_offset")().cast<std::uint64_t>();
    shape.assign(kShapeWords, 0);
    shape[0] = from.attr("dim")().cast<std::uint64_t>();
    for (std::size_t i = 0; i < shape[0]; ++i) {
      shape[1 + i] = from.attr("size")(i).cast<std::uint64_t>();
      shape[1 + kMostRank + i] = from.attr("stride")(i).cast<std::uint64_t>();
    }
    if (!ask_for_traits(torch, handle, told)) throw py::type_error("its traits are not told");
  }
};

// Tensors that differ in all that is looked for, and some with other keys.
std::vector<Sample> samples() {
  const py::module_ torch = py::module_::import("torch");
  const auto empty = [&torch](const py::tuple& sizes, const char* dtype, const char* device) {
    return torch.attr("empty")(sizes, py::arg("dtype") = torch.attr(dtype),
                               py::arg("device") = device);
  };
  const py::object matrix = empty(py::make_tuple(4, 6), "float32", "cpu").attr("zero_")();
  std::vector<Sample> made;
  const auto add = [&made](const py::object& tensor, bool plain = true) {
    made.emplace_back(tensor, plain);
  };
  add(matrix);
  add(matrix.attr("t")());
  add(matrix.attr("reshape")(-1).attr("narrow")(0, 7, 9));
  add(matrix.attr("detach")().attr("requires_grad_")());
  add(empty(py::make_tuple(), "int64", "cpu"));
  add(empty(py::make_tuple(2, 3, 5, 7, 11), "bfloat16", "cpu"));
  add(empty(py::make_tuple(13, 3, 2, 5), "float64", "cpu").attr("transpose")(1, 3));
  add(empty(py::make_tuple(3, 17), "float16", "meta"));
  // Of memory that is somebody else's, and not the storage's context at the same time.
  add(torch
          .attr("frombuffer")(py::bytearray(std::string(64, '\0')),
                              py::arg("dtype") = torch.attr("int16"), py::arg("offset") = 6)
          .attr("narrow")(0, 3, 11));
  if (torch.attr("cuda").attr("is_initialized")().cast<bool>()) {
    const int last = torch.attr("cuda").attr("device_count")().cast<int>() - 1;
    add(empty(py::make_tuple(2, 2), "float32", ("cuda:" + std::to_string(last)).c_str()));
  }
  add(matrix.attr("to_sparse")(), false);
  add(matrix.attr("to")(torch.attr("complex64")).attr("conj")(), false);
  return made;
}

// The one place of `width` bytes in objects of `size` bytes that fits all samples; 0 where there is
// none, or another one.
template <typename Fits>
std::size_t find_place(const std::vector<Sample>& tensors, std::size_t size, std::size_t width,
                       std::size_t step, Fits fits) {
  std::size_t found = 0;
  for (std::size_t at = kWord; at + width <= size; at += step) {
    if (std::all_of(tensors.begin(), tensors.end(),
                    [&](const Sample& sample) { return fits(sample, at); })) {
      if (found != 0) return 0;
      found = at;
    }
  }
  return found;
}

// Of the types that PyTorch says the numbers of; others are left to its functions.
std::array<std::uint8_t, kTypes> find_item_sizes() {
  constexpr std::array<std::pair<const char*, std::uint8_t>, 17> known = {{{"float64", 8},
                                                                           {"float32", 4},
                                                                           {"float16", 2},
                                                                           {"bfloat16", 2},
                                                                           {"float8_e4m3fn", 1},
                                                                           {"float8_e5m2", 1},
                                                                           {"complex64", 8},
                                                                           {"complex128", 16},
                                                                           {"int64", 8},
                                                                           {"int32", 4},
                                                                           {"int16", 2},
                                                                           {"int8", 1},
                                                                           {"uint64", 8},
                                                                           {"uint32", 4},
                                                                           {"uint16", 2},
                                                                           {"uint8", 1},
                                                                           {"bool", 1}}};
  std::array<std::uint8_t, kTypes> sizes{};
  for (const auto& [name, bytes] : known) {
    auto* const number = reinterpret_cast<std::int32_t (*)()>(
        find_loaded("libtorch_cpu.so", (std::string("aoti_torch_dtype_") + name).c_str()));
    if (number != nullptr) sizes.at(static_cast<std::size_t>(number())) = bytes;
  }
  return sizes;
}

// The same of one value in a tensor's object.
template <typename T, typename Member>
std::size_t find_value(const std::vector<Sample>& tensors, Member Sample::* member) {
  return find_place(tensors, kTensorSize, sizeof(T), sizeof(T),
                    [member](const Sample& sample, std::size_t at) {
                      return value_at<T>(sample.object, at) == sample.*member;
                    });
}

bool shape_fits(const Sample& sample, std::size_t at) {
  const std::uint64_t rank = sample.shape[0];
  for (std::size_t i = 0; i < kShapeWords; ++i) {
    const bool told = i == 0 || (i - 1) % kMostRank < rank;
    if (told && value_at<std::uint64_t>(sample.object, at + i * kWord) != sample.shape[i])
      return false;
  }
  return true;
}

bool dtype_fits(const Sample& sample, std::size_t at) {
  return value_at<std::uint16_t>(sample.object, at) == sample.told.dtype;
}

bool device_fits(const Sample& sample, std::size_t at) {
  return value_at<std::uint8_t>(sample.object, at) == sample.told.device &&
         value_at<std::uint8_t>(sample.object, at + 1) == sample.told.index &&
         value_at<std::uint8_t>(sample.object, at + 2) == 1;
}

bool data_fits(const Sample& sample, std::size_t at) {
  return value_at<std::uintptr_t>(reinterpret_cast<const char*>(sample.storage), at) == sample.data;
}

}  // namespace

std::string open_tensor_layout(std::uint64_t plain_keys) {
  if (opened.load(std::memory_order_acquire) != nullptr) return "";
  if (torch_shim() == nullptr) return "PyTorch's C functions are not open";
  std::vector<Sample> tensors = samples();
  Layout found;
  found.plain_keys = plain_keys;
  found.item_sizes = find_item_sizes();
  found.keys = find_value<std::uint64_t>(tensors, &Sample::keys);
  std::erase_if(tensors, [](const Sample& sample) { return !sample.plain; });
  found.storage = find_value<std::uintptr_t>(tensors, &Sample::storage);
  found.shape = find_place(tensors, kTensorSize, kShapeWords * kWord, kWord, shape_fits);
  found.offset = find_value<std::uint64_t>(tensors, &Sample::offset);
  found.dtype = find_place(tensors, kTensorSize, 2, 2, dtype_fits);
  found.device = find_place(tensors, kTensorSize, 3, 1, device_fits);
  found.data = find_place(tensors, kStorageSize, kWord, kWord, data_fits);
  const std::array<std::pair<std::size_t, const char*>, 7> places = {
      {{found.keys, "dispatch keys"},
       {found.storage, "storage"},
       {found.shape, "shape"},
       {found.offset, "storage offset"},
       {found.dtype, "dtype"},
       {found.device, "device"},
       {found.data, "data"}}};
  for (const auto& [place, what] : places) {
    if (place == 0) {
      return std::string("where this PyTorch's tensors have their ") + what + " is not known";
    }
  }
  opened.store(new Layout(found), std::memory_order_release);  // for as long as the process lives
  return "";
}

const char* object_of(TorchTensor tensor) noexcept {
  const char* object = nullptr;
  std::memcpy(static_cast<void*>(&object), tensor, sizeof object);
  return object;
}

bool is_plain(TorchTensor tensor) noexcept {
  const Layout* const layout = opened.load(std::memory_order_acquire);
  return layout != nullptr && has_plain_keys(*layout, object_of(tensor));
}

bool ask_for_traits(const TorchShim& torch, TorchTensor tensor, TensorTraits& traits) noexcept {
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  std::int32_t device = 0;
  std::int32_t index = 0;
  const void* data = nullptr;
  if (torch.dim(tensor, &traits.rank) != 0 || torch.sizes(tensor, &sizes) != 0 ||
      torch.strides(tensor, &strides) != 0 || torch.dtype(tensor, &traits.dtype) != 0 ||
      torch.device_type(tensor, &device) != 0 || torch.device_index(tensor, &index) != 0 ||
      torch.data(tensor, &data) != 0) {
    return false;
  }
  traits.sizes = sizes;
  traits.strides = strides;
  traits.device = static_cast<std::uint8_t>(device);
  traits.index = static_cast<std::uint8_t>(index);
  traits.alignment = low_bits(reinterpret_cast<std::uintptr_t>(data));
  return true;
}

bool read_traits(const TorchShim& torch, TorchTensor tensor, TensorTraits& traits) noexcept {
  const Layout* const layout = opened.load(std::memory_order_acquire);
  if (layout != nullptr) {
    const char* const object = object_of(tensor);
    if (has_plain_keys(*layout, object) && read_where_they_lie(*layout, object, traits)) {
      return true;
    }
  }
  return ask_for_traits(torch, tensor, traits);
}

}  // namespace xpuruntime::bindings
