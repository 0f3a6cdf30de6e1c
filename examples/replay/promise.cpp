#include "promise.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "../common/svg.hpp"
#include "table.hpp"
#include "text.hpp"

namespace verkv::replay {

using examples::Point;
using examples::Svg;

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
      word(options.pool), word(options.order),
      options.cap ? fmt::format("{:g}", *options.cap) : "off", measurement.description,
      name(measurement.storage));
}

std::string promise_title(const std::vector<PromiseRun>& runs) {
  std::vector<std::string> names;
  for (const PromiseRun& run : runs) names.push_back(file_name(run.file));
  if (names.size() > 3) names = {fmt::format("{} recordings together", names.size())};
  return fmt::format("{}", fmt::join(names, ", "));
}

// ---- the picture ----

namespace {

constexpr const char* kInk = "#222222";
constexpr const char* kFaint = "#666666";
// Okabe and Ito, one for each eps, the strictest darkest.
constexpr std::array<const char*, kPromiseEpsilons.size()> kColours{"#000000", "#0072B2", "#D55E00",
                                                                    "#009E73", "#CC79A7"};

constexpr double kChartWidth = 960;
constexpr double kChartLeft = 70;   // of the first panel
constexpr double kChartRight = 20;  // beside the last panel
constexpr double kPanelGap = 18;
constexpr double kPanelHeight = 210;
constexpr double kPanelTitle = 36;  // above a panel
constexpr double kPanelFoot = 20;   // tick labels below it
constexpr double kFloorStrip = 22;  // for rates of zero, at the foot of a panel
constexpr double kDodge = 14;       // between the points of a group
constexpr double kTwin = 3.5;       // from the centre of a pair to its (a) and (b)

// Rates on a logarithmic axis from `low` to 1; zeros stand on a line of their own.
struct RateAxis {
  double low = 1e-3;
  double top = 0;     // pixels of rate 1
  double bottom = 0;  // of `low`

  double place(double rate) const {
    if (!(rate > 0)) return bottom + kFloorStrip * 0.6;
    const double share = std::log(std::max(rate, low)) / std::log(low);
    return top + share * (bottom - top);
  }
};

void draw_rate(Svg& svg, const RateAxis& axis, double x, const Rate& rate, const char* colour,
               bool hollow) {
  const Interval interval = wilson_interval(rate);
  svg.line({x, axis.place(interval.low)}, {x, axis.place(interval.high)}, colour,
           rate.failures == 0 ? 0.5 : 0.9);
  svg.circle({x, axis.place(rate.value())}, 2.6, hollow ? "white" : colour, colour, 1.1);
}

std::string trials_text(const std::vector<const Cell*>& block, const Rate Row::*rate) {
  std::int64_t least = (block.front()->all.*rate).trials, most = least;
  for (const Cell* cell : block) {
    least = std::min(least, (cell->all.*rate).trials);
    most = std::max(most, (cell->all.*rate).trials);
  }
  return least == most ? grouped(most) : fmt::format("{}-{}", grouped(least), grouped(most));
}

void draw_panel(Svg& svg, const std::vector<const Cell*>& block, double left, double top,
                double width, double low, bool first_column) {
  const double bottom = top + kPanelHeight;
  const RateAxis axis{low, top + 6, bottom - kFloorStrip};
  const auto centre = [&](std::size_t delta) {
    return left +
           width * (0.5 + static_cast<double>(delta)) / static_cast<double>(kPromiseDeltas.size());
  };
  const double reach = kDodge * static_cast<double>(kPromiseEpsilons.size() - 1) / 2 + kTwin + 4;

  svg.text(
      {left, top - 20},
      fmt::format("{}, {}", rate_label(block.front()->method()->config.keep), block_sketch(block)),
      13, "start", kInk, true);
  svg.text({left, top - 6},
           fmt::format("trials of a cell: (a) {}, (b) {}", trials_text(block, &Row::redraws),
                       trials_text(block, &Row::steps)),
           10, "start", kFaint);

  // The limit is delta at each group, and what lies above it is missed.
  std::vector<Point> limit{{left, axis.place(block[0]->delta())}};
  for (std::size_t i = 0; i < kPromiseDeltas.size(); ++i) {
    limit.push_back({centre(i) - reach, axis.place(block[i]->delta())});
    limit.push_back({centre(i) + reach, axis.place(block[i]->delta())});
  }
  limit.push_back({left + width, limit.back().y});
  std::vector<Point> above = limit;
  above.push_back({left + width, top});
  above.push_back({left, top});
  svg.polygon(above, "#f6eaea");

  for (double rate = 1; rate > low * 0.99; rate /= 10) {
    const double y = axis.place(rate);
    svg.line({left, y}, {left + width, y}, "#dddddd", 0.8);
    if (first_column)
      svg.text({left - 6, y + 3.5}, fmt::format("{:g} %", 100 * rate), 10, "end", kInk);
  }
  svg.line({left, axis.place(0)}, {left + width, axis.place(0)}, "#bbbbbb", 0.8);
  if (first_column) svg.text({left - 6, axis.place(0) + 3.5}, "0", 10, "end", kInk);
  svg.frame({left, top}, {left + width, bottom}, "#999999");
  svg.polyline(limit, kInk, 1.4, "5 3");
  for (std::size_t i = 0; i < kPromiseDeltas.size(); ++i) {
    svg.text({centre(i), bottom + 14}, fmt::format("{:g} %", 100 * block[i]->delta()), 10, "middle",
             kInk);
  }

  for (std::size_t row = 0; row < kPromiseEpsilons.size(); ++row) {
    const double shift =
        kDodge * (static_cast<double>(row) - static_cast<double>(kPromiseEpsilons.size() - 1) / 2);
    for (const bool steps : {true, false}) {
      std::vector<Point> points;
      for (std::size_t i = 0; i < kPromiseDeltas.size(); ++i) {
        const Row& all = block[row * kPromiseDeltas.size() + i]->all;
        const Rate& rate = steps ? all.steps : all.redraws;
        if (rate.trials == 0) continue;
        const double x = centre(i) + shift + (steps ? kTwin : -kTwin);
        points.push_back({x, axis.place(rate.value())});
        draw_rate(svg, axis, x, rate, kColours[row], steps);
      }
      for (std::size_t i = 1; i < points.size(); ++i) {
        // Along the zeros lines would only cover each other.
        if (std::min(points[i - 1].y, points[i].y) < axis.place(0)) {
          svg.polyline({points[i - 1], points[i]}, kColours[row], steps ? 0.8 : 1.3,
                       steps ? "2 2" : "");
        }
      }
    }
  }
}

}  // namespace

std::string promise_chart(const std::vector<Cell>& cells, const std::string& title) {
  const std::vector<std::vector<const Cell*>> blocks = blocks_of(cells);
  const double columns = static_cast<double>(kRates.size());
  const double rows = std::ceil(static_cast<double>(blocks.size()) / columns);
  const double width =
      (kChartWidth - kChartLeft - kChartRight - kPanelGap * (columns - 1)) / columns;

  // Down to the power of ten below the least rate that is not zero, six decades at most.
  double least = 0.01;
  for (const std::vector<const Cell*>& block : blocks) {
    for (const Cell* cell : block) {
      for (const Rate* rate : {&cell->all.redraws, &cell->all.steps}) {
        if (rate->failures > 0) least = std::min(least, rate->value());
      }
    }
  }
  const double low = std::pow(10, std::max(-6.0, std::floor(std::log10(least) + 1e-9)));

  Svg svg;
  svg.text({kChartLeft, 28}, "How often D is off by more than eps, and how often it may be", 16,
           "start", kInk, true);
  svg.text({kChartLeft, 46}, title, 11, "start", kFaint);
  double x = kChartLeft;
  for (std::size_t i = 0; i < kPromiseEpsilons.size(); ++i) {
    svg.line({x, 64}, {x + 22, 64}, kColours[i], 1.6);
    svg.circle({x + 11, 64}, 2.8, kColours[i], kColours[i], 1);
    svg.text({x + 28, 68}, fmt::format("eps {:g}", kPromiseEpsilons[i]), 12, "start", kInk);
    x += 98;
  }
  x = kChartLeft;
  svg.polyline({{x, 84}, {x + 22, 84}}, kFaint, 1.3);
  svg.circle({x + 11, 84}, 2.6, kFaint, kFaint, 1.1);
  svg.text({x + 28, 88}, "(a) fixed queries, redrawn", 12, "start", kInk);
  x += 204;
  svg.polyline({{x, 84}, {x + 22, 84}}, kFaint, 0.8, "2 2");
  svg.circle({x + 11, 84}, 2.6, "white", kFaint, 1.1);
  svg.text({x + 28, 88}, "(b) one draw, all steps", 12, "start", kInk);
  x += 186;
  svg.line({x + 5, 77}, {x + 5, 91}, kFaint, 0.8);
  svg.text({x + 14, 88}, "95 % interval", 12, "start", kInk);
  x += 116;
  svg.polyline({{x, 84}, {x + 22, 84}}, kInk, 1.4, "5 3");
  svg.text({x + 28, 88}, "rate = delta; missed above (shaded)", 12, "start", kInk);

  constexpr double grid_top = 106;
  constexpr double row_height = kPanelTitle + kPanelHeight + kPanelFoot;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::size_t column = i % kRates.size();
    const double top = grid_top + kPanelTitle + row_height * static_cast<double>(i / kRates.size());
    draw_panel(svg, blocks[i], kChartLeft + static_cast<double>(column) * (width + kPanelGap), top,
               width, low, column == 0);
  }
  const double foot = grid_top + rows * row_height;
  svg.upright_text({18, (grid_top + foot) / 2}, "failures of D, share of trials", 12, kInk);
  svg.text({(kChartLeft + kChartWidth - kChartRight) / 2, foot + 14}, "delta promised", 12,
           "middle", kInk);
  return svg.finish(kChartWidth, foot + 28, "Failures of D beside delta: " + title);
}

}  // namespace verkv::replay
