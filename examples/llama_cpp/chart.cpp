#include "chart.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "../common/svg.hpp"
#include "eval_report.hpp"

namespace verkv::llm {

using examples::Point;
using examples::Svg;

namespace {

constexpr double kWidth = 900;
constexpr double kMargin = 20;
constexpr double kSmall = 10;  // text of labels
constexpr double kText = 12;
constexpr const char* kInk = "#222222";
constexpr const char* kFaint = "#666666";
constexpr const char* kGrid = "#e4e4e4";

enum class Marker { circle, square, triangle, diamond, down, cross };

struct Style {
  std::string_view method;
  const char* colour;
  Marker marker;
};

// The palette of Okabe and Ito without its yellow, which white swallows; shapes tell the rest.
constexpr std::array<Style, 10> kStyles{{{"dense", "#777777", Marker::cross},
                                         {"dense_offload", "#777777", Marker::cross},
                                         {"full_budget", "#777777", Marker::square},
                                         {"top_k", "#56B4E9", Marker::square},
                                         {"top_k_gate", "#CC79A7", Marker::down},
                                         {"top_k_fetch", "#0072B2", Marker::square},
                                         {"poisson", "#E69F00", Marker::circle},
                                         {"paper", "#009E73", Marker::diamond},
                                         {"risk", "#D55E00", Marker::circle},
                                         {"risk_and_epsilon", "#000000", Marker::triangle}}};

std::size_t style_place(std::string_view method) {
  const auto found = std::find_if(kStyles.begin(), kStyles.end(),
                                  [&](const Style& style) { return style.method == method; });
  return static_cast<std::size_t>(found - kStyles.begin());
}

Style style_of(std::string_view method) {
  const std::size_t place = style_place(method);
  return place < kStyles.size() ? kStyles[place] : Style{method, "#8B5A2B", Marker::down};
}

constexpr std::array<const char*, 5> kDashes{"", "6 3", "2 3", "8 3 2 3", "4 2"};

double text_width(std::string_view text, double size) {
  return 0.58 * size * static_cast<double>(text.size());
}

struct Box {
  double left = 0;
  double top = 0;
  double right = 0;
  double bottom = 0;
};

double overlap(const Box& a, const Box& b) {
  const double width = std::min(a.right, b.right) - std::max(a.left, b.left);
  const double height = std::min(a.bottom, b.bottom) - std::max(a.top, b.top);
  return width > 0 && height > 0 ? width * height : 0;
}

void draw_marker(Svg& svg, Point p, const Style& style, bool hollow = false) {
  constexpr double r = 3.6;
  const char* fill = hollow ? "white" : style.colour;
  const char* stroke = hollow ? style.colour : "white";
  const double width = hollow ? 1.5 : 0.8;
  const auto polygon = [&](std::vector<Point> corners) {
    for (Point& corner : corners) corner = {p.x + corner.x, p.y + corner.y};
    svg.polygon(corners, fill, stroke, width);
  };
  switch (style.marker) {
    case Marker::circle:
      svg.circle(p, r, fill, stroke, width);
      break;
    case Marker::square:
      polygon({{-r, -r}, {r, -r}, {r, r}, {-r, r}});
      break;
    case Marker::triangle:
      polygon({{0, -r * 1.3}, {r * 1.2, r}, {-r * 1.2, r}});
      break;
    case Marker::down:
      polygon({{0, r * 1.3}, {r * 1.2, -r}, {-r * 1.2, -r}});
      break;
    case Marker::diamond:
      polygon({{0, -r * 1.4}, {r * 1.4, 0}, {0, r * 1.4}, {-r * 1.4, 0}});
      break;
    case Marker::cross:
      svg.line({p.x - r, p.y - r}, {p.x + r, p.y + r}, style.colour, 2);
      svg.line({p.x - r, p.y + r}, {p.x + r, p.y - r}, style.colour, 2);
      break;
  }
}

std::string nothing_chart(const std::string& title, std::string_view what) {
  Svg svg;
  svg.text({kMargin, 30}, title, 16, "start", kInk, true);
  svg.text({kWidth / 2, 90}, fmt::format("Nothing was measured: {}.", what), 14, "middle", kFaint);
  return svg.finish(kWidth, 140, title);
}

// Groups of equal key, in the order of their first members.
template <class Key, class Value>
class Groups {
 public:
  std::vector<Value>& operator[](const Key& key) {
    for (auto& [known, values] : groups_) {
      if (known == key) return values;
    }
    groups_.push_back({key, {}});
    return groups_.back().second;
  }
  auto begin() const { return groups_.begin(); }
  auto end() const { return groups_.end(); }
  std::size_t size() const { return groups_.size(); }

 private:
  std::vector<std::pair<Key, std::vector<Value>>> groups_;
};

bool is_reference(const EvalRow& row) { return !(row.keep > 0 && row.keep < 1); }

// What tells apart runs of one method: its sketch and importance, where they differ in `rows`.
std::string variant(const EvalRow& row, const std::vector<const EvalRow*>& rows) {
  bool sketches = false;
  bool importances = false;
  for (const EvalRow* other : rows) {
    if (other->method != row.method) continue;
    sketches |= other->sketch != row.sketch;
    importances |= other->importance != row.importance;
  }
  std::string text;
  if (sketches) text = row.sketch.empty() ? "no sketch" : row.sketch;
  if (importances) text += fmt::format("{}{}", text.empty() ? "" : ", ", row.importance);
  return text;
}

// Curves of one method: the same colour, another dash for each.
struct CurveKey {
  std::string method;
  std::string detail;
  bool operator==(const CurveKey&) const = default;

  std::string label() const {
    // "risk 1e-4" names its rule.
    if (method.starts_with("risk") && detail.starts_with("risk")) return detail;
    return method_label(method) + (detail.empty() ? "" : ", " + detail);
  }
};

// The dash of each curve of the chart, in one order of curves for all panels.
class Dashes {
 public:
  void add(const CurveKey& key) { places_[key.method].insert(key.detail); }
  const char* of(const CurveKey& key) const {
    const std::set<std::string>& details = places_.at(key.method);
    const auto place = std::distance(details.begin(), details.find(key.detail));
    return kDashes[static_cast<std::size_t>(place) % kDashes.size()];
  }
  std::vector<CurveKey> curves() const {
    std::vector<CurveKey> result;
    for (const auto& [method, details] : places_) {
      for (const std::string& detail : details) result.push_back({method, detail});
    }
    std::stable_sort(result.begin(), result.end(), [](const CurveKey& a, const CurveKey& b) {
      return style_place(a.method) < style_place(b.method);
    });
    return result;
  }

 private:
  std::map<std::string, std::set<std::string>> places_;
};

// Draws the legend from `top` on and returns where it ends.
double draw_legend(Svg& svg, const Dashes& dashes, double top) {
  double x = kMargin;
  double y = top + 10;
  for (const CurveKey& curve : dashes.curves()) {
    const std::string label = curve.label();
    const double width = 34 + text_width(label, kText) + 14;
    if (x + width > kWidth - kMargin && x > kMargin) {
      x = kMargin;
      y += 20;
    }
    const Style style = style_of(curve.method);
    svg.line({x, y - 4}, {x + 26, y - 4}, style.colour, 1.8, dashes.of(curve));
    draw_marker(svg, {x + 13, y - 4}, style);
    svg.text({x + 32, y}, label, kText, "start", kInk);
    x += width;
  }
  return y + 10;
}

// A logarithmic axis over [low, high], all positive, from pixel `from` to pixel `to`.
struct LogAxis {
  double low = 1;
  double high = 10;

  double place(double value, double from, double to) const {
    return from +
           (std::log(value) - std::log(low)) / (std::log(high) - std::log(low)) * (to - from);
  }

  // Powers of ten; 2 and 5 times them too where they are few.
  std::vector<double> ticks() const {
    const bool dense = high / low < 150;
    std::vector<double> result;
    const int last = static_cast<int>(std::ceil(std::log10(high)));
    for (int power = static_cast<int>(std::floor(std::log10(low))); power <= last; ++power) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        const double tick = factor * std::pow(10, power);
        if ((factor == 1 || dense) && tick > low * 0.999 && tick < high * 1.001)
          result.push_back(tick);
      }
    }
    return result;
  }
};

// The next of 1, 2, 5 times a power of ten at or below (above) the value.
double round_tick(double value, bool up) {
  const double power = std::pow(10, std::floor(std::log10(value) + 1e-9));
  const std::array<double, 4> steps{1, 2, 5, 10};
  if (up) {
    for (const double step : steps) {
      if (step * power > value * (1 - 1e-9)) return step * power;
    }
    return 10 * power;
  }
  double result = power;
  for (const double step : steps) {
    if (step * power < value * (1 + 1e-9)) result = step * power;
  }
  return result;
}

// "0.001", "1e-5", "20".
std::string tick_label(double value) {
  if (value > 0.0009 && value < 99'999) return fmt::format("{:.4g}", value);
  const double power = std::floor(std::log10(value) + 1e-9);
  return fmt::format("{:.0f}e{:.0f}", value / std::pow(10, power), power);
}

// ---- KL divergence against moved share ----

struct KlPanel {
  std::string title;
  std::vector<const EvalRow*> rows;
};

std::vector<KlPanel> kl_panels(const std::vector<const EvalRow*>& rows, std::size_t& columns) {
  struct Source {
    std::string model;
    std::string text;
    std::int64_t context;
    bool operator==(const Source&) const = default;
  };
  Groups<Source, const EvalRow*> sources;
  for (const EvalRow* row : rows)
    sources[{row->model, row->text, row->context_tokens}].push_back(row);
  std::vector<KlPanel> panels;
  std::size_t most = 0;
  bool alike = true;
  for (const auto& [source, members] : sources) {
    std::set<double, std::greater<>> keeps;
    for (const EvalRow* row : members) {
      if (!is_reference(*row)) keeps.insert(row->keep);
    }
    if (keeps.empty()) keeps.insert(1);
    alike = alike && (most == 0 || most == keeps.size());
    most = std::max(most, keeps.size());
    for (const double keep : keeps) {
      KlPanel panel;
      panel.title = fmt::format("{}, {}", source.model, source.text);
      if (source.context > 0)
        panel.title += source.context % 1024 == 0 ? fmt::format(" {}K", source.context / 1024)
                                                  : fmt::format(" {}", source.context);
      if (keep < 1) panel.title += ", " + rate_label(keep);
      for (const EvalRow* row : members) {
        if (is_reference(*row) || row->keep == keep) panel.rows.push_back(row);
      }
      panels.push_back(std::move(panel));
    }
  }
  // A row of the grid for each text where that fits.
  columns = alike && (most == 2 || most == 3) ? most
            : panels.size() == 4              ? 2
                                              : std::min<std::size_t>(panels.size(), 3);
  return panels;
}

// A point of a curve, in pixels.
struct Mark {
  Point place;
  std::optional<double> whisker_low;  // pixels; none where there is no interval
  std::optional<double> whisker_high;
  bool capped_low = false;
  bool capped_high = false;
  std::string label;
};

struct Curve {
  CurveKey key;
  std::vector<Mark> marks;
};

// Puts labels beside their points where they cover least.
void draw_labels(Svg& svg, const std::vector<Curve>& curves, const Box& area) {
  std::vector<Box> taken;
  std::vector<Box> markers;
  std::vector<Box> lines;
  for (const Curve& curve : curves) {
    for (std::size_t i = 0; i < curve.marks.size(); ++i) {
      const Point p = curve.marks[i].place;
      markers.push_back({p.x - 5, p.y - 5, p.x + 5, p.y + 5});
      if (curve.marks[i].whisker_low && curve.marks[i].whisker_high)
        lines.push_back(
            {p.x - 3, *curve.marks[i].whisker_high - 1, p.x + 3, *curve.marks[i].whisker_low + 1});
      if (i == 0) continue;
      const Point q = curve.marks[i - 1].place;
      const int pieces = 1 + static_cast<int>(std::hypot(p.x - q.x, p.y - q.y) / 4);
      for (int piece = 0; piece <= pieces; ++piece) {
        const double t = static_cast<double>(piece) / pieces;
        const Point m{q.x + t * (p.x - q.x), q.y + t * (p.y - q.y)};
        lines.push_back({m.x - 1.5, m.y - 1.5, m.x + 1.5, m.y + 1.5});
      }
    }
  }
  for (const Curve& curve : curves) {
    for (const Mark& mark : curve.marks) {
      if (mark.label.empty()) continue;
      const double width = text_width(mark.label, kSmall);
      constexpr double height = kSmall;
      double best = std::numeric_limits<double>::infinity();
      double covered = 0;
      double away = 0;
      Box place;
      for (const double distance : {7.0, 14.0, 22.0, 32.0, 44.0}) {
        const double side = distance * 0.75;
        const std::array<Point, 8> corners{{{side, -side - height / 2},
                                            {side, side - height / 2},
                                            {-side - width, -side - height / 2},
                                            {-side - width, side - height / 2},
                                            {distance, -height / 2},
                                            {-distance - width, -height / 2},
                                            {-width / 2, -distance - height},
                                            {-width / 2, distance}}};
        for (const Point& corner : corners) {
          const Box box{mark.place.x + corner.x, mark.place.y + corner.y,
                        mark.place.x + corner.x + width, mark.place.y + corner.y + height};
          if (box.left < area.left + 2 || box.right > area.right - 2 || box.top < area.top + 2 ||
              box.bottom > area.bottom - 2)
            continue;
          double labels = 0;
          for (const Box& other : taken) labels += overlap(box, other);
          double cost = 20 * labels + 2 * distance;
          for (const Box& other : markers) cost += 8 * overlap(box, other);
          for (const Box& other : lines) cost += overlap(box, other);
          if (cost < best) {
            best = cost;
            covered = labels;
            away = distance;
            place = box;
          }
        }
      }
      // Words over words help nobody; the neighbours tell the order.
      if (!std::isfinite(best) || covered > 0.15 * width * height) continue;
      taken.push_back(place);
      if (away > 20) {
        const Point near{std::clamp(mark.place.x, place.left, place.right),
                         std::clamp(mark.place.y, place.top, place.bottom)};
        svg.line(mark.place, near, style_of(curve.key.method).colour, 0.6);
      }
      svg.text({place.left, place.bottom - 1.5}, mark.label, kSmall, "start",
               style_of(curve.key.method).colour, false, true);
    }
  }
}

}  // namespace

std::string kl_against_moved_chart(std::span<const EvalRow> rows, std::string title) {
  std::vector<const EvalRow*> used;
  for (const EvalRow& row : rows) {
    if (!row.text.empty() && row.method != "dense" && row.kl_mean >= 0 &&
        std::isfinite(row.kl_mean) && row.moved_fraction >= 0 && std::isfinite(row.moved_fraction))
      used.push_back(&row);
  }
  if (used.empty()) return nothing_chart(title, "no row has a divergence and a moved share");

  Dashes dashes;
  for (const EvalRow* row : used) dashes.add({row->method, variant(*row, used)});

  // The axis is for the methods, six decades at most; what lies below them, such as the rounding of
  // a reference, stands with the zeros.
  const bool only_references =
      std::all_of(used.begin(), used.end(), [](const EvalRow* row) { return is_reference(*row); });
  double y_top = 0;
  double y_least = std::numeric_limits<double>::infinity();
  double x_least = 1;
  bool unmoved = false;
  for (const EvalRow* row : used) {
    y_top = std::max({y_top, row->kl_mean, std::isfinite(row->kl_high) ? row->kl_high : 0.0});
    if (row->kl_mean > 0 && (only_references || !is_reference(*row)))
      y_least = std::min(y_least, row->kl_mean);
    if (row->moved_fraction > 0) x_least = std::min(x_least, row->moved_fraction);
    unmoved |= row->moved_fraction == 0;
  }
  LogAxis y_axis{1e-3, 1};
  if (y_top > 1e-30) {
    const double wanted = std::isfinite(y_least) ? y_least : y_top;
    y_axis = {round_tick(std::max(wanted * 0.9, y_top * 1e-6), false),
              round_tick(y_top * 1.02, true)};
    if (y_axis.high < y_axis.low * 9.9) y_axis.low = round_tick(y_axis.high / 10, false);
  }
  bool sunk = false;
  bool tiny = false;
  for (const EvalRow* row : used) {
    sunk |= row->kl_mean < y_axis.low;
    tiny |= row->kl_mean > 0 && row->kl_mean < y_axis.low;
  }
  x_least = std::max(x_least, 1e-6);
  LogAxis x_axis{round_tick(100 * x_least * 0.95, false), 0};
  double x_most = 0;
  for (const EvalRow* row : used) x_most = std::max(x_most, 100 * row->moved_fraction);
  x_axis.high = round_tick(std::max(x_most * 1.02, x_axis.low * 10), true);
  if (x_most > 0 && x_most <= 100) x_axis.high = std::min(x_axis.high, 100.0);
  if (x_axis.high <= x_axis.low * 1.5) x_axis.low = x_axis.high / 10;
  if (x_most == 0) x_axis = {1, 100};

  std::size_t columns = 1;
  const std::vector<KlPanel> panels = kl_panels(used, columns);

  Svg svg;
  svg.text({kMargin, 30}, title, 16, "start", kInk, true);
  const double grid_top = draw_legend(svg, dashes, 46) + 8;
  constexpr double left = 78;
  constexpr double gap = 16;
  const double panel_width = (kWidth - left - kMargin - gap * static_cast<double>(columns - 1)) /
                             static_cast<double>(columns);
  const double panel_height = columns == 1 ? 400 : columns == 2 ? 300 : 250;
  constexpr double title_height = 22;
  constexpr double ticks_height = 24;
  const std::size_t grid_rows = (panels.size() + columns - 1) / columns;
  const double row_height = title_height + panel_height + ticks_height;

  for (std::size_t index = 0; index < panels.size(); ++index) {
    const KlPanel& panel = panels[index];
    const std::size_t column = index % columns;
    const double x0 = left + static_cast<double>(column) * (panel_width + gap);
    const double y0 = grid_top + static_cast<double>(index / columns) * row_height + title_height;
    const Box area{x0, y0, x0 + panel_width, y0 + panel_height};
    // Zeros have a column and a band of their own beside the logarithmic part.
    const double zero_x = area.left + 26;
    const double plot_left = unmoved ? area.left + 52 : area.left + 10;
    const double plot_right = area.right - 10;
    const double zero_y = area.bottom - 12;
    const double plot_bottom = sunk ? area.bottom - 26 : area.bottom - 6;
    const double plot_top = area.top + 8;

    std::string heading = panel.title;
    const std::size_t fits = static_cast<std::size_t>(panel_width / (0.62 * kText));
    constexpr std::size_t kept = 8;
    if (heading.size() > fits && fits > kept + 3) {
      // The beginning says which model, the end tells its panels apart.
      heading =
          heading.substr(0, kept) + "..." + heading.substr(heading.size() - (fits - kept - 3));
    }
    svg.text({area.left, area.top - 7}, heading, kText, "start", kInk, true);

    for (const double tick : y_axis.ticks()) {
      const double y = y_axis.place(tick, plot_bottom, plot_top);
      svg.line({area.left, y}, {area.right, y}, kGrid, 1);
      if (column == 0) svg.text({area.left - 6, y + 4}, tick_label(tick), 11, "end", kFaint);
    }
    if (sunk && column == 0)
      svg.text({area.left - 6, zero_y + 4},
               tiny ? fmt::format("< {}", tick_label(y_axis.low)) : "0", 11, "end", kFaint);
    double last_label = -1e9;
    for (const double tick : x_axis.ticks()) {
      const double x = x_axis.place(tick, plot_left, plot_right);
      svg.line({x, area.top}, {x, area.bottom}, kGrid, 1);
      if (x - last_label < 28) continue;
      last_label = x;
      svg.text({x, area.bottom + 15}, tick_label(tick), 11, "middle", kFaint);
    }
    if (unmoved) {
      svg.line({plot_left - 8, area.top}, {plot_left - 8, area.bottom}, "#bbbbbb", 1, "3 3");
      svg.text({zero_x - 4, area.bottom + 15}, "0", 11, "middle", kFaint);
    }
    if (sunk)
      svg.line({area.left, plot_bottom + 4}, {area.right, plot_bottom + 4}, "#bbbbbb", 1, "3 3");
    svg.frame({area.left, area.top}, {area.right, area.bottom}, "#999999");

    Groups<CurveKey, const EvalRow*> groups;
    for (const EvalRow* row : panel.rows) groups[{row->method, variant(*row, used)}].push_back(row);
    // In the column of zeros the methods stand side by side.
    std::vector<CurveKey> still;
    for (const auto& [key, members] : groups) {
      if (std::any_of(members.begin(), members.end(),
                      [](const EvalRow* row) { return row->moved_fraction == 0; }))
        still.push_back(key);
    }
    std::vector<Curve> curves;
    for (const auto& [key, members] : groups) {
      std::vector<const EvalRow*> sorted = members;
      std::stable_sort(sorted.begin(), sorted.end(), [](const EvalRow* a, const EvalRow* b) {
        return a->moved_fraction < b->moved_fraction;
      });
      Curve curve{key, {}};
      for (const EvalRow* row : sorted) {
        Mark mark;
        if (row->moved_fraction == 0) {
          const double spread = std::min(9.0, 30.0 / static_cast<double>(still.size()));
          const auto place =
              std::distance(still.begin(), std::find(still.begin(), still.end(), key));
          mark.place.x =
              zero_x - 4 +
              spread * (static_cast<double>(place) - static_cast<double>(still.size() - 1) / 2);
        } else {
          mark.place.x =
              x_axis.place(std::max(100 * row->moved_fraction, x_axis.low), plot_left, plot_right);
        }
        const auto height = [&](double kl) {
          return kl < y_axis.low ? zero_y
                                 : y_axis.place(std::min(kl, y_axis.high), plot_bottom, plot_top);
        };
        mark.place.y = height(row->kl_mean);
        if (std::isfinite(row->kl_low) && std::isfinite(row->kl_high) &&
            row->kl_high >= y_axis.low) {
          mark.capped_low = row->kl_low >= y_axis.low;
          // An interval that reaches below the axis ends at its lower edge.
          mark.whisker_low = mark.capped_low ? height(row->kl_low)
                             : sunk          ? zero_y
                                             : plot_bottom + 6;
          mark.whisker_high = height(row->kl_high);
          mark.capped_high = row->kl_high <= y_axis.high;
        }
        mark.label = parameter_label(*row);
        curve.marks.push_back(std::move(mark));
      }
      curves.push_back(std::move(curve));
    }
    for (const Curve& curve : curves) {
      const Style style = style_of(curve.key.method);
      std::vector<Point> places;
      for (const Mark& mark : curve.marks) {
        places.push_back(mark.place);
        if (!mark.whisker_low || !mark.whisker_high) continue;
        const double x = mark.place.x;
        // Below its point an interval that goes on beyond the axis is dotted.
        svg.line({x, mark.place.y}, {x, *mark.whisker_high}, style.colour, 1);
        svg.line({x, *mark.whisker_low}, {x, mark.place.y}, style.colour, 1,
                 mark.capped_low ? "" : "1 4");
        if (mark.capped_low)
          svg.line({x - 3, *mark.whisker_low}, {x + 3, *mark.whisker_low}, style.colour, 1);
        if (mark.capped_high)
          svg.line({x - 3, *mark.whisker_high}, {x + 3, *mark.whisker_high}, style.colour, 1);
      }
      svg.polyline(places, style.colour, 1.8, dashes.of(curve.key));
    }
    for (const Curve& curve : curves) {
      for (const Mark& mark : curve.marks) draw_marker(svg, mark.place, style_of(curve.key.method));
    }
    draw_labels(svg, curves, area);
  }

  const double bottom = grid_top + static_cast<double>(grid_rows) * row_height;
  svg.upright_text({kMargin + 4, (grid_top + bottom) / 2},
                   "mean KL divergence from dense, nats per token", kText, kInk);
  svg.text({left + (kWidth - left - kMargin) / 2, bottom + 14}, "moved per step, % of the cache",
           kText, "middle", kInk);
  return svg.finish(kWidth, bottom + 28, title);
}

// ---- quality against rate ----

namespace {

struct QualityPoint {
  double rate = 1;
  double quality = 0;  // % of dense
  bool complete = true;
};

struct QualityLine {
  CurveKey key;
  bool reference = false;
  std::vector<QualityPoint> points;
};

struct QualityPanel {
  std::string title;
  std::size_t tasks = 0;
  std::vector<QualityLine> lines;
};

// Tasks of the panel that the dense model solves at least half of.
std::set<std::string> solvable_tasks(const std::vector<const EvalRow*>& rows) {
  std::map<std::string, std::pair<double, double>> sums;
  for (const EvalRow* row : rows) {
    auto& [sum, count] = sums[row->task];
    sum += row->score_dense;
    count += 1;
  }
  std::set<std::string> tasks;
  for (const auto& [task, sum] : sums) {
    if (sum.first / sum.second >= 0.5) tasks.insert(task);
  }
  return tasks;
}

QualityPanel quality_panel(std::string title, const std::vector<const EvalRow*>& rows) {
  QualityPanel panel{std::move(title), 0, {}};
  const std::set<std::string> tasks = solvable_tasks(rows);
  panel.tasks = tasks.size();
  Groups<CurveKey, const EvalRow*> groups;
  for (const EvalRow* row : rows) {
    if (!tasks.contains(row->task) || row->method == "dense" || !(row->score_dense > 0)) continue;
    std::string detail = parameter_label(*row);
    const std::string rest = variant(*row, rows);
    if (!rest.empty()) detail += (detail.empty() ? "" : ", ") + rest;
    groups[{row->method, detail}].push_back(row);
  }
  for (const auto& [key, members] : groups) {
    QualityLine line{key, true, {}};
    std::map<double, std::map<std::string, std::pair<double, double>>> sums;  // by rate and task
    for (const EvalRow* row : members) {
      line.reference = line.reference && is_reference(*row);
      auto& [sum, count] = sums[is_reference(*row) ? 1 : 1 / row->keep][row->task];
      sum += 100 * row->score / row->score_dense;
      count += 1;
    }
    for (const auto& [rate, by_task] : sums) {
      QualityPoint point{rate, 0, by_task.size() == tasks.size()};
      for (const auto& [task, sum] : by_task)
        point.quality += sum.first / sum.second / static_cast<double>(by_task.size());
      line.points.push_back(point);
    }
    panel.lines.push_back(std::move(line));
  }
  std::stable_sort(panel.lines.begin(), panel.lines.end(),
                   [](const QualityLine& a, const QualityLine& b) {
                     return style_place(a.key.method) < style_place(b.key.method);
                   });
  return panel;
}

}  // namespace

std::string quality_against_rate_chart(std::span<const EvalRow> rows, std::string title) {
  struct Source {
    std::string model;
    std::int64_t context;
    bool operator==(const Source&) const = default;
  };
  Groups<Source, const EvalRow*> sources;
  for (const EvalRow& row : rows) {
    if (!row.task.empty() && std::isfinite(row.score) && std::isfinite(row.score_dense))
      sources[{row.model, row.context_tokens}].push_back(&row);
  }
  std::vector<QualityPanel> panels;
  Dashes dashes;
  std::set<double> rates;
  double low = 100;
  double high = 100;
  bool hollow = false;
  for (const auto& [source, members] : sources) {
    std::string name = source.model;
    if (source.context > 0)
      name += source.context % 1024 == 0 ? fmt::format(", {}K", source.context / 1024)
                                         : fmt::format(", {}", source.context);
    QualityPanel panel = quality_panel(std::move(name), members);
    if (panel.lines.empty()) continue;
    for (const QualityLine& line : panel.lines) {
      dashes.add(line.key);
      for (const QualityPoint& point : line.points) {
        if (!line.reference) rates.insert(point.rate);
        low = std::min(low, point.quality);
        high = std::max(high, point.quality);
        hollow |= !point.complete;
      }
    }
    panels.push_back(std::move(panel));
  }
  if (panels.empty())
    return nothing_chart(title, "no row has a score on a task that the dense model solves");
  if (rates.empty()) rates.insert(1);

  low = std::max(0.0, std::floor((low - 2) / 10) * 10);
  high = std::max(105.0, std::ceil((high + 1) / 5) * 5);
  const double step = high - low > 60   ? 20 * std::ceil((high - low) / 200)
                      : high - low > 25 ? 10
                                        : 5;

  Svg svg;
  svg.text({kMargin, 30}, title, 16, "start", kInk, true);
  const std::size_t columns = std::min<std::size_t>(panels.size(), 2);
  constexpr double left = 70;
  constexpr double gap = 20;
  constexpr double grid_top = 44;
  constexpr double title_height = 22;
  constexpr double ticks_height = 26;
  const double panel_width = (kWidth - left - kMargin - gap * static_cast<double>(columns - 1)) /
                             static_cast<double>(columns);
  std::size_t most_lines = 0;
  std::size_t longest = 0;
  for (const QualityPanel& panel : panels) {
    most_lines = std::max(most_lines, panel.lines.size() + 1);
    for (const QualityLine& line : panel.lines)
      longest = std::max(longest, line.key.label().size());
  }
  constexpr double label_step = 13;
  const double panel_height =
      std::max(columns == 1 ? 380.0 : 300.0, 20 + label_step * static_cast<double>(most_lines));
  const double row_height = title_height + panel_height + ticks_height;
  const double label_width =
      std::min(panel_width * 0.5, 24 + text_width(std::string(longest, 'x'), kSmall + 1));

  for (std::size_t index = 0; index < panels.size(); ++index) {
    const QualityPanel& panel = panels[index];
    const std::size_t column = index % columns;
    const double x0 = left + static_cast<double>(column) * (panel_width + gap);
    const double y0 = grid_top + static_cast<double>(index / columns) * row_height + title_height;
    const Box area{x0, y0, x0 + panel_width - label_width, y0 + panel_height};
    svg.text({area.left, area.top - 7},
             fmt::format("{} ({} task{})", panel.title, panel.tasks, panel.tasks == 1 ? "" : "s"),
             kText, "start", kInk, true);
    const auto height = [&](double quality) {
      return area.bottom - (quality - low) / (high - low) * (area.bottom - area.top);
    };
    const LogAxis axis{*rates.begin(), rates.size() > 1 ? *rates.rbegin() : *rates.begin() * 2};
    const auto place = [&](double rate) {
      return rates.size() == 1 ? (area.left + area.right) / 2
                               : axis.place(rate, area.left + 22, area.right - 22);
    };
    for (double tick = std::ceil(low / step) * step; tick <= high; tick += step) {
      svg.line({area.left, height(tick)}, {area.right, height(tick)},
               tick == 100 ? "#777777" : kGrid, 1);
      if (column == 0)
        svg.text({area.left - 6, height(tick) + 4}, fmt::format("{:.0f}", tick), 11, "end", kFaint);
    }
    double last_label = -1e9;
    for (const double rate : rates) {
      svg.line({place(rate), area.top}, {place(rate), area.bottom}, kGrid, 1);
      if (place(rate) - last_label < 30) continue;
      last_label = place(rate);
      std::string label = rate_label(1 / rate);
      if (label.starts_with("keep")) label = fmt::format("{:.3g}x", rate);
      svg.text({place(rate), area.bottom + 16}, label, 11, "middle", kFaint);
    }
    svg.frame({area.left, area.top}, {area.right, area.bottom}, "#999999");

    // At the right end, each line says its name; names are pushed apart until none overlap.
    struct End {
      double y;
      double wanted;
      double x;
      std::string label;
      const char* colour;
    };
    std::vector<End> ends{{height(100), height(100), area.right, "dense", "#777777"}};
    for (const QualityLine& line : panel.lines) {
      const Style style = style_of(line.key.method);
      std::vector<Point> points;
      if (line.reference) {
        const double y = height(line.points.front().quality);
        points = {{area.left, y}, {area.right, y}};
      } else {
        for (const QualityPoint& point : line.points)
          points.push_back({place(point.rate), height(point.quality)});
      }
      svg.polyline(points, style.colour, 1.8, line.reference ? "2 3" : dashes.of(line.key));
      ends.push_back(
          {points.back().y, points.back().y, points.back().x, line.key.label(), style.colour});
    }
    for (const QualityLine& line : panel.lines) {
      if (line.reference) continue;
      for (const QualityPoint& point : line.points)
        draw_marker(svg, {place(point.rate), height(point.quality)}, style_of(line.key.method),
                    !point.complete);
    }
    std::stable_sort(ends.begin(), ends.end(),
                     [](const End& a, const End& b) { return a.wanted < b.wanted; });
    for (std::size_t i = 0; i < ends.size(); ++i) {
      ends[i].y = std::max(ends[i].y, i == 0 ? area.top + 4 : ends[i - 1].y + label_step);
    }
    for (std::size_t i = ends.size(); i-- > 0;) {
      ends[i].y =
          std::min(ends[i].y, i + 1 == ends.size() ? area.bottom - 2 : ends[i + 1].y - label_step);
    }
    for (const End& end : ends) {
      svg.line({end.x + (end.x < area.right ? 6 : 0), end.wanted}, {area.right + 12, end.y},
               end.colour, 0.8);
      svg.text({area.right + 16, end.y + 4}, end.label, kSmall + 1, "start", end.colour);
    }
  }

  const std::size_t grid_rows = (panels.size() + columns - 1) / columns;
  double bottom = grid_top + static_cast<double>(grid_rows) * row_height;
  svg.upright_text({kMargin + 4, (grid_top + bottom) / 2}, "score, % of dense", kText, kInk);
  svg.text({kWidth / 2, bottom + 14}, "rate: tokens in the cache for each resident one", kText,
           "middle", kInk);
  bottom += 34;
  svg.text({kMargin, bottom},
           fmt::format("Mean over the tasks that the dense model solves at least half of.{}",
                       hollow ? " Hollow: not all of them were measured." : ""),
           11, "start", kFaint);
  return svg.finish(kWidth, bottom + 12, title);
}

}  // namespace verkv::llm
