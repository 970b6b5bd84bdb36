// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/buffer.h"

#include "memory/block.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

void* Buffer::data() const noexcept { return block_ == nullptr ? nullptr : block_->pointer; }

std::size_t Buffer::size() const noexcept { return block_ == nullptr ? 0 : block_->requested; }

StreamHandle Buffer::stream() const noexcept { return block_ == nullptr ? 0 : block_->stream; }

void Buffer::record_stream(StreamHandle stream) {
  if (block_ != nullptr) pool_->use_on(block_, stream);
}

void Buffer::reset() noexcept {
  if (block_ != nullptr) pool_->give(std::exchange(block_, nullptr));
  pool_.reset();
}

}  // namespace xpuruntime
