#include "stock.hpp"

#include <stdexcept>

namespace verkv_ggml {
namespace {

// A split has the nodes of one layer, some ten; it is cut where there are more.
constexpr std::size_t kMostNodes = 256;

void* cpu_function(const char* name) {
  return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), name);
}

}  // namespace

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

Stock::Stock() {
  if (cpu_device() == nullptr) throw std::runtime_error("ggml's CPU backend is not loaded");
  backend_ = ggml_backend_dev_init(cpu_device(), nullptr);
  if (backend_ == nullptr) throw std::runtime_error("ggml's CPU backend does not start");
  set_threads_ =
      reinterpret_cast<ggml_backend_set_n_threads_t>(cpu_function("ggml_backend_set_n_threads"));
  context_.reset(ggml_init({.mem_size = 2 * ggml_graph_overhead_custom(kMostNodes, false) +
                                        4 * ggml_tensor_overhead() + 1024,
                            .mem_buffer = nullptr,
                            .no_alloc = false}));
  if (context_ == nullptr) throw std::runtime_error("ggml gives no memory for a graph");
  graph_ = ggml_new_graph_custom(context_.get(), kMostNodes, false);
  parts_graph_ = ggml_new_graph_custom(context_.get(), kMostNodes, false);
  const auto work = [](ggml_tensor*, int thread, int threads, void* self) {
    const Stock& stock = *static_cast<const Stock*>(self);
    for (int i = thread; i < stock.parts_; i += threads) (*stock.part_)(i);
  };
  ggml_build_forward_expand(parts_graph_, ggml_custom_4d(context_.get(), GGML_TYPE_F32, 1, 1, 1, 1,
                                                         nullptr, 0, work, GGML_N_TASKS_MAX, this));
}

Stock::~Stock() { ggml_backend_free(backend_); }

void Stock::set_threads(int threads) { threads_ = threads < 1 ? 1 : threads; }

void Stock::set_abort(ggml_abort_callback callback, void* data) {
  const auto set = reinterpret_cast<ggml_backend_set_abort_callback_t>(
      cpu_function("ggml_backend_set_abort_callback"));
  if (set != nullptr) set(backend_, callback, data);
}

void Stock::use_threads(int threads) {
  if (threads == in_use_ || set_threads_ == nullptr) return;
  set_threads_(backend_, threads);
  in_use_ = threads;
}

ggml_status Stock::compute(const std::vector<ggml_tensor*>& nodes, bool light) {
  use_threads(light ? 1 : threads_);
  for (std::size_t begin = 0; begin < nodes.size(); begin += kMostNodes) {
    ggml_graph_clear(graph_);
    for (std::size_t i = begin; i < nodes.size() && i < begin + kMostNodes; ++i)
      ggml_graph_add_node(graph_, nodes[i]);
    const ggml_status status = ggml_backend_graph_compute(backend_, graph_);
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return GGML_STATUS_SUCCESS;
}

void Stock::run(int parts, const std::function<void(int)>& part) {
  if (threads_ == 1) {
    for (int i = 0; i < parts; ++i) part(i);
    return;
  }
  parts_ = parts;
  part_ = &part;
  use_threads(threads_);
  ggml_backend_graph_compute(backend_, parts_graph_);
  part_ = nullptr;
}

}  // namespace verkv_ggml
