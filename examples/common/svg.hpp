// The few shapes that a chart needs, as SVG text.
#ifndef VERKV_EXAMPLES_COMMON_SVG_HPP
#define VERKV_EXAMPLES_COMMON_SVG_HPP

#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace verkv::examples {

struct Point {
  double x = 0;
  double y = 0;
};

// Coordinates are pixels from the top left; colours are those of SVG. Text is escaped, and what is
// not ASCII becomes a question mark.
class Svg {
 public:
  // dash: of stroke-dasharray, empty for none.
  void line(Point a, Point b, const char* colour, double width, std::string_view dash = {}) {
    body_ += fmt::format(
        R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}" stroke-width="{}"{}/>)"
        "\n",
        a.x, a.y, b.x, b.y, colour, width, dash_attribute(dash));
  }

  void polyline(const std::vector<Point>& points, const char* colour, double width,
                std::string_view dash = {}) {
    if (points.size() < 2) return;
    body_ += fmt::format(R"(<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" )"
                         R"(stroke-linejoin="round"{}/>)"
                         "\n",
                         places(points), colour, width, dash_attribute(dash));
  }

  void polygon(const std::vector<Point>& points, const char* fill, const char* stroke = "none",
               double width = 0) {
    body_ += fmt::format(R"(<polygon points="{}" fill="{}" stroke="{}" stroke-width="{}"/>)"
                         "\n",
                         places(points), fill, stroke, width);
  }

  void circle(Point p, double radius, const char* fill, const char* stroke, double width) {
    body_ += fmt::format(
        R"(<circle cx="{:.1f}" cy="{:.1f}" r="{}" fill="{}" stroke="{}" stroke-width="{}"/>)"
        "\n",
        p.x, p.y, radius, fill, stroke, width);
  }

  void frame(Point top_left, Point bottom_right, const char* colour) {
    body_ += fmt::format(
        R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="none" stroke="{}"/>)"
        "\n",
        top_left.x, top_left.y, bottom_right.x - top_left.x, bottom_right.y - top_left.y, colour);
  }

  // p: on the baseline. anchor: start, middle or end. halo: keeps it readable where it crosses
  // lines.
  void text(Point p, std::string_view words, double size, const char* anchor, const char* colour,
            bool bold = false, bool halo = false) {
    body_ += fmt::format(
        R"(<text x="{:.1f}" y="{:.1f}" font-size="{}" text-anchor="{}" fill="{}"{}{}>{}</text>)"
        "\n",
        p.x, p.y, size, anchor, colour, bold ? R"( font-weight="bold")" : "",
        halo ? R"( stroke="white" stroke-width="2.5" stroke-linejoin="round" paint-order="stroke")"
             : "",
        escaped(words));
  }

  // Reads from bottom to top; p is its middle.
  void upright_text(Point p, std::string_view words, double size, const char* colour) {
    body_ +=
        fmt::format(R"-(<text transform="translate({:.1f},{:.1f}) rotate(-90)" font-size="{}" )-"
                    R"-(text-anchor="middle" fill="{}">{}</text>)-"
                    "\n",
                    p.x, p.y, size, colour, escaped(words));
  }

  // The document, on white.
  std::string finish(double width, double height, std::string_view title) const {
    return fmt::format(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" )"
                       R"(width="{0:.0f}" height="{1:.0f}" )"
                       R"(role="img" font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif">)"
                       "\n<title>{2}</title>\n"
                       R"(<rect width="100%" height="100%" fill="white"/>)"
                       "\n{3}</svg>\n",
                       width, height, escaped(title), body_);
  }

 private:
  static std::string places(const std::vector<Point>& points) {
    std::string text;
    for (const Point& p : points)
      text += fmt::format("{}{:.1f},{:.1f}", text.empty() ? "" : " ", p.x, p.y);
    return text;
  }

  static std::string dash_attribute(std::string_view dash) {
    return dash.empty() ? "" : fmt::format(R"( stroke-dasharray="{}")", dash);
  }

  static std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
      switch (c) {
        case '&':
          result += "&amp;";
          break;
        case '<':
          result += "&lt;";
          break;
        case '>':
          result += "&gt;";
          break;
        case '"':
          result += "&quot;";
          break;
        default:
          result += c >= ' ' && c <= '~' ? c : '?';
      }
    }
    return result;
  }

  std::string body_;
};

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_SVG_HPP
