// What llama.cpp does with a KV cache, without a model: cells that tokens are written to, sequences
// that see cells, masks, graphs of SET_ROWS and FLASH_ATTN_EXT, and ggml's scheduler.
#ifndef VERKV_TESTS_GGML_TOY_ENGINE_HPP
#define VERKV_TESTS_GGML_TOY_ENGINE_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace verkv::test {

struct ToyShape {
  int layers = 2;
  std::int64_t kv_heads = 2;
  std::int64_t query_heads = 6;
  std::int64_t key_dim = 64;
  std::int64_t value_dim = 64;
  std::int64_t cells = 512;  // of a stream
  std::int64_t streams = 1;
  ggml_type type = GGML_TYPE_F16;
  float scale = 0.125f;
  float soft_cap = 0;
  float largest_bias = 0;
  // Logits of sinks of the softmax, 1 more for each head; or none.
  bool sinks = false;
  float first_sink = 1;
};

// A token of a step: it is written to its cell and sees the cells of its sequence up to it.
struct ToyToken {
  int sequence = 0;
  std::int64_t cell = 0;
  std::int64_t stream = 0;
};

// The backends of a context: with the plug-in at `plugin`, or none where that is empty.
class ToyEngine {
 public:
  ToyEngine(const ToyShape& shape, const std::string& plugin, std::uint32_t seed);
  ~ToyEngine();
  ToyEngine(const ToyEngine&) = delete;
  ToyEngine& operator=(const ToyEngine&) = delete;

  // Answers by [layer][token][query head][value_dim]. With several streams, as many tokens of each,
  // stream by stream. The numbers of keys, values and queries come from the seed and the call.
  std::vector<std::vector<float>> step(const std::vector<ToyToken>& tokens);
  // The same answers in double, from what the cache holds.
  std::vector<std::vector<double>> reference() const;

  // The sequence does not see these cells any more; they may be written again.
  void remove(int sequence, std::int64_t first, std::int64_t last, std::int64_t stream = 0);
  // Another sequence of the stream sees what this one does.
  void copy(int from, int to, std::int64_t stream = 0);
  // The cells that a sequence sees, and those that nobody does.
  std::vector<std::int64_t> cells_of(int sequence, std::int64_t stream = 0) const;
  std::vector<std::int64_t> free_cells(std::int64_t stream = 0) const;
  // Writes to rows of the cache beside all graphs, as the restoring of a state does.
  void overwrite(int layer, bool keys, std::int64_t first, std::int64_t last);
  // Another cache in place of this one, as a context that goes on with one of another size has.
  void renew();
  // Multiplies all keys of a layer in a graph, in place, as a shift of positions rewrites them.
  void scale_keys(int layer, float factor);

 private:
  struct Input;
  void make_cache();
  float number();
  float cached(const ggml_tensor* tensor, std::int64_t stream, std::int64_t cell,
               std::int64_t element) const;
  bool sees(const ToyToken& token, std::int64_t cell) const;
  template <class Accept>
  std::vector<std::int64_t> cells_where(std::int64_t stream, Accept&& accept) const;

  ToyShape shape_;
  std::mt19937 random_;
  ggml_backend_reg_t plugin_ = nullptr;
  std::vector<ggml_backend_t> backends_;
  ggml_backend_sched_t scheduler_ = nullptr;
  ggml_context* context_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  std::vector<ggml_tensor*> keys_;
  std::vector<ggml_tensor*> values_;
  // Of [stream][cell]: who sees it, and since which step.
  std::vector<std::vector<std::set<int>>> seen_by_;
  std::vector<std::vector<std::int64_t>> written_at_;
  std::int64_t time_ = 0;
  // Of the last step.
  std::vector<ToyToken> tokens_;
  std::vector<std::int64_t> token_time_;
  std::vector<std::vector<float>> queries_;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_GGML_TOY_ENGINE_HPP
