// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/op.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// A yes, or a no with one sentence why, which users read.
struct Support {
  bool ok = true;
  std::string reason;

  static Support yes() { return {}; }
  static Support no(std::string why) { return {false, std::move(why)}; }
};

/// A kernel prepared for one OpDesc on one device. Immutable: many threads may launch it at once,
/// each with a workspace of its own.
class Kernel {
 public:
  virtual ~Kernel() = default;

  /// Scratch memory for one launch, aligned to 256 bytes. Its contents do not matter.
  virtual std::size_t workspace_bytes() const noexcept { return 0; }
  /// What was settled inside the kernel, such as the algorithm of a library, in a form that
  /// `KernelDefinition::prepare` takes back and then does exactly the same. Letters, digits and
  /// "_.:=,+-". Empty where there is nothing to settle.
  virtual std::string config() const { return {}; }
  /// Whether the same inputs give the same bits in every run.
  virtual bool repeatable() const noexcept { return true; }

  /// Enqueues the work on `stream`; on the CPU does it. `operands` holds one address for each slot
  /// of the operation, null where it is absent. The caller has made the device current. Never
  /// allocates, never synchronises, may be captured into a CUDA graph. Throws CudaError when the
  /// launch itself fails.
  virtual void launch(void* const* operands, void* workspace, StreamHandle stream) const = 0;
};

/// A library, or a set of our own kernels, on one type of device. Stateless as far as callers can
/// see; every member may be called from any thread.
class KernelBackend {
 public:
  virtual ~KernelBackend() = default;

  /// The word before the dot of a kernel id: "cublas", "cuda_raw", ...
  virtual std::string_view name() const noexcept = 0;
  virtual DeviceType device_type() const noexcept = 0;
  /// Whether its library can be loaded here, and if not which one is missing, where it was looked
  /// for and what to install. May load it. Never throws.
  virtual Support available() const noexcept = 0;
  /// Of what decides how fast and how exact its kernels are: the library and our own code, such as
  /// "cublasLt 13.0.2". Entries of the tuning cache hold for one version only. Empty when not
  /// available.
  virtual std::string version() const = 0;
};

/// One kernel that may be asked for by name, for one kind of operation. Immutable.
class KernelDefinition {
 public:
  virtual ~KernelDefinition() = default;

  virtual const KernelBackend& backend() const noexcept = 0;
  /// "backend.name".
  virtual std::string_view id() const noexcept = 0;
  virtual OpKind op() const noexcept = 0;
  /// Bare words of a KernelPolicy that mean this kernel too, besides the name of its backend, such
  /// as "cublasLt" or "flash_v2".
  virtual std::vector<std::string> families() const { return {}; }
  /// One line for listings: what it is good for.
  virtual std::string description() const = 0;
  /// One line for listings: dtypes, shapes and devices it serves.
  virtual std::string limits() const = 0;
  /// Whether it may be taken where a policy leaves the choice ("auto"). Where not, it runs only
  /// when asked for by name.
  virtual bool automatic() const noexcept { return true; }

  /// Whether it can do exactly this. A pure function of its arguments: touches no device and no
  /// library, so that it answers on a machine without a GPU. The backend may still be unavailable.
  virtual Support supports(const OpDesc& op, const DeviceInfo& device) const = 0;
  /// Whether `first_supported` should take it while another kernel can serve too; a no is for
  /// shapes where it is known to be the slower one, and says so. Pure. Asked only where `supports`
  /// says yes.
  virtual Support favoured(const OpDesc& op, const DeviceInfo& device) const;
  /// Configurations worth measuring, the library's own first choice first; each can be given to
  /// `prepare`. At most `most`. Slow; throws as `prepare` does. Here: the default choice only.
  virtual std::vector<std::string> configs(const OpDesc& op, const DeviceInfo& device,
                                           std::size_t most) const;
  /// Slow. `config` is what a Kernel said before, or empty for the default choice. Throws
  /// UnsupportedOperationError with the reason when it cannot be done after all (a library refuses,
  /// or `config` is not of this library version), CudaError, OutOfMemoryError, InputError for a
  /// config that cannot be read.
  virtual std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                                const std::string& config) const = 0;
};

}  // namespace xpuruntime
