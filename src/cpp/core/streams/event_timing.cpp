// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "streams/event_timing.h"

#include <chrono>
#include <utility>

#include "xpuruntime/error.h"

namespace xpuruntime {

EventTiming::~EventTiming() {
  for (const Piece& piece : pieces_) {
    if (piece.start != 0) calls::destroy_event(piece.device, piece.start);
    if (piece.end != 0) calls::destroy_event(piece.device, piece.end);
  }
  for (const auto& [device, anchor] : anchors_) calls::destroy_event(device, anchor.event);
}

void EventTiming::anchor(int device) {
  if (anchors_.contains(device)) return;
  Anchor made{.event = calls::create_event(device, true)};
  try {
    calls::record_event(device, made.event, 0);
    calls::synchronize_event(device, made.event);
  } catch (...) {
    calls::destroy_event(device, made.event);
    throw;
  }
  made.at_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count();
  anchors_.emplace(device, made);
}

std::optional<std::size_t> EventTiming::begin(std::uint64_t range, std::string name, int device,
                                              StreamHandle stream) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    if (pieces_.size() >= limit_) {
      ++lost_;
      return std::nullopt;
    }
    if (calls::stream_capturing(device, stream)) return std::nullopt;
    anchor(device);
    Piece piece{.range = range, .name = std::move(name), .device = device, .stream = stream};
    piece.start = calls::create_event(device, true);
    pieces_.push_back(std::move(piece));
    Piece& kept = pieces_.back();
    kept.end = calls::create_event(device, true);
    calls::record_event(device, kept.start, stream);
    return pieces_.size() - 1;
  } catch (const std::exception&) {
    ++lost_;
    return std::nullopt;
  }
}

void EventTiming::end(std::size_t piece) noexcept {
  const std::lock_guard lock(mutex_);
  Piece& one = pieces_[piece];
  try {
    calls::record_event(one.device, one.end, one.stream);
    one.ended = true;
  } catch (const std::exception&) {
    ++lost_;
  }
}

std::vector<WorkRecord> EventTiming::take() {
  const std::lock_guard lock(mutex_);
  std::vector<WorkRecord> found;
  found.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    if (!piece.ended) continue;
    calls::synchronize_event(piece.device, piece.end);
    const Anchor& from = anchors_.at(piece.device);
    const auto since = [&](calls::EventHandle start, calls::EventHandle end) {
      return static_cast<std::int64_t>(calls::elapsed_us(piece.device, start, end) * 1e3);
    };
    WorkRecord record;
    record.name = std::make_shared<const std::string>(piece.name);
    record.device = piece.device;
    record.range = piece.range;
    record.start_ns = from.at_ns + since(from.event, piece.start);
    record.end_ns = record.start_ns + since(piece.start, piece.end);
    found.push_back(std::move(record));
  }
  return found;
}

std::uint64_t EventTiming::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

}  // namespace xpuruntime
