// ggml's own CPU backend: it computes what we pass on, and its threads work for us.
#ifndef VERKV_SRC_GGML_STOCK_HPP
#define VERKV_SRC_GGML_STOCK_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <functional>
#include <memory>
#include <vector>

#include <verkv/settings.hpp>

namespace verkv_ggml {

// The CPU device, or null before its backend is loaded.
ggml_backend_dev_t cpu_device();

class Stock {
 public:
  // Throws std::runtime_error where the CPU backend cannot be had.
  Stock();
  ~Stock();
  Stock(const Stock&) = delete;
  Stock& operator=(const Stock&) = delete;

  void set_threads(int threads);
  int threads() const { return threads_; }
  void set_abort(ggml_abort_callback callback, void* data);

  // Computes the nodes in order. light: with the thread of the call alone.
  ggml_status compute(const std::vector<ggml_tensor*>& nodes, bool light);

  // Calls part(0) to part(parts - 1) on the threads that compute graphs: they are awake, and there
  // are no more of them than the user asked for.
  void run(int parts, const std::function<void(int)>& part);

 private:
  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  void use_threads(int threads);

  ggml_backend_t backend_ = nullptr;
  ggml_backend_set_n_threads_t set_threads_ = nullptr;
  int threads_ = GGML_DEFAULT_N_THREADS;
  int in_use_ = 0;
  std::unique_ptr<ggml_context, Free> context_;
  ggml_cgraph* graph_ = nullptr;
  ggml_cgraph* parts_graph_ = nullptr;
  int parts_ = 0;
  const std::function<void(int)>* part_ = nullptr;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_STOCK_HPP
