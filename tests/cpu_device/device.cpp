#include "device.hpp"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "ptx_parser.hpp"

namespace verkv::cpu_device {
namespace {

constexpr std::size_t kHostAlignment = 4096;

Status status_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::out_of_bounds:
    case FaultKind::use_after_free:
      return Status::illegal_address;
    case FaultKind::misaligned:
      return Status::misaligned_address;
    case FaultKind::unsupported:
      return Status::not_supported;
    default:
      return Status::launch_failure;
  }
}

}  // namespace

Device::Device(const DeviceOptions& options)
    : options_(options), memory_(options.memory_bytes), random_state_(options.schedule_seed) {
  lane_sequence_.push_back(0);
  streams_[kLegacyStream] = {};
}

// ---- errors

Status Device::note(Status status) {
  if (status != Status::success && status != Status::not_ready) last_error_ = status;
  return status;
}

Status Device::last_error() {
  const Status found = peek_error();
  last_error_ = Status::success;
  return found;
}

void Device::fail_call(Call call, Status status, int skip, bool forever) {
  failures_[call] = {status, skip, forever};
}

Status Device::injected(Call call) {
  if (sticky_ != Status::success) return sticky_;
  const auto found = failures_.find(call);
  if (found == failures_.end()) return Status::success;
  if (found->second.skip > 0) {
    --found->second.skip;
    return Status::success;
  }
  const Status status = found->second.status;
  if (!found->second.forever) failures_.erase(found);
  return note(status);
}

std::string Device::allocation_label(std::uint32_t id) const {
  const auto found = labels_.find(id);
  return found == labels_.end() ? "allocation " + std::to_string(id) : found->second;
}

// ---- memory

Status Device::malloc(Address& out, std::uint64_t bytes, const std::string& label) {
  if (const Status status = injected(Call::malloc); status != Status::success) return status;
  if (const Status status = refuse_in_capture(); status != Status::success) return status;
  out = 0;
  if (bytes == 0) return Status::success;
  Allocation* found = memory_.allocate(bytes, AllocationKind::device, label);
  if (!found) return note(Status::out_of_memory);
  live_[found->address] = found;
  labels_[found->id] = found->label;
  out = found->address;
  return Status::success;
}

Status Device::free(Address address) {
  if (address == 0) return known(Status::success);
  if (const Status status = refuse_in_capture(); status != Status::success) return status;
  const auto found = live_.find(address);
  if (found == live_.end() || (found->second->kind != AllocationKind::device &&
                               found->second->kind != AllocationKind::managed)) {
    return note(Status::invalid_value);
  }
  const Status status = synchronize();  // as cudaFree does
  memory_.release(*found->second);
  live_.erase(found);
  host_blocks_.erase(address);
  return status;
}

Status Device::malloc_async(Address& out, std::uint64_t bytes, StreamId id) {
  if (const Status status = injected(Call::malloc_async); status != Status::success) return status;
  Stream* const found = stream(id);
  if (!found) return note(Status::invalid_handle);
  if (found->capture) return note(Status::capture_unsupported);
  Allocation* made =
      memory_.allocate(bytes, AllocationKind::device, "", Allocation::State::pending);
  if (!made) return note(Status::out_of_memory);
  live_[made->address] = made;
  labels_[made->id] = made->label;
  out = made->address;
  return enqueue(id, {"allocation", nullptr, {}, [made](const ThreadClock&) {
                        made->state = Allocation::State::live;
                      }});
}

Status Device::free_async(Address address, StreamId id) {
  const auto found = live_.find(address);
  if (found == live_.end()) return note(Status::invalid_value);
  Allocation* const allocation = found->second;
  live_.erase(found);
  return enqueue(id, {"release", nullptr, {}, [this, allocation](const ThreadClock& who) {
                        // Freeing is a write: it must come after all that uses the memory.
                        if (options_.machine.check_races && allocation->bytes > 0) {
                          memory_.fill(who, allocation->address, kPoison,
                                       std::min<std::uint64_t>(allocation->bytes, 1 << 20), *this);
                        }
                        memory_.release(*allocation);
                      }});
}

Status Device::host_malloc(void*& out, std::uint64_t bytes) {
  if (const Status status = injected(Call::host_malloc); status != Status::success) return status;
  return attach_new(out, bytes, AllocationKind::pinned);
}

Status Device::managed_malloc(void*& out, std::uint64_t bytes) {
  if (const Status status = injected(Call::managed_malloc); status != Status::success)
    return status;
  return attach_new(out, bytes, AllocationKind::managed);
}

Status Device::attach_new(void*& out, std::uint64_t bytes, AllocationKind kind) {
  if (const Status status = refuse_in_capture(); status != Status::success) return status;
  out = nullptr;
  if (bytes == 0) return Status::success;
  const std::size_t size = (bytes + kHostAlignment - 1) / kHostAlignment * kHostAlignment;
  auto* const memory = static_cast<std::uint8_t*>(std::aligned_alloc(kHostAlignment, size));
  if (!memory) return note(Status::out_of_memory);
  std::memset(memory, kPoison, size);
  host_blocks_.emplace(address_of(memory), std::unique_ptr<std::uint8_t[], void (*)(std::uint8_t*)>(
                                               memory, [](std::uint8_t* p) { std::free(p); }));
  Allocation* const found = memory_.attach(memory, bytes, kind);
  live_[found->address] = found;
  labels_[found->id] = found->label;
  out = memory;
  return Status::success;
}

Status Device::host_free(void* host) {
  if (!host) return known(Status::success);
  const auto found = live_.find(address_of(host));
  if (found == live_.end() || found->second->kind != AllocationKind::pinned) {
    return note(Status::invalid_value);
  }
  const Status status = synchronize();
  memory_.release(*found->second);
  live_.erase(found);
  host_blocks_.erase(address_of(host));
  return status;
}

Status Device::advise(const void* memory, std::uint64_t bytes) {
  if (const Status status = injected(Call::advise); status != Status::success) return status;
  const Address address = address_of(memory);
  const Allocation* const found = memory_.find(address);
  const bool live = found && found->state == Allocation::State::live;
  if (live && (found->kind == AllocationKind::managed || found->kind == AllocationKind::pageable) &&
      address + bytes <= found->address + found->bytes) {
    return Status::success;
  }
  const bool ordinary = address < kDeviceBase && bytes > 0 && options_.pageable_access &&
                        (!live || found->kind == AllocationKind::pageable);
  if (!ordinary) return note(Status::invalid_value);
  Allocation* const made =
      memory_.attach(const_cast<void*>(memory), bytes, AllocationKind::pageable);
  labels_[made->id] = made->label;
  return Status::success;
}

Status Device::host_register(void* host, std::uint64_t bytes) {
  if (const Status status = injected(Call::host_register); status != Status::success) return status;
  if (!options_.host_register) return note(Status::not_supported);
  if (!host || bytes == 0 || address_of(host) % 16 != 0) return note(Status::invalid_value);
  const auto next = live_.lower_bound(address_of(host) + bytes);
  if (next != live_.begin()) {
    const Allocation& before = *std::prev(next)->second;
    if (before.address + before.bytes > address_of(host)) return note(Status::already_registered);
  }
  Allocation* const found = memory_.attach(host, bytes, AllocationKind::registered);
  live_[found->address] = found;
  labels_[found->id] = found->label;
  return Status::success;
}

Status Device::host_unregister(void* host) {
  const auto found = live_.find(address_of(host));
  if (found == live_.end() || found->second->kind != AllocationKind::registered) {
    return note(Status::not_registered);
  }
  const Status status = synchronize();
  memory_.release(*found->second);
  live_.erase(found);
  return status;
}

Status Device::copy(Address to, Address from, std::uint64_t bytes, CopyKind kind, StreamId id,
                    bool synchronous) {
  return copy_2d(to, bytes, from, bytes, bytes, 1, kind, id, synchronous);
}

Status Device::copy_2d(Address to, std::uint64_t to_pitch, Address from, std::uint64_t from_pitch,
                       std::uint64_t width, std::uint64_t height, CopyKind kind, StreamId id,
                       bool synchronous) {
  if (const Status status = injected(Call::copy); status != Status::success) return status;
  Stream* const used = stream(id);
  if (!used) return note(Status::invalid_handle);
  if (width == 0 || height == 0) return Status::success;
  if (width > to_pitch || width > from_pitch) return note(Status::invalid_value);
  const auto device = [](Address address) { return address >= kDeviceBase; };
  const bool to_host = !device(to);
  const bool from_host = !device(from);
  if ((kind == CopyKind::host_to_device && (to_host || !from_host)) ||
      (kind == CopyKind::device_to_host && (!to_host || from_host)) ||
      (kind == CopyKind::device_to_device && (to_host || from_host)) ||
      (kind == CopyKind::host_to_host && (!to_host || !from_host))) {
    // Pinned memory may stand for device memory: it has an address there.
    const auto mapped = [&](Address address) { return device(address) || memory_.find(address); };
    const bool allowed = kind == CopyKind::device_to_device && mapped(to) && mapped(from);
    if (!allowed) return note(Status::invalid_memcpy_direction);
  }
  const auto pageable = [&](Address address, bool host) {
    if (!host) return false;
    const Allocation* found = memory_.find(address);
    return !found || found->state == Allocation::State::freed ||
           found->kind == AllocationKind::pageable;
  };
  const bool pageable_to = pageable(to, to_host);
  const bool pageable_from = pageable(from, from_host);
  if (used->capture && (synchronous || pageable_to)) {
    used->capture->invalid = true;
    return note(Status::capture_unsupported);
  }
  // Ordinary memory is read when the call is made; pinned memory when the copy runs.
  std::vector<std::uint8_t> staged;
  if (pageable_from) {
    staged.resize(width * height);
    for (std::uint64_t row = 0; row < height; ++row) {
      std::memcpy(&staged[row * width], reinterpret_cast<const void*>(from + row * from_pitch),
                  width);
    }
  }
  const auto action = [=, this, staged = std::move(staged)](const ThreadClock& who) {
    for (std::uint64_t row = 0; row < height; ++row) {
      const Address target = to + row * to_pitch;
      const Address source = from + row * from_pitch;
      auto* const host_target = reinterpret_cast<void*>(target);
      if (pageable_to && pageable_from)
        std::memcpy(host_target, &staged[row * width], width);
      else if (pageable_from)
        memory_.write(who, target, &staged[row * width], width, *this);
      else if (pageable_to)
        memory_.read(who, host_target, source, width, *this);
      else
        memory_.copy(who, target, source, width, *this);
    }
  };
  std::uint32_t operation = 0;
  const std::string what = "a copy of " + std::to_string(width * height) + " bytes";
  if (const Status status = enqueue(id, {what, nullptr, {}, action}, &operation);
      status != Status::success) {
    return status;
  }
  // Copies within the device return at once, even those called synchronous.
  const bool waits = pageable_to || (synchronous && (to_host || from_host));
  return waits ? wait_for(operation) : Status::success;
}

Status Device::fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamId id) {
  if (const Status status = injected(Call::copy); status != Status::success) return status;
  if (!memory_.find(to) && bytes > 0) return note(Status::invalid_value);
  return enqueue(
      id, {"a fill of " + std::to_string(bytes) + " bytes",
           nullptr,
           {},
           [=, this](const ThreadClock& who) { memory_.fill(who, to, value, bytes, *this); }});
}

// ---- the queue

void Device::join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool Device::ordered(std::uint32_t earlier, std::uint32_t later) const {
  if (earlier == later) return true;
  // The machine asks of few operations, at every access.
  std::array<std::uint32_t, 2>& known = known_order_[earlier % known_order_.size()];
  if (known[0] == earlier && known[1] == later) return true;
  const Operation& a = at(earlier);
  const Clock& clock = at(later).clock;
  if (a.lane >= clock.size() || clock[a.lane] < a.sequence) return false;
  known = {earlier, later};
  return true;
}

std::string Device::describe(const Access& access) const {
  const Operation& operation = at(access.operation);
  if (!operation.work.kernel) return operation.work.what;
  const LaunchShape& shape = operation.work.shape;
  const Dim3& grid = shape.grid;
  const Dim3& block = shape.block;
  std::ostringstream text;
  text << "thread (" << access.thread % block.x << ',' << access.thread / block.x % block.y << ','
       << access.thread / block.x / block.y << ") of block (" << access.block % grid.x << ','
       << access.block / grid.x % grid.y << ',' << access.block / grid.x / grid.y << ") of kernel "
       << operation.work.kernel->readable_name << " at " << operation.work.kernel->where(access.pc);
  return text.str();
}

std::uint64_t Device::random() {
  random_state_ += 0x9E3779B97F4A7C15ULL;
  std::uint64_t value = random_state_;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

Device::Stream* Device::stream(StreamId id) {
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : &found->second;
}

// The legacy stream waits for all blocking streams, and they for it.
std::vector<std::uint32_t> Device::stream_dependencies(StreamId id, Stream& used) {
  std::vector<std::uint32_t> dependencies = std::exchange(used.waits, {});
  const auto add = [&](std::uint32_t operation) {
    if (operation != 0) dependencies.push_back(operation);
  };
  add(used.tail);
  if (id == kLegacyStream) {
    for (const auto& [other_id, other] : streams_) {
      if (other_id != id && other.blocking) add(other.tail);
    }
  } else if (used.blocking) {
    add(streams_[kLegacyStream].tail);
  }
  return dependencies;
}

std::uint32_t Device::push(std::uint32_t lane, std::vector<std::uint32_t> dependencies, Work work) {
  auto operation = std::make_unique<Operation>();
  operation->work = std::move(work);
  operation->lane = lane;
  operation->sequence = ++lane_sequence_[lane];
  operation->clock = host_clock_;
  for (const std::uint32_t dependency : dependencies) join(operation->clock, at(dependency).clock);
  if (operation->clock.size() <= lane) operation->clock.resize(lane + 1);
  operation->clock[lane] = operation->sequence;
  operation->dependencies = std::move(dependencies);
  operations_.push_back(std::move(operation));
  const auto id = static_cast<std::uint32_t>(operations_.size());
  pending_.push_back(id);
  return id;
}

Status Device::enqueue(StreamId id, Work work, std::uint32_t* out) {
  if (sticky_ != Status::success) return sticky_;
  Stream* const used = stream(id);
  if (!used) return note(Status::invalid_handle);
  if (used->capture) {
    Capture& capture = *used->capture;
    capture.nodes.push_back({std::move(work), id, std::move(used->node_tail)});
    used->node_tail = {capture.nodes.size() - 1};
    return Status::success;
  }
  if (id == kLegacyStream) {
    for (auto& [other_id, other] : streams_) {
      if (other.capture && other.blocking) {
        other.capture->invalid = true;
        return note(Status::capture_implicit);
      }
    }
  }
  const std::uint32_t operation = push(used->lane, stream_dependencies(id, *used), std::move(work));
  used->tail = operation;
  if (out) *out = operation;
  run_some();
  return known(Status::success);
}

bool Device::ready(const Operation& operation) const {
  return std::all_of(operation.dependencies.begin(), operation.dependencies.end(),
                     [&](std::uint32_t id) { return at(id).done; });
}

// Runs one operation that may run; which, the seed says. Even seeds choose anew each time, odd ones
// always prefer the same streams.
bool Device::step() {
  std::vector<std::uint32_t> candidates;
  for (const std::uint32_t id : pending_) {
    if (ready(at(id))) candidates.push_back(id);
  }
  if (candidates.empty()) return false;
  std::uint32_t chosen = candidates.front();
  if (options_.schedule_seed % 2 == 1) {
    const auto rank = [&](std::uint32_t id) {
      std::uint64_t hash = (at(id).lane + 1) * 0x9E3779B97F4A7C15ULL ^
                           options_.schedule_seed * 0xD1342543DE82EF95ULL;
      hash ^= hash >> 31;
      return hash * 0xBF58476D1CE4E5B9ULL >> 8;
    };
    for (const std::uint32_t id : candidates) {
      if (rank(id) < rank(chosen)) chosen = id;
    }
  } else if (options_.schedule_seed != 0) {
    chosen = candidates[random() % candidates.size()];
  }
  run(chosen);
  return true;
}

// A GPU may start at once: some seeds run part of what is queued with every call.
void Device::run_some() {
  if (options_.schedule_seed == 0) return;
  const std::uint64_t eagerness = options_.schedule_seed / 2 % 3;
  if (eagerness == 0) return;
  std::uint64_t steps = eagerness == 1 ? random() % 3 : ~std::uint64_t{0};
  while (steps-- > 0 && step()) {
  }
}

void Device::run(std::uint32_t id) {
  Operation& operation = at(id);
  pending_.erase(std::find(pending_.begin(), pending_.end(), id));
  if (sticky_ == Status::success && operation.work.action) {
    ThreadClock who;
    who.operation = id;
    memory_.check_races = options_.machine.check_races;
    try {
      operation.work.action(who);
    } catch (const Fault& fault) {
      const std::string text =
          operation.work.kernel
              ? std::string(fault.what())
              : name_of(fault.kind) + " in " + operation.work.what + ": " + fault.what();
      faults_.emplace_back(fault.kind, text);
      sticky_ = status_of(fault.kind);
    }
  }
  operation.work.action = nullptr;
  operation.finished_at = ++time_;
  operation.done = true;
}

Status Device::wait_for(std::uint32_t operation) {
  if (operation == 0) return known(Status::success);
  while (!at(operation).done && step()) {
  }
  join(host_clock_, at(operation).clock);
  return note(known(Status::success));
}

Status Device::refuse_in_capture() {
  if (sticky_ != Status::success) return sticky_;
  for (auto& [id, one] : streams_) {
    if (!one.capture) continue;
    one.capture->invalid = true;
    return note(Status::capture_unsupported);
  }
  return Status::success;
}

// ---- streams and events

Status Device::stream_create(StreamId& out, bool blocking) {
  if (const Status status = injected(Call::stream_create); status != Status::success) return status;
  out = next_handle_++;
  Stream& made = streams_[out];
  made.blocking = blocking;
  made.lane = static_cast<std::uint32_t>(lane_sequence_.size());
  lane_sequence_.push_back(0);
  return Status::success;
}

Status Device::stream_destroy(StreamId id) {
  if (id == kLegacyStream || !stream(id)) return note(Status::invalid_handle);
  // What it holds still runs; blocking streams' order with the legacy stream must not get lost.
  if (streams_[id].blocking && streams_[id].tail) {
    streams_[kLegacyStream].waits.push_back(streams_[id].tail);
  }
  streams_.erase(id);
  return known(Status::success);
}

Status Device::stream_synchronize(StreamId id) {
  if (const Status status = injected(Call::synchronize); status != Status::success) return status;
  Stream* const used = stream(id);
  if (!used) return note(Status::invalid_handle);
  if (used->capture) return refuse_in_capture();
  if (id == kLegacyStream) {
    for (const std::uint32_t operation : stream_dependencies(id, *used)) {
      if (const Status status = wait_for(operation); status != Status::success) return status;
    }
    return known(Status::success);
  }
  return wait_for(used->tail);
}

Status Device::stream_query(StreamId id) {
  Stream* const used = stream(id);
  if (!used) return note(Status::invalid_handle);
  if (sticky_ != Status::success) return sticky_;
  run_some();
  if (used->tail && !at(used->tail).done) {
    step();  // so that a program that polls gets on
    return Status::not_ready;
  }
  return wait_for(used->tail);
}

Status Device::stream_wait(StreamId id, EventId event_id) {
  if (sticky_ != Status::success) return sticky_;
  Stream* const used = stream(id);
  const auto event = events_.find(event_id);
  if (!used || event == events_.end()) return note(Status::invalid_handle);
  if (event->second.capture) {
    if (used->capture && used->capture != event->second.capture)
      return note(Status::capture_isolation);
    if (!used->capture) {
      used->capture = event->second.capture;
      used->capture->streams.insert(id);
      used->node_tail.clear();
    }
    for (const std::size_t node : event->second.nodes) used->node_tail.push_back(node);
    return Status::success;
  }
  if (used->capture) return note(Status::capture_isolation);
  if (event->second.operation) used->waits.push_back(event->second.operation);
  return Status::success;
}

Status Device::event_create(EventId& out) {
  if (const Status status = injected(Call::event_create); status != Status::success) return status;
  out = next_handle_++;
  events_[out] = {};
  return Status::success;
}

Status Device::event_destroy(EventId event) {
  return events_.erase(event) ? known(Status::success) : note(Status::invalid_handle);
}

Status Device::event_record(EventId event_id, StreamId id) {
  const auto event = events_.find(event_id);
  Stream* const used = stream(id);
  if (event == events_.end() || !used) return note(Status::invalid_handle);
  if (used->capture) {
    event->second = {0, used->capture, used->node_tail};
    return Status::success;
  }
  std::uint32_t operation = 0;
  const Status status = enqueue(id, {"an event", nullptr, {}, nullptr}, &operation);
  if (status == Status::success) event->second = {operation, nullptr, {}};
  return status;
}

Status Device::event_synchronize(EventId event_id) {
  if (const Status status = injected(Call::synchronize); status != Status::success) return status;
  const auto event = events_.find(event_id);
  if (event == events_.end()) return note(Status::invalid_handle);
  if (event->second.capture) return refuse_in_capture();
  return wait_for(event->second.operation);
}

Status Device::event_query(EventId event_id) {
  const auto event = events_.find(event_id);
  if (event == events_.end()) return note(Status::invalid_handle);
  if (sticky_ != Status::success) return sticky_;
  const std::uint32_t operation = event->second.operation;
  run_some();
  if (operation && !at(operation).done) {
    step();
    return Status::not_ready;
  }
  return wait_for(operation);
}

// Time is counted in instructions, a million to the millisecond; it measures nothing.
Status Device::event_elapsed(float& out_milliseconds, EventId from, EventId to) {
  const auto a = events_.find(from);
  const auto b = events_.find(to);
  if (a == events_.end() || b == events_.end() || !a->second.operation || !b->second.operation) {
    return note(Status::invalid_handle);
  }
  const Operation& first = at(a->second.operation);
  const Operation& last = at(b->second.operation);
  if (!first.done || !last.done) return Status::not_ready;
  out_milliseconds =
      (static_cast<float>(last.finished_at) - static_cast<float>(first.finished_at)) * 1e-6F;
  return known(Status::success);
}

Status Device::host_function(StreamId id, std::function<void()> function) {
  return enqueue(
      id, {"a host function", nullptr, {}, [f = std::move(function)](const ThreadClock&) { f(); }});
}

Status Device::synchronize() {
  if (const Status status = injected(Call::synchronize); status != Status::success) return status;
  if (const Status status = refuse_in_capture(); status != Status::success) return status;
  while (step()) {
  }
  for (const auto& [id, one] : streams_) {
    if (one.tail) join(host_clock_, at(one.tail).clock);
    for (const std::uint32_t operation : one.waits) join(host_clock_, at(operation).clock);
  }
  return note(known(Status::success));
}

// ---- graphs

Status Device::capture_begin(StreamId id) {
  Stream* const used = stream(id);
  if (!used) return note(Status::invalid_handle);
  if (id == kLegacyStream || used->capture) return note(Status::capture_unsupported);
  used->capture = std::make_shared<Capture>();
  used->capture->origin = id;
  used->capture->id = ++captures_;
  used->capture->streams.insert(id);
  used->node_tail.clear();
  return known(Status::success);
}

std::uint64_t Device::capture_id(StreamId id) const {
  const auto found = streams_.find(id);
  return found != streams_.end() && found->second.capture ? found->second.capture->id : 0;
}

Status Device::capture_end(StreamId id, GraphId& out) {
  Stream* const used = stream(id);
  if (!used || !used->capture || used->capture->origin != id)
    return note(Status::capture_unmatched);
  const std::shared_ptr<Capture> capture = used->capture;
  // All that other streams added must lead back to the one where the capture began.
  std::vector<bool> reached(capture->nodes.size());
  std::vector<std::size_t> open = used->node_tail;
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    for (const std::size_t before : capture->nodes[node].dependencies) open.push_back(before);
  }
  const bool joined = std::all_of(reached.begin(), reached.end(), [](bool one) { return one; });
  for (const StreamId member : capture->streams) {
    if (Stream* const one = stream(member)) {
      one->capture = nullptr;
      one->node_tail.clear();
    }
  }
  for (auto& [event_id, event] : events_) {
    if (event.capture == capture) event = {};
  }
  if (capture->invalid) return note(Status::capture_invalidated);
  if (!joined) return note(Status::capture_unjoined);
  out = next_handle_++;
  graphs_[out] = std::move(capture->nodes);
  return known(Status::success);
}

Status Device::graph_instantiate(GraphExecId& out, GraphId graph) {
  if (const Status status = injected(Call::graph_instantiate); status != Status::success)
    return status;
  const auto found = graphs_.find(graph);
  if (found == graphs_.end()) return note(Status::invalid_handle);
  out = next_handle_++;
  GraphExec& exec = execs_[out];
  exec.nodes = found->second;
  for (const Node& node : exec.nodes) {
    if (exec.lanes.count(node.stream)) continue;
    exec.lanes[node.stream] = static_cast<std::uint32_t>(lane_sequence_.size());
    lane_sequence_.push_back(0);
  }
  return Status::success;
}

Status Device::graph_launch(GraphExecId exec_id, StreamId id) {
  if (sticky_ != Status::success) return sticky_;
  const auto found = execs_.find(exec_id);
  Stream* const used = stream(id);
  if (found == execs_.end() || !used) return note(Status::invalid_handle);
  if (used->capture) return note(Status::capture_unsupported);
  GraphExec& exec = found->second;
  std::vector<std::uint32_t> before = stream_dependencies(id, *used);
  if (exec.last) before.push_back(exec.last);
  std::vector<std::uint32_t> made;
  for (const Node& node : exec.nodes) {
    std::vector<std::uint32_t> dependencies;
    if (node.dependencies.empty()) dependencies = before;
    for (const std::size_t one : node.dependencies) dependencies.push_back(made[one]);
    made.push_back(push(exec.lanes.at(node.stream), std::move(dependencies), node.work));
  }
  std::vector<std::uint32_t> ends = before;
  ends.insert(ends.end(), made.begin(), made.end());
  exec.last = used->tail =
      push(used->lane, std::move(ends), {"the end of a graph", nullptr, {}, nullptr});
  run_some();
  return known(Status::success);
}

Status Device::graph_destroy(GraphId graph) {
  return graphs_.erase(graph) ? known(Status::success) : note(Status::invalid_handle);
}

Status Device::graph_exec_destroy(GraphExecId exec) {
  return execs_.erase(exec) ? known(Status::success) : note(Status::invalid_handle);
}

// ---- modules and launches

namespace {

// Parsed once for all devices: a test makes many, and each loads the same texts.
std::shared_ptr<const Module> parsed(const std::string& ptx) {
  static std::unordered_map<std::string, std::shared_ptr<const Module>> modules;
  std::shared_ptr<const Module>& found = modules[ptx];
  if (!found) found = std::make_shared<const Module>(parse_ptx(ptx));
  return found;
}

}  // namespace

std::shared_ptr<const Module> Device::load(const std::string& ptx) {
  const std::shared_ptr<const Module> found = parsed(ptx);
  // Without addresses of variables it is the same on every device.
  if (found->variables.empty()) return found;
  auto module = std::make_shared<Module>(*found);
  for (auto& [name, kernel] : module->kernels) kernel = std::make_shared<Kernel>(*kernel);
  auto& places = variables_[module.get()];
  std::vector<Address> addresses;
  for (const Variable& variable : module->variables) {
    Allocation* const made =
        memory_.allocate(variable.size, AllocationKind::module_variable, variable.name);
    if (!made) throw ParseError("no memory for the variable " + variable.name);
    labels_[made->id] = made->label;
    // Written before anything else can run, so no operation has to be named for it.
    for (std::uint64_t i = 0; i < variable.size; ++i) {
      Page& page = made->contents->page(i);
      page.data[i % kPageBytes] = variable.initial[i];
      page.initialised[i % kPageBytes] = 0xff;
    }
    addresses.push_back(made->address);
    places[variable.name] = {made->address, variable.size};
  }
  for (auto& [name, kernel] : module->kernels) {
    const auto resolve = [&](Operand& operand) {
      if (operand.symbol < 0) return;
      operand.value += addresses[static_cast<std::size_t>(operand.symbol)];
      operand.symbol = -1;
    };
    for (Instruction& in : kernel->code) {
      for (Operand& operand : in.operands) resolve(operand);
    }
    for (Operand& operand : kernel->elements) resolve(operand);
  }
  return module;
}

Status Device::variable(const Module& module, const std::string& name, Address& out,
                        std::uint64_t& out_bytes) const {
  const auto places = variables_.find(&module);
  if (places == variables_.end()) return Status::not_found;
  const auto found = places->second.find(name);
  if (found == places->second.end()) return Status::not_found;
  out = found->second.first;
  out_bytes = found->second.second;
  return Status::success;
}

Status Device::check_shape(const Kernel& kernel, const LaunchShape& shape) const {
  const Dim3& grid = shape.grid;
  const Dim3& block = shape.block;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64 ||
      grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffU || grid.y > 65535 ||
      grid.z > 65535) {
    return Status::invalid_configuration;
  }
  const auto& required = kernel.required_threads;
  if (required[0] && (block.x != required[0] || block.y != required[1] || block.z != required[2])) {
    return Status::invalid_configuration;
  }
  const auto& most = kernel.max_threads;
  if (most[0] && threads > std::uint64_t{most[0]} * most[1] * most[2])
    return Status::out_of_resources;
  const auto allowed = allowed_shared_.find(&kernel);
  const std::size_t limit =
      allowed == allowed_shared_.end()
          ? options_.shared_per_block
          : std::max(options_.shared_per_block, allowed->second + kernel.shared_bytes);
  if (kernel.shared_bytes + shape.dynamic_shared > limit ||
      kernel.shared_bytes + shape.dynamic_shared > options_.shared_per_block_opt_in) {
    return Status::invalid_value;
  }
  return Status::success;
}

Status Device::launch(const std::shared_ptr<const Kernel>& kernel, const LaunchShape& shape,
                      const std::vector<std::uint8_t>& parameters, StreamId id) {
  if (const Status status = injected(Call::launch); status != Status::success) return status;
  if (!kernel) return note(Status::invalid_device_function);
  if (parameters.size() != kernel->parameter_bytes) return note(Status::invalid_value);
  if (const Status status = check_shape(*kernel, shape); status != Status::success)
    return note(status);
  const std::shared_ptr<const Kernel> run = change_ ? change_(kernel) : kernel;
  return enqueue(id,
                 {"kernel " + run->readable_name, run, shape, [=, this](const ThreadClock& who) {
                    LaunchCounters counters = run_kernel(*run, shape, parameters, memory_, *this,
                                                         who.operation, options_.machine);
                    time_ += counters.instructions;
                    launches_.push_back({run->readable_name, shape, std::move(counters)});
                  }});
}

}  // namespace verkv::cpu_device
