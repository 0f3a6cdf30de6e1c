#include "promise.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "table.hpp"
#include "text.hpp"

namespace verkv::replay {

namespace {

constexpr std::size_t kCellsOfBlock = kPromiseEpsilons.size() * kPromiseDeltas.size();

// The cells that promise something, in blocks of one sketch and rate: for each eps all delta.
std::vector<std::vector<const Cell*>> blocks_of(const std::vector<Cell>& cells) {
  std::vector<std::vector<const Cell*>> blocks;
  for (const Cell& cell : cells) {
    if (!cell.promised()) continue;
    if (blocks.empty() || blocks.back().size() == kCellsOfBlock) blocks.emplace_back();
    blocks.back().push_back(&cell);
  }
  return blocks;
}

std::string block_sketch(const std::vector<const Cell*>& block) {
  return sketch_label(block.front()->method()->config.sketch);
}

// "!" missed, "?" missed but delta lies within the interval, "~" kept, likewise.
char mark(const Rate& rate, double delta) {
  const std::optional<Verdict> verdict = judge(rate, delta);
  if (!verdict) return ' ';
  if (verdict->kept) return verdict->sure ? ' ' : '~';
  return verdict->sure ? '!' : '?';
}

std::string marked(const Rate& rate, double delta) {
  return fmt::format("{:>5}{}", percent(rate.value()), mark(rate, delta));
}

constexpr std::size_t kEpsWidth = 6;
constexpr std::size_t kPartWidth = 36;  // of one delta
static_assert(kEpsWidth + kPromiseDeltas.size() * (kPartWidth + 2) <= kTableWidth);

std::string cell_text(const Cell& cell) {
  const Row& worst = cell.worst_layer;
  std::string text =
      fmt::format("{} {} {:>5}", marked(cell.all.redraws, cell.delta()),
                  marked(cell.all.steps, cell.delta()), percent(cell.all.any_head.value()));
  if (worst.method != nullptr) {
    text += fmt::format(" {} {:>3}", marked(leading_rate(worst), cell.delta()),
                        worst.layer ? fmt::format("{}", *worst.layer) : "");
  }
  return fmt::format("{:<30}{:>6}", text, percent(cell.all.moved_fraction));
}

// Words after a label, broken at spaces and indented to the end of the label.
std::string wrapped(const std::string& label, const std::string& words) {
  std::string text;
  std::string line = label;
  bool bare = true;
  std::size_t begin = 0;
  while (begin < words.size()) {
    const std::size_t end = std::min(words.find(' ', begin), words.size());
    const std::string next = words.substr(begin, end - begin);
    if (!bare && line.size() + 1 + next.size() > kTableWidth) {
      text += line + "\n";
      line = std::string(label.size(), ' ');
      bare = true;
    }
    line += (bare ? "" : " ") + next;
    bare = false;
    begin = end + 1;
  }
  return text + line + "\n";
}

// "kept in 43 of 45 cells, one of them in doubt; missed: 16x eps 0.01 (delta 0.05, 0.1?)".
// rate: of a cell, the one that is judged.
template <class F>
std::string kept_text(const std::vector<const Cell*>& cells, F&& rate) {
  std::size_t kept = 0, doubtful = 0, judged = 0;
  bool doubt = false;
  std::string missed;
  const Cell* open = nullptr;  // whose list of deltas is not closed yet
  for (const Cell* cell : cells) {
    const std::optional<Verdict> verdict = judge(rate(*cell), cell->delta());
    if (!verdict) continue;
    ++judged;
    if (verdict->kept) {
      ++kept;
      doubtful += !verdict->sure;
      continue;
    }
    const double keep = cell->method()->config.keep;
    if (open != nullptr && open->epsilon() == cell->epsilon() &&
        open->method()->config.keep == keep) {
      missed += ", ";
    } else {
      missed += fmt::format("{}{} eps {:g} (delta ", open == nullptr ? "" : "), ", rate_label(keep),
                            cell->epsilon());
    }
    missed += fmt::format("{:g}{}", cell->delta(), verdict->sure ? "" : "?");
    doubt |= !verdict->sure;
    open = cell;
  }
  if (judged == 0) return "nothing was tried";
  std::string text = fmt::format("kept in {} of {} cells", kept, judged);
  if (doubtful > 0) text += fmt::format(", {} of them in doubt (~)", doubtful);
  if (open != nullptr) text += fmt::format("; missed: {})", missed);
  if (doubt) text += "; ?: in doubt";
  return text;
}

}  // namespace

std::string promise_heading(const PromiseRun& run) {
  const Measurement& measurement = run.measurement;
  const auto model = run.metadata.find("model");
  return fmt::format(
      "\n{}: the KV cache of {}\n"
      "{} tokens, {} decode steps, {} layers, importance {}\n",
      file_name(run.file), model == run.metadata.end() ? "unknown" : printable(model->second, 70),
      grouped(run.prompt_tokens), grouped(measurement.steps), measurement.layers.size(),
      printable(run.methods.front().importance, 40));
}

std::string promise_table(const std::vector<Cell>& cells) {
  std::string text;
  for (const std::vector<const Cell*>& block : blocks_of(cells)) {
    std::string deltas(kEpsWidth, ' ');
    std::string heads = fmt::format("{:<{}}", "eps", kEpsWidth);
    for (std::size_t i = 0; i < kPromiseDeltas.size(); ++i) {
      deltas += fmt::format("  {:-^{}}", fmt::format(" delta {:g} % ", 100 * block[i]->delta()),
                            kPartWidth);
      heads += fmt::format("  {:>5}  {:>5}  {:>5} {:>5}  {:>3}{:>6}", "(a)", "(b)", "(c)", "worst",
                           "in", "moved");
    }
    text += fmt::format("\n{}, {}: failures of D in %\n{}{}", block_sketch(block),
                        rate_label(block.front()->method()->config.keep),
                        trimmed(std::move(deltas)), trimmed(std::move(heads)));
    for (std::size_t i = 0; i < block.size(); i += kPromiseDeltas.size()) {
      std::string line = fmt::format("{:<{}g}", block[i]->epsilon(), kEpsWidth);
      for (std::size_t k = 0; k < kPromiseDeltas.size(); ++k)
        line += "  " + cell_text(*block[i + k]);
      text += trimmed(std::move(line));
    }
  }
  return text;
}

std::string promise_verdict(const std::vector<Cell>& cells) {
  std::string text = "\n";
  std::vector<std::pair<std::string, std::vector<const Cell*>>> sketches;
  for (const std::vector<const Cell*>& block : blocks_of(cells)) {
    const std::string sketch = block_sketch(block);
    if (sketches.empty() || sketches.back().first != sketch) sketches.push_back({sketch, {}});
    sketches.back().second.insert(sketches.back().second.end(), block.begin(), block.end());
  }
  for (const auto& [sketch, members] : sketches) {
    text += wrapped(fmt::format("{:<15}(a) ", sketch),
                    kept_text(members, [](const Cell& cell) { return cell.all.redraws; }));
    text += wrapped(fmt::format("{:<15}    ", ""),
                    "in the worst layer " + kept_text(members, [](const Cell& cell) {
                      return cell.worst_layer.redraws;
                    }));
    text += wrapped(fmt::format("{:<15}(b) ", ""),
                    kept_text(members, [](const Cell& cell) { return cell.all.steps; }));
    std::size_t kept = 0;
    Rate fetched, unfetched;
    for (const Cell* cell : members) {
      fetched.add(cell->all.steps_fetched);
      unfetched.add(cell->all.steps_unfetched);
      const std::optional<Verdict> verdict = judge(cell->all.any_head, cell->delta());
      kept += verdict && verdict->kept;
    }
    text +=
        fmt::format("{:<15}    of all cells, {} decisions that fetched failed, {} that did not\n",
                    "", of_trials(fetched), of_trials(unfetched));
    text += fmt::format("{:<15}(c) at most delta in {} of {} cells, which nothing promises\n", "",
                        kept, members.size());
  }
  double keep = 0;
  for (const Cell& cell : cells) {
    if (cell.promised()) continue;
    if (cell.method()->config.keep != keep) {
      text += keep == 0 ? fmt::format("{:<15}(b)", "no fetch") : fmt::format("\n{:<18}", "");
      keep = cell.method()->config.keep;
      text += fmt::format(" {:>3}:", rate_label(keep));
    } else {
      text += ",";
    }
    text += fmt::format(" eps {:g} {} %", cell.epsilon(), percent(cell.all.steps.value()));
  }
  return text + "\n";
}

std::string promise_legend(const Options& options, const Measurement& measurement) {
  return fmt::format(
      "\ncell      the paper's rule: fetch until the error of D is certified below eps, promised "
      "to "
      "hold but for delta\n"
      "(a)       {} draws at each of {} fixed steps, all layers: what the promise speaks of\n"
      "(b)       {} draw{} followed through {} steps; (c) steps with a failure in any head of any "
      "layer, never promised\n"
      "worst in  the layer with the highest {}, and which; moved: tokens from the host in a step, "
      "% of the cache\n"
      "marks     ! missed, and delta outside the 95 % interval; ? above delta, but within; ~ "
      "below, "
      "but within; none: kept\n"
      "paper     its figures, of other models: with a perfect sketch under 0.7 % fail throughout; "
      "with its 2 bits delta\n"
      "          is kept only at eps 0.3; without fetching 11-87 % of decisions are off by more "
      "than eps\n"
      "run       a budget per {}, order {}, cap {}; {}, {} storage\n",
      options.redraws, measurement.redraw_steps.size(), options.seeds,
      options.seeds == 1 ? "" : "s", measurement.steps, options.redraws > 0 ? "(a)" : "(b)",
      name(options.pool), name(options.order),
      options.cap ? fmt::format("{:g}", *options.cap) : "off", measurement.description,
      name(measurement.storage));
}

}  // namespace verkv::replay
