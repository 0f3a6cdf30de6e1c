// Recorded caches: keys, values, queries and importance of a real model's layers in one safetensors
// file (docs/recorded_cache.md). Read-only; tensors stay as they are in the file and are viewed in
// place.
#ifndef VERKV_RECORDED_CACHE_HPP
#define VERKV_RECORDED_CACHE_HPP

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <verkv/config.hpp>
#include <verkv/error.hpp>
#include <verkv/types.hpp>
#include <verkv/view.hpp>

namespace verkv {

// One layer of a recording. KV heads and head sizes come from the shapes.
struct RecordedLayer {
  std::int64_t index = 0;  // layer of the model
  std::int64_t kv_heads = 0;
  std::int64_t query_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  TensorView key;  // prompt: [token][KV head][dim] (any strides)
  TensorView value;
  TensorView query;    // decode steps: [step][query head][dim]
  TensorView new_key;  // [step][KV head][dim]
  TensorView new_value;
  // Queries of some prompt positions: [position][query head][dim]; data null where absent.
  TensorView prompt_query;
  // By name: scores [KV head][token] of the prompt.
  std::map<std::string, ImportanceView> importance;
};

class VERKV_API RecordedCache {
 public:
  // Reads and checks the whole file. Throws FormatError naming tensor, value and limit: a missing
  // file or tensor, a truncated file, a header longer than the file, overlapping or overflowing
  // offsets, a wrong type or shape, numbers that are not finite.
  static RecordedCache load(const std::string& path);

  RecordedCache(RecordedCache&&) noexcept;
  RecordedCache& operator=(RecordedCache&&) noexcept;
  ~RecordedCache();

  const std::vector<RecordedLayer>& layers() const;
  // Tokens of the prompt and decode steps recorded; the same in every layer.
  std::int64_t prompt_tokens() const;
  std::int64_t steps() const;
  // logit = scale * q.k, then the soft cap.
  double scale() const;
  std::optional<double> soft_cap() const;
  // Sliding window of the layers, tokens.
  std::optional<std::int64_t> window() const;
  const std::map<std::string, std::string>& metadata() const;

 private:
  RecordedCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace verkv

#endif  // VERKV_RECORDED_CACHE_HPP
