// One decode step of one KV head with its group of query heads, for the last token of a sequence or
// for some of its last tokens: sketched weights, shrinkage, certificate, fetch plan, gather,
// attention.
#ifndef VERKV_SRC_CPU_STEP_HPP
#define VERKV_SRC_CPU_STEP_HPP

#include <cstdint>
#include <span>

#include <verkv/reports.hpp>
#include <verkv/types.hpp>

#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "cpu/workspace.hpp"
#include "fetch_rules.hpp"

namespace verkv::cpu {

// Of one row.
struct StepArguments {
  // `group` rows of key_dim elements of type query_type, query_stride elements apart.
  const void* query = nullptr;
  DType query_type = DType::f32;
  std::int64_t query_stride = 0;
  // Newest tokens of the sequence that the row does not see.
  std::int64_t back = 0;
  const float* sink_logits = nullptr;        // [group], or null
  float* output = nullptr;                   // [group][value_dim]
  float* lse = nullptr;                      // [group], or null
  QueryHeadReport* query_reports = nullptr;  // [group]
  KvHeadReport* kv_report = nullptr;
};

// rows: one to rows_together; each sees one token more than the one before. Needs:
// Workspace::reserve for this head. Allocates nothing.
void run_step(const Kernels& kernels, const LayerShape& shape, const FetchRules& rules,
              HeadStore& store, Workspace& workspace, std::span<const StepArguments> rows) noexcept;

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_STEP_HPP
