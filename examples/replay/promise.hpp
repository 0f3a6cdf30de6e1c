// Where Pr(|D' - D| / D > eps) <= delta is kept: the rows of --promise as cells of a grid.
#ifndef VERKV_EXAMPLES_REPLAY_PROMISE_HPP
#define VERKV_EXAMPLES_REPLAY_PROMISE_HPP

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "measure.hpp"
#include "options.hpp"
#include "statistics.hpp"

namespace verkv::replay {

// What --promise measured on one recording. Can be moved, not copied: the rows point into
// `methods`.
struct PromiseRun {
  PromiseRun() = default;
  PromiseRun(PromiseRun&&) = default;
  PromiseRun& operator=(PromiseRun&&) = default;

  std::string file;
  std::int64_t prompt_tokens = 0;
  std::map<std::string, std::string> metadata;
  std::vector<Method> methods;  // those of select_methods()
  Measurement measurement;
};

// A rate beside the delta that was promised.
struct Verdict {
  bool kept = false;  // the rate is at most delta
  bool sure = false;  // delta lies outside the 95 % interval of the rate
};

// None without trials.
inline std::optional<Verdict> judge(const Rate& rate, double delta) {
  if (rate.trials == 0) return std::nullopt;
  const Interval interval = wilson_interval(rate);
  const bool kept = rate.value() <= delta;
  return Verdict{kept, kept ? interval.high < delta : interval.low > delta};
}

// One method on one recording, or on all of them.
struct Cell {
  Row all;          // over all layers; of several recordings rates and moved_fraction only
  Row worst_layer;  // the layer with the highest rate (a), or (b) where there are no draws
  const Method* method() const { return all.method; }
  // Whether a promise was made; else the row shows what comes of promising nothing.
  bool promised() const { return all.method->promise == Promise::epsilon; }
  double epsilon() const { return all.method->tolerance; }
  double delta() const { return all.method->config.fetch.delta; }
};

// The rate that a layer is called worst by.
inline const Rate& leading_rate(const Row& row) {
  return row.redraws.trials > 0 ? row.redraws : row.steps;
}

inline bool is_worse(const Row& row, const Row& than) {
  const double rate = leading_rate(row).value();
  return than.method == nullptr || rate > leading_rate(than).value();
}

// The cells of a run, in the order of its methods.
inline std::vector<Cell> cells_of(const PromiseRun& run) {
  std::vector<Cell> cells(run.methods.size());
  for (const Row& row : run.measurement.rows) {
    Cell& cell = cells[static_cast<std::size_t>(row.method - run.methods.data())];
    if (!row.layer) {
      cell.all = row;
    } else if (is_worse(row, cell.worst_layer)) {
      cell.worst_layer = row;
    }
  }
  return cells;
}

// The trials of all runs together; the moved fraction is the mean of the runs.
inline std::vector<Cell> pooled_cells(const std::vector<PromiseRun>& runs) {
  std::vector<Cell> pooled;
  for (const PromiseRun& run : runs) {
    const std::vector<Cell> cells = cells_of(run);
    if (pooled.empty()) {
      pooled.resize(cells.size());
      for (std::size_t i = 0; i < cells.size(); ++i) {
        pooled[i].all.method = cells[i].all.method;
        pooled[i].all.moved_fraction = 0;
      }
    }
    for (std::size_t i = 0; i < cells.size(); ++i) {
      Row& to = pooled[i].all;
      const Row& from = cells[i].all;
      to.redraws.add(from.redraws);
      to.steps.add(from.steps);
      to.steps_unfetched.add(from.steps_unfetched);
      to.steps_fetched.add(from.steps_fetched);
      to.any_head.add(from.any_head);
      if (!(from.worst_query.value() <= to.worst_query.value())) to.worst_query = from.worst_query;
      to.moved_fraction += from.moved_fraction / static_cast<double>(runs.size());
      const Row& worst = cells[i].worst_layer;
      if (worst.method != nullptr && is_worse(worst, pooled[i].worst_layer))
        pooled[i].worst_layer = worst;
    }
  }
  return pooled;
}

// What people read of a grid: a block for each sketch and rate, and what came of it. ASCII, at most
// kTableWidth columns.
std::string promise_heading(const PromiseRun& run);
std::string promise_table(const std::vector<Cell>& cells);
std::string promise_verdict(const std::vector<Cell>& cells);
std::string promise_legend(const Options& options, const Measurement& measurement);

// {settings, files, pooled}; docs/replay.md has the fields. bench/text_quality/pictures.py draws
// it.
std::string promise_report(const std::vector<PromiseRun>& runs, const Options& options);

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_PROMISE_HPP
