#include "walk.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>

#include "nodes.hpp"

namespace verkv_ggml {
namespace {

// More rows of a stream at once are a piece of a prompt, for which ggml's kernel is made.
constexpr std::int64_t kMostRows = 16;
// Writes of fewer rows are not worth waking threads for.
constexpr std::int64_t kLightRows = 16;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Walk::~Walk() {
  caches_.clear();
  if (report_.compressed_rows + report_.dense_rows + report_.passed_rows == 0) return;
  log_info(report_.sentence());
  if (!settings_.report.empty()) append_line(settings_.report, report_.json());
}

ggml_status Walk::compute(ggml_cgraph* graph) {
  waiting_.clear();
  waiting_light_ = true;
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    if (is_view(node)) continue;
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
      // It reads what the nodes before it write.
      if (const ggml_status status = pass_on(); status != GGML_STATUS_SUCCESS) return status;
      if (answer(node)) continue;
      waiting_light_ = false;
    } else {
      if (const std::optional<CacheTensor> tensor = cache_tensor_of(node)) {
        if (Compressed* cache = compressed_of(*tensor)) cache->note_write(node, *tensor);
      }
      waiting_light_ =
          waiting_light_ && node->op == GGML_OP_SET_ROWS && node->src[0]->ne[1] <= kLightRows;
    }
    waiting_.push_back(node);
  }
  return pass_on();
}

ggml_status Walk::pass_on() {
  if (waiting_.empty()) return GGML_STATUS_SUCCESS;
  const ggml_status status = stock_.compute(waiting_, waiting_light_);
  waiting_.clear();
  waiting_light_ = true;
  return status;
}

// Null where the tensor lies nowhere yet.
Compressed* Walk::compressed_of(const CacheTensor& tensor) {
  ggml_backend_buffer_t buffer = tensor.tensor->buffer;
  if (buffer == nullptr || tensor.tensor->data == nullptr) return nullptr;
  std::erase_if(caches_, [](const auto& known) { return known.second->is_gone(); });
  std::unique_ptr<Compressed>& cache = caches_[buffer];
  if (cache == nullptr) {
    cache = std::make_unique<Compressed>(
        Compressed::Shared{settings_, stock_, dense_, report_, once_}, tensor);
  }
  return cache.get();
}

void Walk::answer_rows(const Attention& attention, const Visible& visible) {
  const std::int64_t rows = attention.rows() * attention.streams();
  std::vector<bool> answered(static_cast<std::size_t>(rows));
  const std::int64_t begin = now_ns();
  const std::int64_t compress_begin = report_.compress_ns;
  if (Compressed* cache = compressed_of(attention.cache)) {
    try {
      answered = cache->answer(attention, visible);
    } catch (const std::exception& error) {
      cache->give_up();
      once_.info(std::string("a sequence is answered exactly: ") + error.what());
    }
  }
  const std::int64_t middle = now_ns();
  const std::int64_t done = std::count(answered.begin(), answered.end(), true);
  report_.compressed_rows += done;
  report_.compressed_ns += middle - begin - (report_.compress_ns - compress_begin);
  if (done == rows) return;
  dense_.answer(attention, visible, answered);
  report_.dense_rows += rows - done;
  report_.dense_ns += now_ns() - middle;
}

bool Walk::answer(const ggml_tensor* node) {
  const std::int64_t rows = node->src[0]->ne[1] * node->src[0]->ne[3];
  const Understood understood = understand(node);
  if (!understood.attention) {
    once_.info("attention is left to ggml: " + understood.reason);
  } else if (understood.attention->rows() > kMostRows) {
    if (Compressed* cache = compressed_of(understood.attention->cache))
      cache->note_prompt(*understood.attention);
  } else {
    try {
      const Visible& visible = masks_.read(*understood.attention);
      if (visible.plain) {
        answer_rows(*understood.attention, visible);
        return true;
      }
      once_.info("attention is left to ggml: the mask says more than seen or not seen");
    } catch (const std::exception& error) {
      once_.info(std::string("attention is left to ggml: ") + error.what());
    }
  }
  report_.passed_rows += rows;
  return false;
}

}  // namespace verkv_ggml
