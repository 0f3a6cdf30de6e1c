// One layer of a few sequences as the CPU backend keeps it, uploaded for the device's step, and the
// comparison of the two.
#ifndef VERKV_TESTS_CUDA_STEP_SUPPORT_HPP
#define VERKV_TESTS_CUDA_STEP_SUPPORT_HPP

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/step.hpp"
#include "fetch_rules.hpp"
#include "step.hpp"
#include "step_workspace.hpp"

namespace verkv::cuda::test {

// A stop rule that is off.
inline constexpr double kOff = StopRules::kNone;

// What a case is made of; the defaults are the library's.
struct Setup {
  std::int64_t kv_heads = 2;
  int group = 4;
  std::int64_t key_dim = 128;
  std::int64_t value_dim = 128;
  double soft_cap = 0;
  std::vector<float> sink_logits;  // [query head]; empty: none
  DType storage = DType::f16;
  DType query_type = DType::f32;
  SketchConfig sketch;
  FetchRules fetch = fetch_rules(CacheConfig{});
  bool clusters = true;  // estimates by clusters
  // Tokens and compressed tokens of each sequence.
  struct Length {
    std::int64_t tokens = 0;
    std::int64_t compressed = 0;
  };
  std::vector<Length> lengths{{700, 650}};
  std::vector<int> slots{0};   // of the rows; -1 is padding
  std::vector<int> back;       // newest tokens that rows do not see; none: 0 of all
  std::int64_t query_gap = 0;  // elements between the rows of queries
  double query_size = 1;       // standard deviation of the query's coordinates
  double key_size = 1;
  double keep = 0.1;        // mean probability of residence
  bool equal_keys = false;  // all keys of a head are one of four
  bool equal_odds = false;  // all tokens but the sinks have those of `keep`
  bool score_window = true;
  std::uint32_t seed = 1;
};

class Scene {
 public:
  explicit Scene(const Setup& setup);
  ~Scene();
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  LayerView layer_view() const;
  StepView step_view() const;
  const HeadView& head_view(int slot, std::int64_t kv_head) const {
    return heads_[static_cast<std::size_t>(slot * setup_.kv_heads + kv_head)];
  }
  const Setup& setup() const { return setup_; }
  const cpu::LayerShape& shape() const { return shape_; }
  cpu::HeadStore& store(int slot, std::int64_t kv_head) {
    return stores_[static_cast<std::size_t>(slot * setup_.kv_heads + kv_head)];
  }

  // Adds tokens to a sequence on both sides, without compressing them.
  void append(int slot, std::int64_t count);
  // New queries, on both sides; `edit` may change them ([row][query head][key_dim]).
  void draw_queries(const std::function<void(std::vector<float>&)>& edit = {});
  // Sizes of the step's bounds beyond the lengths at hand.
  void reserve(std::int64_t more_residents) { more_residents_ = more_residents; }
  // Copies the stores' arrays to the device. Queries must have been drawn.
  void upload();
  // Enqueues the step.
  void launch(cudaStream_t stream);
  // Waits, runs the CPU's step and compares; returns what differs, empty if nothing.
  std::string compare();
  // Sums over all rows of the last compared step.
  struct Totals {
    std::int64_t fetched = 0;
    std::int64_t moved = 0;
    std::int64_t uncertified = 0;
    std::int64_t searched = 0;  // query heads whose certificate over all tokens was above epsilon
    std::int64_t by_clusters = 0;  // query heads that estimate by clusters
  };
  const Totals& totals() const { return totals_; }
  double worst_output() const { return worst_output_; }

 private:
  class Comparison;  // step_support.cpp

  HeadView upload_head(const cpu::HeadStore& store);
  void fill(int slot, std::int64_t count);
  void append_last_again(int slot);
  // Element of the query of (row, query head).
  std::int64_t query_at(std::int64_t row, std::int64_t head) const {
    const std::int64_t stride = setup_.key_dim + setup_.query_gap;
    return row * (shape_.config.query_heads * stride + setup_.query_gap) + head * stride;
  }
  template <class T>
  T* to_device(const T* data, std::int64_t count, std::int64_t room = 0);
  void release();

  Setup setup_;
  cpu::LayerShape shape_;
  std::mt19937 random_;
  std::vector<cpu::HeadStore> stores_;
  std::vector<float> query_;             // as drawn
  std::vector<std::byte> query_stored_;  // in the query's type
  std::vector<HeadView> heads_;
  std::vector<void*> device_;
  std::vector<void*> pinned_;
  HeadView* device_heads_ = nullptr;
  StepView step_;
  std::int64_t more_residents_ = 0;
  std::int64_t outputs_ = 0;
  Totals totals_;
  double worst_output_ = 0;
};

}  // namespace verkv::cuda::test

#endif  // VERKV_TESTS_CUDA_STEP_SUPPORT_HPP
