#include "walk.hpp"

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
  if (report_.dense_rows + report_.passed_rows == 0) return;
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

bool Walk::answer(const ggml_tensor* node) {
  const std::int64_t rows = node->src[0]->ne[1] * node->src[0]->ne[3];
  const Understood understood = understand(node);
  if (!understood.attention) {
    once_.info("attention is left to ggml: " + understood.reason);
  } else if (understood.attention->rows() <= kMostRows) {
    const std::int64_t begin = now_ns();
    try {
      const Visible& visible = masks_.read(*understood.attention);
      if (visible.plain) {
        dense_.answer(*understood.attention, visible);
        report_.dense_rows += rows;
        report_.dense_ns += now_ns() - begin;
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
