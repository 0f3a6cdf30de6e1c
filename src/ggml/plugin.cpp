// The plug-in as ggml sees it: a registry with one device of type ACCEL, which the scheduler of
// llama.cpp asks about every node before the CPU device.
#define GGML_BACKEND_DL
#define GGML_BACKEND_SHARED
#define GGML_BACKEND_BUILD
#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include <verkv/config.hpp>

#include "log.hpp"
#include "nodes.hpp"
#include "settings.hpp"
#include "walk.hpp"

namespace verkv_ggml {
namespace {

constexpr const char* kName = "VERKV";
constexpr const char* kDescription = "Attention over the KV cache by VERKV";

// ggml's interface is one of functions without a place for what they share.
Settings& settings() {
  static Settings settings;
  return settings;
}

// ---- A backend: one for each context of the engine ----

Walk& walk_of(ggml_backend_t backend) { return *static_cast<Walk*>(backend->context); }

void free_backend(ggml_backend_t backend) {
  delete static_cast<Walk*>(backend->context);
  delete backend;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    return walk_of(backend).compute(graph);
  } catch (const std::exception& error) {
    log_error(error.what());
    return GGML_STATUS_FAILED;
  }
}

void set_threads(ggml_backend_t backend, int threads) {
  walk_of(backend).stock().set_threads(threads);
}

void set_abort(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  walk_of(backend).stock().set_abort(callback, data);
}

ggml_guid_t guid() {
  static ggml_guid guid = {0x76, 0x65, 0x72, 0x6b, 0x76, 0x2d, 0x67, 0x67,
                           0x6d, 0x6c, 0x2d, 0x61, 0x63, 0x63, 0x65, 0x6c};
  return &guid;
}

ggml_backend_t make_backend(ggml_backend_dev_t device, const char*) {
  try {
    auto walk = std::make_unique<Walk>(settings());
    auto backend = std::make_unique<ggml_backend>();
    backend->guid = guid();
    backend->iface.get_name = [](ggml_backend_t) { return kName; };
    backend->iface.free = free_backend;
    backend->iface.graph_compute = compute;
    backend->device = device;
    backend->context = walk.release();
    return backend.release();
  } catch (const std::exception& error) {
    log_error(error.what());
    return nullptr;
  }
}

// ---- The device ----

void say_once(const std::string& line) {
  static Once once;
  once.info(line);
}

bool takes_attention(const ggml_tensor* node) {
  const Understood understood = understand(node);
  if (!understood.attention) {
    say_once("attention is left to ggml: " + understood.reason);
    return false;
  }
  if (!settings().takes(understood.attention->cache.layer)) {
    say_once("layers are left to ggml by VERKV_GGML_LAYERS");
    return false;
  }
  say_once("answers the attention of decode steps; prompts are left to ggml");
  return true;
}

// Attention that we can answer, and whatever writes to a cache.
bool supports(ggml_backend_dev_t, const ggml_tensor* node) {
  if (is_view(node)) return true;
  if (cpu_device() == nullptr || !ggml_backend_dev_supports_op(cpu_device(), node)) return false;
  if (node->op == GGML_OP_FLASH_ATTN_EXT) return takes_attention(node);
  const std::optional<CacheTensor> cache = cache_tensor_of(node);
  return cache && settings().takes(cache->layer);
}

void get_properties(ggml_backend_dev_t, ggml_backend_dev_props* properties) {
  *properties = {};
  properties->name = kName;
  properties->description = kDescription;
  properties->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

extern ggml_backend_reg registry;

ggml_backend_dev_t device() {
  static ggml_backend_device device = [] {
    ggml_backend_device made{};
    made.iface.get_name = [](ggml_backend_dev_t) { return kName; };
    made.iface.get_description = [](ggml_backend_dev_t) { return kDescription; };
    made.iface.get_memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
      *free = 0;
      *total = 0;
    };
    made.iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    made.iface.get_props = get_properties;
    made.iface.init_backend = make_backend;
    made.iface.get_buffer_type = [](ggml_backend_dev_t) {
      return ggml_backend_dev_buffer_type(cpu_device());
    };
    made.iface.supports_op = supports;
    made.iface.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
      return ggml_backend_buft_is_host(type);
    };
    made.reg = &registry;
    return made;
  }();
  return &device;
}

// ---- The registry ----

void* proc_address(ggml_backend_reg_t, const char* name) {
  const std::string_view wanted = name;
  if (wanted == "ggml_backend_set_n_threads") {
    ggml_backend_set_n_threads_t function = set_threads;
    return reinterpret_cast<void*>(function);
  }
  if (wanted == "ggml_backend_set_abort_callback") {
    ggml_backend_set_abort_callback_t function = set_abort;
    return reinterpret_cast<void*>(function);
  }
  return nullptr;
}

ggml_backend_reg registry = {
    GGML_BACKEND_API_VERSION,
    {[](ggml_backend_reg_t) { return kName; },
     [](ggml_backend_reg_t) { return std::size_t{settings().on ? 1u : 0u}; },
     [](ggml_backend_reg_t, std::size_t) { return device(); }, proc_address},
    nullptr};

// Members of ggml's structures have changed while its API version stayed.
bool is_built_for_this_ggml() {
  const std::string_view here = ggml_version();
  const std::string_view built = VERKV_GGML_VERSION;
  if (here.starts_with(built) && (here.size() == built.size() || here[built.size()] == '-'))
    return true;
  log_error("this plug-in was built for ggml " + std::string(built) + " and does not work in " +
            std::string(here) + ": build it for the llama.cpp that it is to run in");
  return false;
}

ggml_backend_reg_t begin() {
  try {
    if (!is_built_for_this_ggml()) return nullptr;
    settings() = read_settings([](const char* name) -> const char* { return std::getenv(name); });
    if (!settings().on) log_info("off (VERKV_GGML=off)");
    return &registry;
  } catch (const std::exception& error) {
    log_error(error.what());
    return nullptr;
  }
}

}  // namespace
}  // namespace verkv_ggml

GGML_BACKEND_DL_IMPL(verkv_ggml::begin)
