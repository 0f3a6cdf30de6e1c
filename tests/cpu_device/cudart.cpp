// The CUDA runtime for objects that nvcc made with "--no-compress -cudart none": each entry point
// hands over to the device. What is missing here is missing at link time, and so never ignored.
#include "cudart.hpp"

#include <cuda_runtime_api.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

namespace verkv::cpu_device {
namespace {

// A fat binary in the program, and its module on the device at hand.
struct FatBinary {
  std::string ptx[64];
  int versions = 0;
  std::shared_ptr<const Module> module;
};

struct HostFunction {
  FatBinary* binary;
  std::string name;
};

struct HostVariable {
  FatBinary* binary;
  std::string name;
};

struct CallConfiguration {
  LaunchShape shape;
  cudaStream_t stream;
};

struct Program {
  std::deque<FatBinary> binaries;  // references stay valid
  std::unordered_map<const void*, HostFunction> functions;
  std::unordered_map<const void*, HostVariable> variables;
  std::vector<CallConfiguration> configurations;
  std::unique_ptr<Device> device;
};

Program& program() {
  static Program the_program;
  return the_program;
}

cudaError_t result(Status status) { return static_cast<cudaError_t>(static_cast<int>(status)); }
cudaError_t refuse(Status status) { return result(current_device().note(status)); }

int target_of(const std::string& ptx) {
  const std::size_t at = ptx.find(".target sm_");
  return at == std::string::npos ? 0 : std::atoi(ptx.c_str() + at + 11);
}

// The newest PTX that the device may run; null if there is none.
const std::string* text_of(const FatBinary& binary) {
  const DeviceOptions& options = current_device().options();
  const int capability = options.compute_major * 10 + options.compute_minor;
  const std::string* best = nullptr;
  for (int i = 0; i < binary.versions; ++i) {
    const int target = target_of(binary.ptx[i]);
    if (target > 0 && target <= capability && (!best || target > target_of(*best))) {
      best = &binary.ptx[i];
    }
  }
  return best;
}

const Module* module_of(FatBinary& binary) {
  if (binary.module) return binary.module.get();
  const std::string* const text = text_of(binary);
  if (!text) return nullptr;
  try {
    binary.module = current_device().load(*text);
  } catch (const ParseError&) {
    return nullptr;
  }
  return binary.module.get();
}

std::shared_ptr<const Kernel> kernel_of(const void* function) {
  const auto found = program().functions.find(function);
  if (found == program().functions.end()) return nullptr;
  const Module* module = module_of(*found->second.binary);
  if (!module) return nullptr;
  const auto kernel = module->kernels.find(found->second.name);
  return kernel == module->kernels.end() ? nullptr : kernel->second;
}

StreamId stream_of(cudaStream_t stream) {
  const auto id = reinterpret_cast<StreamId>(stream);
  return id == reinterpret_cast<StreamId>(cudaStreamLegacy) ? kLegacyStream : id;
}
template <typename Handle>
std::uint64_t id_of(Handle handle) {
  return reinterpret_cast<std::uint64_t>(handle);
}
template <typename Handle>
Handle handle_of(std::uint64_t id) {
  return reinterpret_cast<Handle>(id);
}
Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

CopyKind copy_kind(cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return CopyKind::host_to_host;
    case cudaMemcpyHostToDevice:
      return CopyKind::host_to_device;
    case cudaMemcpyDeviceToHost:
      return CopyKind::device_to_host;
    case cudaMemcpyDeviceToDevice:
      return CopyKind::device_to_device;
    default:
      return CopyKind::any;
  }
}

Dim3 dimensions(dim3 d) { return {d.x, d.y, d.z}; }

cudaError_t launch(const void* function, const LaunchShape& shape, void** arguments,
                   cudaStream_t stream) {
  const std::shared_ptr<const Kernel> kernel = kernel_of(function);
  if (!kernel) return refuse(Status::invalid_device_function);
  std::vector<std::uint8_t> parameters(kernel->parameter_bytes);
  for (std::size_t i = 0; i < kernel->parameters.size(); ++i) {
    const Parameter& parameter = kernel->parameters[i];
    std::memcpy(parameters.data() + parameter.offset, arguments[i], parameter.size);
  }
  return result(current_device().launch(kernel, shape, parameters, stream_of(stream)));
}

cudaError_t symbol_address(const void* symbol, Address& out, std::uint64_t& bytes) {
  const auto found = program().variables.find(symbol);
  const Module* module =
      found == program().variables.end() ? nullptr : module_of(*found->second.binary);
  if (!module) return refuse(Status::not_found);
  const Status status = current_device().variable(*module, found->second.name, out, bytes);
  return status == Status::success ? cudaSuccess : refuse(status);
}

// The PTX texts of a fat binary. Its layout is not documented; this is what nvcc 12 and 13 write.
void read_binary(FatBinary& binary, const unsigned char* data) {
  std::uint16_t header = 0;
  std::uint64_t bytes = 0;
  std::memcpy(&header, data + 6, sizeof header);
  std::memcpy(&bytes, data + 8, sizeof bytes);
  const unsigned char* at = data + header;
  for (const unsigned char* end = at + bytes; at < end;) {
    std::uint16_t kind = 0;
    std::uint32_t entry_header = 0;
    std::uint64_t size = 0;
    std::memcpy(&kind, at, sizeof kind);
    std::memcpy(&entry_header, at + 4, sizeof entry_header);
    std::memcpy(&size, at + 8, sizeof size);
    const auto* text = reinterpret_cast<const char*>(at + entry_header);
    const bool is_ptx = kind == 1;
    if (is_ptx && binary.versions < 64)
      binary.ptx[binary.versions++] = std::string(text, strnlen(text, size));
    at += entry_header + size;
  }
}

}  // namespace

Device& current_device() {
  if (!program().device) program().device = std::make_unique<Device>();
  return *program().device;
}

std::string ptx_of(const std::string& source) {
  for (const FatBinary& binary : program().binaries) {
    const std::string* const text = text_of(binary);
    if (text && text->find("/" + source + "\"") != std::string::npos) return *text;
  }
  return "";
}

Device& reset_device(const DeviceOptions& options) {
  for (FatBinary& binary : program().binaries) binary.module = nullptr;
  program().configurations.clear();
  program().device = std::make_unique<Device>(options);
  return *program().device;
}

}  // namespace verkv::cpu_device

using namespace verkv::cpu_device;

extern "C" {

// ---- what nvcc's own code calls

void** __cudaRegisterFatBinary(void* wrapper) {
  program().binaries.emplace_back();
  FatBinary& binary = program().binaries.back();
  read_binary(binary, *reinterpret_cast<const unsigned char**>(static_cast<char*>(wrapper) + 8));
  return reinterpret_cast<void**>(&binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  program().functions[host] = {reinterpret_cast<FatBinary*>(handle), name};
}
void __cudaRegisterVar(void** handle, char* host, char*, const char* name, int, size_t, int, int) {
  program().variables[host] = {reinterpret_cast<FatBinary*>(handle), name};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  program().configurations.push_back({{dimensions(grid), dimensions(block), shared}, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const CallConfiguration last = program().configurations.back();
  program().configurations.pop_back();
  *grid = dim3(last.shape.grid.x, last.shape.grid.y, last.shape.grid.z);
  *block = dim3(last.shape.block.x, last.shape.block.y, last.shape.block.z);
  *shared = last.shape.dynamic_shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel),
                {dimensions(grid), dimensions(block), shared}, arguments, stream);
}

// ---- launches

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return launch(function, {dimensions(grid), dimensions(block), shared}, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    const auto& cluster = attribute.val.clusterDim;
    const bool clusters = attribute.id == cudaLaunchAttributeClusterDimension &&
                          (cluster.x != 1 || cluster.y != 1 || cluster.z != 1);
    const bool cooperative =
        attribute.id == cudaLaunchAttributeCooperative && attribute.val.cooperative;
    if (clusters || cooperative) return refuse(Status::not_supported);
  }
  return launch(
      function,
      {dimensions(config->gridDim), dimensions(config->blockDim), config->dynamicSmemBytes},
      arguments, config->stream);
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const auto kernel = kernel_of(function);
  if (!kernel) return refuse(Status::invalid_device_function);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    const std::size_t most = current_device().options().shared_per_block_opt_in;
    if (value < 0 || static_cast<std::size_t>(value) + kernel->shared_bytes > most) {
      return refuse(Status::invalid_value);
    }
    current_device().allow_shared(*kernel, static_cast<std::size_t>(value));
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void* function) {
  const auto kernel = kernel_of(function);
  if (!kernel) return refuse(Status::invalid_device_function);
  const DeviceOptions& options = current_device().options();
  *out = {};
  out->sharedSizeBytes = kernel->shared_bytes;
  out->localSizeBytes = kernel->local_bytes;
  const auto& most = kernel->max_threads;
  out->maxThreadsPerBlock = most[0] ? static_cast<int>(most[0] * most[1] * most[2]) : 1024;
  out->ptxVersion = kernel->target;
  out->binaryVersion = options.compute_major * 10 + options.compute_minor;
  out->numRegs = 32;
  out->maxDynamicSharedSizeBytes = static_cast<int>(options.shared_per_block);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int,
                                                                   size_t, unsigned) {
  *out = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 1;
  return cudaSuccess;
}

// ---- devices

cudaError_t cudaGetDeviceCount(int* out) {
  *out = current_device().options().devices;
  return *out > 0 ? cudaSuccess : refuse(Status::no_device);
}
cudaError_t cudaGetDevice(int* out) {
  *out = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 && current_device().options().devices > 0 ? cudaSuccess
                                                               : refuse(Status::invalid_device);
}
cudaError_t cudaDeviceSynchronize() { return result(current_device().synchronize()); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  const DeviceOptions& options = current_device().options();
  if (device != 0 || options.devices == 0) return refuse(Status::invalid_device);
  *out = {};
  std::strcpy(out->name, "CPU device");
  out->totalGlobalMem = options.memory_bytes;
  out->sharedMemPerBlock = options.shared_per_block;
  out->sharedMemPerBlockOptin = options.shared_per_block_opt_in;
  out->sharedMemPerMultiprocessor = options.shared_per_block_opt_in + 1024;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 0x7fffffff;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->major = options.compute_major;
  out->minor = options.compute_minor;
  out->multiProcessorCount = options.multiprocessors;
  out->canMapHostMemory = out->unifiedAddressing = out->concurrentKernels = 1;
  out->asyncEngineCount = 2;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int device) {
  const DeviceOptions& options = current_device().options();
  if (device != 0 || options.devices == 0) return refuse(Status::invalid_device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *out = options.compute_major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *out = options.compute_minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *out = options.multiprocessors;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *out = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *out = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *out = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *out = 65535;
      break;
    case cudaDevAttrWarpSize:
      *out = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *out = static_cast<int>(options.shared_per_block);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *out = static_cast<int>(options.shared_per_block_opt_in);
      break;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *out = 1;
      break;
    case cudaDevAttrHostRegisterSupported:
      *out = options.host_register;
      break;
    case cudaDevAttrPageableMemoryAccess:
      *out = options.pageable_access;
      break;
    case cudaDevAttrConcurrentManagedAccess:
      *out = options.concurrent_managed;
      break;
    default:
      *out = 0;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* out) {
  *out = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return result(current_device().last_error()); }
cudaError_t cudaPeekAtLastError() { return result(current_device().peek_error()); }
// The text of a fault says what was found, where.
const char* cudaGetErrorString(cudaError_t error) {
  const auto& faults = current_device().faults();
  if (!faults.empty() && error == result(current_device().peek_error()))
    return faults.back().what();
  switch (static_cast<Status>(error)) {
    case Status::success:
      return "no error";
    case Status::invalid_value:
      return "invalid argument";
    case Status::out_of_memory:
      return "out of memory";
    case Status::invalid_configuration:
      return "invalid configuration argument";
    case Status::invalid_device_function:
      return "invalid device function, or PTX that is compressed or not supported";
    case Status::no_device:
      return "no device";
    case Status::not_ready:
      return "not ready";
    case Status::not_supported:
      return "operation not supported by the CPU device";
    case Status::capture_unsupported:
      return "operation not permitted when a stream is capturing";
    default:
      return "error";
  }
}
const char* cudaGetErrorName(cudaError_t error) {
  static std::string text;
  text = "cudaError " + std::to_string(static_cast<int>(error));
  return text.c_str();
}

// ---- memory

cudaError_t cudaMalloc(void** out, size_t bytes) {
  Address address = 0;
  const Status status = current_device().malloc(address, bytes);
  *out = reinterpret_cast<void*>(address);
  return result(status);
}
cudaError_t cudaFree(void* pointer) { return result(current_device().free(address_of(pointer))); }
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t stream) {
  Address address = 0;
  const Status status = current_device().malloc_async(address, bytes, stream_of(stream));
  *out = reinterpret_cast<void*>(address);
  return result(status);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return result(current_device().free_async(address_of(pointer), stream_of(stream)));
}
cudaError_t cudaMallocHost(void** out, size_t bytes) {
  return result(current_device().host_malloc(*out, bytes));
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return result(current_device().host_malloc(*out, bytes));
}
cudaError_t cudaFreeHost(void* pointer) { return result(current_device().host_free(pointer)); }
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  return result(current_device().host_register(pointer, bytes));
}
cudaError_t cudaHostUnregister(void* pointer) {
  return result(current_device().host_unregister(pointer));
}
cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
  return result(current_device().managed_malloc(*out, bytes));
}
#if CUDART_VERSION >= 13000
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise, cudaMemLocation) {
#else
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise, int) {
#endif
  return result(current_device().advise(pointer, bytes));
}
cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned) {
  const Allocation* found = current_device().memory().find(address_of(host));
  if (!found || found->state == Allocation::State::freed) return refuse(Status::invalid_value);
  *out = host;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  const Allocation* found = current_device().memory().find(address_of(pointer));
  *out = {};
  if (!found || found->state == Allocation::State::freed) {
    out->type = cudaMemoryTypeUnregistered;
    out->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
  }
  const bool host = found->address < kDeviceBase;
  out->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->devicePointer = const_cast<void*>(pointer);
  out->hostPointer = host ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Memory& memory = current_device().memory();
  *free = memory.capacity() - memory.used();
  *total = memory.capacity();
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return result(current_device().copy(address_of(to), address_of(from), bytes, copy_kind(kind),
                                      kLegacyStream, true));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return result(current_device().copy(address_of(to), address_of(from), bytes, copy_kind(kind),
                                      stream_of(stream), false));
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
  return result(current_device().copy_2d(address_of(to), to_pitch, address_of(from), from_pitch,
                                         width, height, copy_kind(kind), kLegacyStream, true));
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return result(current_device().copy_2d(address_of(to), to_pitch, address_of(from), from_pitch,
                                         width, height, copy_kind(kind), stream_of(stream), false));
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return result(current_device().fill(address_of(to), static_cast<std::uint8_t>(value), bytes,
                                      kLegacyStream));
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return result(current_device().fill(address_of(to), static_cast<std::uint8_t>(value), bytes,
                                      stream_of(stream)));
}
cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  Address address = 0;
  std::uint64_t bytes = 0;
  const cudaError_t error = symbol_address(symbol, address, bytes);
  if (error == cudaSuccess) *out = reinterpret_cast<void*>(address);
  return error;
}
cudaError_t cudaGetSymbolSize(size_t* out, const void* symbol) {
  Address address = 0;
  std::uint64_t bytes = 0;
  const cudaError_t error = symbol_address(symbol, address, bytes);
  if (error == cudaSuccess) *out = bytes;
  return error;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                               cudaMemcpyKind kind) {
  Address address = 0;
  std::uint64_t size = 0;
  if (const cudaError_t error = symbol_address(symbol, address, size); error != cudaSuccess)
    return error;
  return result(current_device().copy(address + offset, address_of(from), bytes, copy_kind(kind),
                                      kLegacyStream, true));
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                                 cudaMemcpyKind kind) {
  Address address = 0;
  std::uint64_t size = 0;
  if (const cudaError_t error = symbol_address(symbol, address, size); error != cudaSuccess)
    return error;
  return result(current_device().copy(address_of(to), address + offset, bytes, copy_kind(kind),
                                      kLegacyStream, true));
}

// ---- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int) {
  StreamId id = 0;
  const Status status = current_device().stream_create(id, (flags & cudaStreamNonBlocking) == 0);
  *out = handle_of<cudaStream_t>(id);
  return result(status);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return result(current_device().stream_destroy(stream_of(stream)));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return result(current_device().stream_synchronize(stream_of(stream)));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return result(current_device().stream_query(stream_of(stream)));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return result(current_device().stream_wait(stream_of(stream), id_of(event)));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return result(current_device().host_function(stream_of(stream), [=] { function(data); }));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  EventId id = 0;
  const Status status = current_device().event_create(id);
  *out = handle_of<cudaEvent_t>(id);
  return result(status);
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return result(current_device().event_destroy(id_of(event)));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return result(current_device().event_record(id_of(event), stream_of(stream)));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return result(current_device().event_synchronize(id_of(event)));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return result(current_device().event_query(id_of(event)));
}
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t from, cudaEvent_t to) {
  return result(current_device().event_elapsed(*out, id_of(from), id_of(to)));
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return result(current_device().capture_begin(stream_of(stream)));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  GraphId id = 0;
  const Status status = current_device().capture_end(stream_of(stream), id);
  *out = handle_of<cudaGraph_t>(id);
  return result(status);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  *out = current_device().capturing(stream_of(stream)) ? cudaStreamCaptureStatusActive
                                                       : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// Number and status of the capture; the graph under way is not shown.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData**,
#endif
                                     size_t*) {
  const std::uint64_t number = current_device().capture_id(stream_of(stream));
  *status = number != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = number;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  GraphExecId id = 0;
  const Status status = current_device().graph_instantiate(id, id_of(graph));
  *out = handle_of<cudaGraphExec_t>(id);
  return result(status);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return result(current_device().graph_launch(id_of(exec), stream_of(stream)));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return result(current_device().graph_destroy(id_of(graph)));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return result(current_device().graph_exec_destroy(id_of(exec)));
}

}  // extern "C"
