#include "toy_engine.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace verkv::test {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

void require(bool fine, const char* what) {
  if (!fine) throw std::runtime_error(what);
}

struct FreeContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

}  // namespace

ToyEngine::ToyEngine(const ToyShape& shape, const std::string& plugin, std::uint32_t seed)
    : shape_(shape), random_(seed) {
  static const bool loaded = (ggml_backend_load_all_from_path(VERKV_GGML_CPU_FOLDER), true);
  require(loaded, "");
  if (!plugin.empty()) {
    plugin_ = ggml_backend_load(plugin.c_str());
    require(plugin_ != nullptr, "the plug-in is not loaded");
    for (std::size_t i = 0; i < ggml_backend_reg_dev_count(plugin_); ++i)
      backends_.push_back(ggml_backend_dev_init(ggml_backend_reg_dev_get(plugin_, i), nullptr));
  }
  backends_.push_back(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
  for (ggml_backend_t backend : backends_) {
    require(backend != nullptr, "a backend does not start");
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    require(set_threads != nullptr, "a backend does not take threads");
    set_threads(backend, 2);
  }
  scheduler_ = ggml_backend_sched_new(backends_.data(), nullptr, static_cast<int>(backends_.size()),
                                      1024, false, false);
  make_cache();
}

void ToyEngine::make_cache() {
  context_ = ggml_init({.mem_size = at(2 * shape_.layers + 4) * ggml_tensor_overhead(),
                        .mem_buffer = nullptr,
                        .no_alloc = true});
  for (int l = 0; l < shape_.layers; ++l) {
    for (const bool is_key : {true, false}) {
      const std::int64_t dim = is_key ? shape_.key_dim : shape_.value_dim;
      ggml_tensor* tensor = ggml_new_tensor_3d(context_, shape_.type, shape_.kv_heads * dim,
                                               shape_.cells, shape_.streams);
      ggml_set_name(tensor, ((is_key ? "cache_k_l" : "cache_v_l") + std::to_string(l)).c_str());
      (is_key ? keys_ : values_).push_back(tensor);
    }
  }
  buffer_ = ggml_backend_alloc_ctx_tensors(context_, backends_.back());
  ggml_backend_buffer_clear(buffer_, 0);
  seen_by_.assign(at(shape_.streams), std::vector<std::set<int>>(at(shape_.cells)));
  written_at_.assign(at(shape_.streams), std::vector<std::int64_t>(at(shape_.cells), -1));
}

void ToyEngine::renew() {
  ggml_backend_buffer_free(buffer_);
  ggml_free(context_);
  keys_.clear();
  values_.clear();
  make_cache();
}

ToyEngine::~ToyEngine() {
  ggml_backend_sched_free(scheduler_);
  for (ggml_backend_t backend : backends_) ggml_backend_free(backend);
  ggml_backend_buffer_free(buffer_);
  ggml_free(context_);
  if (plugin_ != nullptr) ggml_backend_unload(plugin_);
}

float ToyEngine::number() { return std::normal_distribution<float>()(random_); }

bool ToyEngine::sees(const ToyToken& token, std::int64_t cell) const {
  return seen_by_[at(token.stream)][at(cell)].contains(token.sequence);
}

std::vector<std::vector<float>> ToyEngine::step(const std::vector<ToyToken>& tokens) {
  const std::int64_t count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t rows = count / shape_.streams;
  tokens_ = tokens;
  token_time_.clear();
  for (const ToyToken& token : tokens) {
    seen_by_[at(token.stream)][at(token.cell)] = {token.sequence};
    written_at_[at(token.stream)][at(token.cell)] = time_;
    token_time_.push_back(time_++);
  }
  const std::unique_ptr<ggml_context, FreeContext> context(
      ggml_init({.mem_size = 1024 * ggml_tensor_overhead() + ggml_graph_overhead(),
                 .mem_buffer = nullptr,
                 .no_alloc = true}));
  ggml_context* c = context.get();
  std::vector<std::pair<ggml_tensor*, std::vector<std::byte>>> inputs;
  const auto add_input = [&](ggml_tensor* tensor, auto&& element) {
    ggml_set_input(tensor);
    using T = decltype(element(std::int64_t{0}));
    std::vector<std::byte> bytes(at(ggml_nelements(tensor)) * sizeof(T));
    for (std::int64_t i = 0; i < ggml_nelements(tensor); ++i)
      reinterpret_cast<T*>(bytes.data())[i] = element(i);
    inputs.emplace_back(tensor, std::move(bytes));
    return tensor;
  };
  ggml_tensor* indices = add_input(
      ggml_new_tensor_1d(c, GGML_TYPE_I64, count),
      [&](std::int64_t i) { return tokens[at(i)].stream * shape_.cells + tokens[at(i)].cell; });
  ggml_tensor* mask =
      add_input(ggml_new_tensor_4d(c, GGML_TYPE_F16, shape_.cells, rows, 1, shape_.streams),
                [&](std::int64_t i) {
                  const std::size_t t = at(i / shape_.cells);
                  const std::int64_t cell = i % shape_.cells;
                  const bool seen = sees(tokens[t], cell) &&
                                    written_at_[at(tokens[t].stream)][at(cell)] <= token_time_[t];
                  return ggml_fp32_to_fp16(seen ? 0 : -std::numeric_limits<float>::infinity());
                });
  ggml_cgraph* graph = ggml_new_graph(c);
  queries_.clear();
  std::vector<ggml_tensor*> answers;
  for (int l = 0; l < shape_.layers; ++l) {
    for (ggml_tensor* cache : {keys_[at(l)], values_[at(l)]}) {
      ggml_tensor* rows_to_write =
          add_input(ggml_new_tensor_2d(c, GGML_TYPE_F32, cache->ne[0], count),
                    [&](auto) { return number(); });
      ggml_tensor* all = shape_.streams == 1 ? cache
                                             : ggml_reshape_2d(c, cache, cache->ne[0],
                                                               shape_.cells * shape_.streams);
      ggml_build_forward_expand(graph, ggml_set_rows(c, all, rows_to_write, indices));
    }
    ggml_tensor* q = add_input(ggml_new_tensor_4d(c, GGML_TYPE_F32, shape_.key_dim,
                                                  shape_.query_heads, rows, shape_.streams),
                               [&](auto) { return number(); });
    const auto& bytes = inputs.back().second;
    const float* first = reinterpret_cast<const float*>(bytes.data());
    queries_.emplace_back(first, first + bytes.size() / sizeof(float));
    const auto heads_of = [&](ggml_tensor* cache, std::int64_t dim) {
      const std::size_t element = ggml_type_size(cache->type);
      return ggml_permute(c,
                          ggml_view_4d(c, cache, dim, shape_.kv_heads, shape_.cells, shape_.streams,
                                       at(dim) * element, cache->nb[1], cache->nb[2], 0),
                          0, 2, 1, 3);
    };
    ggml_tensor* answer = ggml_flash_attn_ext(c, ggml_permute(c, q, 0, 2, 1, 3),
                                              heads_of(keys_[at(l)], shape_.key_dim),
                                              heads_of(values_[at(l)], shape_.value_dim), mask,
                                              shape_.scale, shape_.largest_bias, shape_.soft_cap);
    if (shape_.sinks) {
      ggml_flash_attn_ext_add_sinks(
          answer,
          add_input(ggml_new_tensor_1d(c, GGML_TYPE_F32, shape_.query_heads),
                    [&](std::int64_t h) { return shape_.first_sink + static_cast<float>(h); }));
    }
    ggml_set_output(answer);
    answers.push_back(answer);
    ggml_build_forward_expand(graph, answer);
  }
  ggml_backend_sched_reset(scheduler_);
  require(ggml_backend_sched_alloc_graph(scheduler_, graph), "no memory for a graph");
  for (const auto& [tensor, bytes] : inputs)
    ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
  require(ggml_backend_sched_graph_compute(scheduler_, graph) == GGML_STATUS_SUCCESS,
          "a graph is not computed");
  std::vector<std::vector<float>> results;
  for (ggml_tensor* answer : answers) {
    results.emplace_back(at(ggml_nelements(answer)));
    ggml_backend_tensor_get(answer, results.back().data(), 0, ggml_nbytes(answer));
  }
  return results;
}

float ToyEngine::cached(const ggml_tensor* tensor, std::int64_t stream, std::int64_t cell,
                        std::int64_t element) const {
  const char* row = static_cast<const char*>(tensor->data) + at(stream) * tensor->nb[2] +
                    at(cell) * tensor->nb[1];
  if (tensor->type == GGML_TYPE_F32) return reinterpret_cast<const float*>(row)[element];
  if (tensor->type == GGML_TYPE_BF16)
    return ggml_bf16_to_fp32(reinterpret_cast<const ggml_bf16_t*>(row)[element]);
  return ggml_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(row)[element]);
}

std::vector<std::vector<double>> ToyEngine::reference() const {
  std::vector<std::vector<double>> results;
  const std::int64_t group = shape_.query_heads / shape_.kv_heads;
  for (int l = 0; l < shape_.layers; ++l) {
    std::vector<double>& out = results.emplace_back();
    for (std::size_t t = 0; t < tokens_.size(); ++t) {
      const ToyToken& token = tokens_[t];
      for (std::int64_t h = 0; h < shape_.query_heads; ++h) {
        const float* q = queries_[at(l)].data() +
                         (static_cast<std::int64_t>(t) * shape_.query_heads + h) * shape_.key_dim;
        double denominator =
            shape_.sinks ? std::exp(static_cast<double>(shape_.first_sink) + static_cast<double>(h))
                         : 0;
        std::vector<double> sum(at(shape_.value_dim));
        for (std::int64_t cell = 0; cell < shape_.cells; ++cell) {
          if (!sees(token, cell) || written_at_[at(token.stream)][at(cell)] > token_time_[t])
            continue;
          double logit = 0;
          for (std::int64_t j = 0; j < shape_.key_dim; ++j) {
            logit += static_cast<double>(q[j]) *
                     static_cast<double>(
                         cached(keys_[at(l)], token.stream, cell, h / group * shape_.key_dim + j));
          }
          logit *= static_cast<double>(shape_.scale);
          const double cap = static_cast<double>(shape_.soft_cap);
          if (cap > 0) logit = cap * std::tanh(logit / cap);
          const double weight = std::exp(logit);
          denominator += weight;
          for (std::int64_t j = 0; j < shape_.value_dim; ++j) {
            sum[at(j)] += weight * static_cast<double>(cached(values_[at(l)], token.stream, cell,
                                                              h / group * shape_.value_dim + j));
          }
        }
        for (const double x : sum) out.push_back(denominator > 0 ? x / denominator : 0);
      }
    }
  }
  return results;
}

void ToyEngine::remove(int sequence, std::int64_t first, std::int64_t last, std::int64_t stream) {
  for (std::int64_t i = first; i < last; ++i) seen_by_[at(stream)][at(i)].erase(sequence);
}

void ToyEngine::copy(int from, int to, std::int64_t stream) {
  for (std::set<int>& who : seen_by_[at(stream)])
    if (who.contains(from)) who.insert(to);
}

template <class Accept>
std::vector<std::int64_t> ToyEngine::cells_where(std::int64_t stream, Accept&& accept) const {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < shape_.cells; ++i)
    if (accept(seen_by_[at(stream)][at(i)])) result.push_back(i);
  return result;
}

std::vector<std::int64_t> ToyEngine::cells_of(int sequence, std::int64_t stream) const {
  return cells_where(stream, [&](const std::set<int>& who) { return who.contains(sequence); });
}

std::vector<std::int64_t> ToyEngine::free_cells(std::int64_t stream) const {
  return cells_where(stream, [](const std::set<int>& who) { return who.empty(); });
}

void ToyEngine::overwrite(int layer, bool keys, std::int64_t first, std::int64_t last) {
  ggml_tensor* tensor = (keys ? keys_ : values_)[at(layer)];
  std::vector<ggml_fp16_t> rows(at((last - first) * tensor->ne[0]));
  for (ggml_fp16_t& x : rows) x = ggml_fp32_to_fp16(number());
  ggml_backend_tensor_set(tensor, rows.data(), at(first) * tensor->nb[1], rows.size() * 2);
}

void ToyEngine::scale_keys(int layer, float factor) {
  const std::unique_ptr<ggml_context, FreeContext> context(
      ggml_init({.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead(),
                 .mem_buffer = nullptr,
                 .no_alloc = true}));
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_tensor* keys = keys_[at(layer)];
  ggml_tensor* wide = ggml_cast(context.get(), keys, GGML_TYPE_F32);
  ggml_build_forward_expand(graph,
                            ggml_cpy(context.get(), ggml_scale(context.get(), wide, factor), keys));
  ggml_backend_sched_reset(scheduler_);
  require(ggml_backend_sched_alloc_graph(scheduler_, graph), "no memory for a graph");
  require(ggml_backend_sched_graph_compute(scheduler_, graph) == GGML_STATUS_SUCCESS,
          "a graph is not computed");
}

}  // namespace verkv::test
