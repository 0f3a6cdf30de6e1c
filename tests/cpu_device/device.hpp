// A device as a program sees it: memory, modules, streams, events, graphs, errors. The entry points
// of the CUDA runtime (cudart.cpp) are a thin front of this; tests may use it directly.
//
// Work is queued and runs late, in an order that a seed chooses among those that streams and events
// allow: a wait that is missing is found by some seed as a wrong result, and by every seed as a
// race.
#ifndef VERKV_TESTS_CPU_DEVICE_DEVICE_HPP
#define VERKV_TESTS_CPU_DEVICE_DEVICE_HPP

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "machine.hpp"
#include "memory.hpp"
#include "ptx.hpp"
#include "race.hpp"

namespace verkv::cpu_device {

// The values are those of cudaError_t.
enum class Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  invalid_configuration = 9,
  invalid_device_pointer = 17,
  invalid_memcpy_direction = 21,
  invalid_device_function = 98,
  no_device = 100,
  invalid_device = 101,
  invalid_ptx = 218,
  invalid_handle = 400,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  out_of_resources = 701,
  already_registered = 712,
  not_registered = 713,
  misaligned_address = 716,
  launch_failure = 719,
  not_permitted = 800,
  not_supported = 801,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_unmatched = 903,
  capture_unjoined = 904,
  capture_isolation = 905,
  capture_implicit = 906
};

// Calls that can be made to fail.
enum class Call : std::uint8_t {
  malloc,
  malloc_async,
  host_malloc,
  host_register,
  managed_malloc,
  advise,
  stream_create,
  event_create,
  launch,
  copy,
  synchronize,
  graph_instantiate
};

struct DeviceOptions {
  MachineOptions machine;
  std::uint64_t schedule_seed = 0;  // 0: everything as late as possible, oldest first
  std::uint64_t memory_bytes = std::uint64_t{64} << 30;
  int devices = 1;
  int compute_major = 9, compute_minor = 0;
  int multiprocessors = 4;
  std::size_t shared_per_block = 48 << 10;
  std::size_t shared_per_block_opt_in = 227 << 10;
  bool host_register = true;       // memory of the host can be pinned where it lies
  bool pageable_access = false;    // kernels reach ordinary memory of the host, once advised
  bool concurrent_managed = true;  // host and kernels may use managed memory at the same time
};

struct LaunchRecord {
  std::string kernel;
  LaunchShape shape;
  LaunchCounters counters;
};

using StreamId = std::uint64_t;
using EventId = std::uint64_t;
using GraphId = std::uint64_t;
using GraphExecId = std::uint64_t;
inline constexpr StreamId kLegacyStream = 0;

enum class CopyKind : std::uint8_t {
  host_to_host,
  host_to_device,
  device_to_host,
  device_to_device,
  any
};

class Device final : public History {
 public:
  explicit Device(const DeviceOptions& options = {});

  // ---- what tests look at
  const DeviceOptions& options() const { return options_; }
  DeviceOptions& options() { return options_; }
  // Messages of everything that a check found.
  const std::vector<Fault>& faults() const { return faults_; }
  const std::vector<LaunchRecord>& launches() const { return launches_; }
  void forget_launches() { launches_.clear(); }
  std::string allocation_label(std::uint32_t id) const;
  Memory& memory() { return memory_; }
  std::size_t live_allocations() const { return live_.size(); }
  // The call of this kind after `skip` others returns the status, and all later ones if `forever`.
  void fail_call(Call call, Status status, int skip = 0, bool forever = false);
  void stop_failing() { failures_.clear(); }

  // ---- errors: a fault stays, as on a GPU
  Status last_error();
  Status peek_error() const { return sticky_ != Status::success ? sticky_ : last_error_; }
  Status note(Status status);

  // ---- memory
  Status malloc(Address& out, std::uint64_t bytes, const std::string& label = "");
  Status free(Address address);
  Status malloc_async(Address& out, std::uint64_t bytes, StreamId stream);
  Status free_async(Address address, StreamId stream);
  Status host_malloc(void*& out, std::uint64_t bytes);
  Status host_free(void* host);
  Status managed_malloc(void*& out, std::uint64_t bytes);  // free() frees it
  // Placement is ignored; ordinary memory of the host becomes accessible to kernels, with these
  // bounds, where the device has pageable_access.
  Status advise(const void* memory, std::uint64_t bytes);
  Status host_register(void* host, std::uint64_t bytes);
  Status host_unregister(void* host);
  Status copy(Address to, Address from, std::uint64_t bytes, CopyKind kind, StreamId stream,
              bool synchronous);
  Status copy_2d(Address to, std::uint64_t to_pitch, Address from, std::uint64_t from_pitch,
                 std::uint64_t width, std::uint64_t height, CopyKind kind, StreamId stream,
                 bool synchronous);
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamId stream);
  static Address address_of(const void* host) { return reinterpret_cast<Address>(host); }

  // ---- streams and events
  Status stream_create(StreamId& out, bool blocking);
  Status stream_destroy(StreamId stream);
  Status stream_synchronize(StreamId stream);
  Status stream_query(StreamId stream);
  Status stream_wait(StreamId stream, EventId event);
  Status event_create(EventId& out);
  Status event_destroy(EventId event);
  Status event_record(EventId event, StreamId stream);
  Status event_synchronize(EventId event);
  Status event_query(EventId event);
  Status event_elapsed(float& out_milliseconds, EventId from, EventId to);
  Status host_function(StreamId stream, std::function<void()> function);
  Status synchronize();

  // ---- graphs
  Status capture_begin(StreamId stream);
  Status capture_end(StreamId stream, GraphId& out);
  // The number of the capture that the stream is in; 0: none.
  std::uint64_t capture_id(StreamId stream) const;
  bool capturing(StreamId stream) const { return capture_id(stream) != 0; }
  Status graph_instantiate(GraphExecId& out, GraphId graph);
  Status graph_launch(GraphExecId exec, StreamId stream);
  Status graph_destroy(GraphId graph);
  Status graph_exec_destroy(GraphExecId exec);
  std::size_t graph_nodes(GraphId graph) const { return graphs_.at(graph).size(); }

  // ---- modules and launches
  // Throws ParseError.
  std::shared_ptr<const Module> load(const std::string& ptx);
  Status variable(const Module& module, const std::string& name, Address& out,
                  std::uint64_t& out_bytes) const;
  // From now on a launch runs what `change` makes of its kernel, which must take the same
  // arguments. For tests of kernels with a fault put in; empty: nothing is changed.
  using KernelChange =
      std::function<std::shared_ptr<const Kernel>(const std::shared_ptr<const Kernel>& kernel)>;
  void change_kernels(KernelChange change) { change_ = std::move(change); }
  void allow_shared(const Kernel& kernel, std::size_t bytes) { allowed_shared_[&kernel] = bytes; }
  Status launch(const std::shared_ptr<const Kernel>& kernel, const LaunchShape& shape,
                const std::vector<std::uint8_t>& parameters, StreamId stream = kLegacyStream);
  // The same with the arguments themselves, which must have the sizes of the parameters.
  template <typename... Arguments>
  Status launch_with(const std::shared_ptr<const Kernel>& kernel, const LaunchShape& shape,
                     StreamId stream, const Arguments&... arguments) {
    std::vector<std::uint8_t> bytes(kernel->parameter_bytes);
    std::size_t index = 0;
    bool fits = sizeof...(arguments) == kernel->parameters.size();
    [[maybe_unused]] const auto put = [&](const auto& argument) {
      static_assert(std::is_trivially_copyable_v<std::decay_t<decltype(argument)>>);
      if (!fits) return;
      const Parameter& parameter = kernel->parameters[index++];
      fits = parameter.size == sizeof argument;
      if (fits) std::memcpy(bytes.data() + parameter.offset, &argument, sizeof argument);
    };
    (put(arguments), ...);
    return fits ? launch(kernel, shape, bytes, stream) : note(Status::invalid_value);
  }

  // ---- History
  bool ordered(std::uint32_t earlier, std::uint32_t later) const override;
  std::string describe(const Access& access) const override;

 private:
  using Clock = std::vector<std::uint32_t>;  // of lanes: sequences of operations in order
  using Action = std::function<void(const ThreadClock&)>;
  struct Work {
    std::string what;
    std::shared_ptr<const Kernel> kernel;  // of a launch
    LaunchShape shape;
    Action action;
  };
  struct Operation {
    Work work;
    std::uint32_t lane = 0, sequence = 0;
    Clock clock;
    std::vector<std::uint32_t> dependencies;
    bool done = false;
    std::uint64_t finished_at = 0;
  };
  struct Node {
    Work work;
    StreamId stream = 0;
    std::vector<std::size_t> dependencies;
  };
  using Graph = std::vector<Node>;
  struct Capture {
    Graph nodes;
    StreamId origin = 0;
    std::uint64_t id = 0;
    std::set<StreamId> streams;
    bool invalid = false;
  };
  struct Stream {
    bool blocking = true;
    std::uint32_t lane = 0, tail = 0;
    std::vector<std::uint32_t> waits;  // for the next operation
    std::shared_ptr<Capture> capture;
    std::vector<std::size_t> node_tail;  // what the next node of the capture depends on
  };
  struct Event {
    std::uint32_t operation = 0;
    std::shared_ptr<Capture> capture;
    std::vector<std::size_t> nodes;
  };
  struct GraphExec {
    Graph nodes;
    std::map<StreamId, std::uint32_t> lanes;
    std::uint32_t last = 0;
  };

  Status injected(Call call);
  Status attach_new(void*& out, std::uint64_t bytes, AllocationKind kind);
  Stream* stream(StreamId id);
  Status enqueue(StreamId id, Work work, std::uint32_t* out = nullptr);
  std::uint32_t push(std::uint32_t lane, std::vector<std::uint32_t> dependencies, Work work);
  std::vector<std::uint32_t> stream_dependencies(StreamId id, Stream& stream);
  bool ready(const Operation& operation) const;
  bool step();
  void run_some();
  void run(std::uint32_t id);
  Status wait_for(std::uint32_t operation);
  Status refuse_in_capture();
  std::uint64_t random();
  Status known(Status status) const { return sticky_ != Status::success ? sticky_ : status; }
  Operation& at(std::uint32_t id) { return *operations_[id - 1]; }
  const Operation& at(std::uint32_t id) const { return *operations_[id - 1]; }
  Status check_shape(const Kernel& kernel, const LaunchShape& shape) const;
  static void join(Clock& clock, const Clock& other);

  DeviceOptions options_;
  Memory memory_;
  std::vector<Fault> faults_;
  std::vector<LaunchRecord> launches_;
  struct Failure {
    Status status;
    int skip;
    bool forever;
  };
  std::map<Call, Failure> failures_;
  Status sticky_ = Status::success, last_error_ = Status::success;
  std::map<Address, Allocation*> live_;
  std::map<std::uint32_t, std::string> labels_;
  // Pinned and managed memory.
  std::map<Address, std::unique_ptr<std::uint8_t[], void (*)(std::uint8_t*)>> host_blocks_;
  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<std::uint32_t> pending_;  // in the order of their calls
  Clock host_clock_;
  std::vector<std::uint32_t> lane_sequence_;
  std::map<StreamId, Stream> streams_;
  std::map<EventId, Event> events_;
  std::map<GraphId, Graph> graphs_;
  std::map<GraphExecId, GraphExec> execs_;
  std::uint64_t next_handle_ = 16;
  std::uint64_t captures_ = 0;
  std::uint64_t random_state_ = 0;
  std::uint64_t time_ = 0;  // instructions run
  std::unordered_map<const Kernel*, std::size_t> allowed_shared_;
  KernelChange change_;
  std::map<const Module*, std::map<std::string, std::pair<Address, std::uint64_t>>> variables_;
  // Pairs of operations of which the first is known to be before the second.
  mutable std::array<std::array<std::uint32_t, 2>, 16> known_order_{};
};

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_DEVICE_HPP
