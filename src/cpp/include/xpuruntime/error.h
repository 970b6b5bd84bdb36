// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace xpuruntime {

// Error                          every error this library throws
//  ├── CudaError                 a CUDA call failed, or the CUDA device asked for is not there
//  ├── OutOfMemoryError          an allocation failed or would pass a pool's limit
//  ├── UnsupportedOperationError what was asked cannot be done by this build, device or object
//  └── InputError                an argument is wrong: name, shape, dtype, range
//
// Each maps to the Python class of the same name (Error to XpuRuntimeError) in xpuruntime.errors.
// Every message names the thing, the reason and the fix. No constructor leaves anything behind when
// it throws.

/// Base of the tree. `device` is "cpu" or "cuda:N", empty where no device is concerned.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, std::string device = {})
      : std::runtime_error(message), device_(std::move(device)) {}
  const std::string& device() const noexcept { return device_; }

 private:
  std::string device_;
};

/// `status` is the cudaError_t of the failing call, 0 where no call was made.
class CudaError : public Error {
 public:
  CudaError(const std::string& message, std::string device, int status)
      : Error(message, std::move(device)), status_(status) {}
  int status() const noexcept { return status_; }

 private:
  int status_;
};

/// `requested` is the size in bytes that could not be had.
class OutOfMemoryError : public Error {
 public:
  OutOfMemoryError(const std::string& message, std::string device, std::size_t requested)
      : Error(message, std::move(device)), requested_(requested) {}
  std::size_t requested() const noexcept { return requested_; }

 private:
  std::size_t requested_;
};

/// `candidates` are the kernels of an operation that none of them serves, as the policy asks: each
/// with its id (and configuration: `id@config`) and the reason. Empty for any other refusal.
class UnsupportedOperationError : public Error {
 public:
  using Candidates = std::vector<std::pair<std::string, std::string>>;

  explicit UnsupportedOperationError(const std::string& message, std::string device = {},
                                     Candidates candidates = {})
      : Error(message, std::move(device)), candidates_(std::move(candidates)) {}
  const Candidates& candidates() const noexcept { return candidates_; }

 private:
  Candidates candidates_;
};

class InputError : public Error {
 public:
  using Error::Error;
};

}  // namespace xpuruntime
