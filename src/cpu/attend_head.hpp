// One decode step of one KV head with its group of query heads: sketched weights, shrinkage,
// certificate, fetch plan, gather, attention.
#ifndef VERKV_SRC_CPU_ATTEND_HEAD_HPP
#define VERKV_SRC_CPU_ATTEND_HEAD_HPP

#include <cstdint>
#include <span>
#include <vector>

#include <verkv/reports.hpp>

#include "cpu/fetch_search.hpp"
#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "fetch_rules.hpp"

namespace verkv::cpu {

// What the step knows of one query head.
struct HeadState {
  float shift = 0;          // of the plan's weights
  double denominator = 0;   // D of the plan, relative to shift
  bool computable = false;  // D is a positive finite number
  float beta = 0;
  double bound = 0;  // certificate, enlarged outward
  FetchThreshold threshold;
  bool marked = false;  // its whole plan is in the marks (exact order)
  float attention_shift = 0;
  double estimate = 0;  // D_hat, relative to attention_shift
};

// Buffers of one thread. Sized outside the step, so that the step allocates nothing.
class Workspace {
 public:
  // Room for a KV head of this shape with `compressed` tokens under sketch and `residents` resident
  // ones.
  void reserve(const LayerShape& shape, const FetchRules& fetch, std::int64_t compressed,
               std::int64_t residents);
  std::int64_t bytes() const;

  // [group][stride] arrays.
  AlignedVector<float> query;  // scaled, zero-padded
  AlignedVector<std::int8_t> code_query;
  AlignedVector<float> basis_query;  // in the sketch's basis
  AlignedVector<float> weight;       // sketched logits, then weights, then logits of moved tokens
  AlignedVector<float> resident_logit;  // exact
  AlignedVector<float> resident_weight;
  AlignedVector<float>
      resident_sketched;  // sketched weights of drawn slots, -1 where the slot counts exactly
  AlignedVector<float> slot_odds;  // of drawn slots, infinite for those in H
  AlignedVector<float> output;
  AlignedVector<float> square;         // of the local window's probabilities
  std::vector<std::uint32_t> fetched;  // positions, ascending
  std::vector<std::uint32_t> moved;    // those of them that are not resident
  std::vector<Positive16> no_odds;     // zeros: makes the weights kernel take every token
  // The certificate's threshold search (fetch_search.hpp).
  AlignedVector<float> plan_weight, plan_odds, plan_worth;
  std::vector<std::uint32_t> plan_position;
  // The exact order (Eq. 9), in double.
  std::vector<double> exact_weight, exact_odds, exact_gain, exact_scratch;
  std::vector<std::uint32_t> exact_order, exact_index;
  std::vector<std::uint8_t> mark;  // [compressed], 0 between steps
  std::vector<HeadState> states;   // [group]
};

// What a step of one KV head is given. Query rows: `group` rows of key_dim elements of type
// query_type, query_stride elements apart.
struct HeadStep {
  const void* query = nullptr;
  DType query_type = DType::f32;
  std::int64_t query_stride = 0;
  bool score_window = false;                 // adds this step to the scores of the local window
  float* output = nullptr;                   // [group][value_dim]
  float* lse = nullptr;                      // [group], or null
  QueryHeadReport* query_reports = nullptr;  // [group]
  KvHeadReport* kv_report = nullptr;
};

void attend_head(const Kernels& kernels, const LayerShape& shape, const FetchRules& fetch,
                 HeadStore& store, Workspace& workspace, const HeadStep& step) noexcept;

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_ATTEND_HEAD_HPP
