#include "apps/train/chart.h"

#include <algorithm>
#include <cmath>

#include "apps/train/number_text.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

struct Span {
  double low = 1e300, high = -1e300;
  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

/// Where the numbers of a chart lie on its canvas.
struct Frame {
  static constexpr double kWidth = 720, kHeight = 330;
  static constexpr double kLeft = 56, kRight = 132, kTop = 36, kBottom = 44;
  Span x, y;

  double at_x(double value) const {
    return kLeft + (value - x.low) / (x.high - x.low) * (kWidth - kLeft - kRight);
  }
  double at_y(double value) const {
    return kHeight - kBottom - (value - y.low) / (y.high - y.low) * (kHeight - kTop - kBottom);
  }
};

Frame frame_of(const LineChart& chart) {
  Frame frame;
  for (const Curve& curve : chart.curves) {
    for (const double x : curve.x) frame.x.take(x);
    for (const double y : curve.y) frame.y.take(std::min(y, chart.y_most));
  }
  for (const Level& level : chart.levels) frame.y.take(level.y);
  if (frame.x.empty()) frame.x = {0, 1};
  if (frame.y.empty()) frame.y = {0, 1};
  if (frame.x.low == frame.x.high) frame.x.high += 1;
  const double margin = std::max(1e-9, 0.06 * (frame.y.high - frame.y.low));
  frame.y.low -= margin;
  frame.y.high += margin;
  return frame;
}

std::string label(double x, double y, const char* anchor, std::string_view words) {
  return text("<text x='", fixed(x, 1), "' y='", fixed(y, 1), "' text-anchor='", anchor, "'>",
              escaped(words), "</text>");
}

std::string number(double value) {
  std::string digits = fixed(value, 3);
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  return digits == "-0" ? "0" : digits;
}

std::string axes(const LineChart& chart, const Frame& frame) {
  const double left = Frame::kLeft, right = Frame::kWidth - Frame::kRight;
  const double bottom = Frame::kHeight - Frame::kBottom;
  std::string out;
  for (const double y : ticks(frame.y.low, frame.y.high, 6)) {
    const std::string at = fixed(frame.at_y(y), 1);
    out +=
        text("<line class='grid' x1='", left, "' x2='", right, "' y1='", at, "' y2='", at, "'/>");
    out += label(left - 8, frame.at_y(y) + 4, "end", number(y));
  }
  for (const double x : ticks(frame.x.low, frame.x.high, 6)) {
    if (x != std::round(x)) continue;  // steps are whole
    out += label(frame.at_x(x), bottom + 18, "middle", number(x));
  }
  out += text("<line class='axis' x1='", left, "' x2='", right, "' y1='", bottom, "' y2='", bottom,
              "'/>");
  out += label((left + right) / 2, bottom + 37, "middle", "steps");
  out += label(0, 14, "start", chart.y_name);
  return out;
}

std::string path_of(const Curve& curve, const Frame& frame, double y_most) {
  std::string path;
  for (size_t i = 0; i < curve.x.size(); ++i) {
    if (!std::isfinite(curve.y[i]) || curve.y[i] > y_most) continue;
    path += text(path.empty() ? 'M' : 'L', fixed(frame.at_x(curve.x[i]), 1), ' ',
                 fixed(frame.at_y(curve.y[i]), 1));
  }
  return path;
}

/// `over` curves with points lie above this one.
std::string drawn(const Curve& curve, const Frame& frame, double y_most, size_t over) {
  const double width = curve.style == CurveStyle::kPoints ? 2 + 1.6 * static_cast<double>(over) : 2;
  const bool faint = curve.style == CurveStyle::kFaint;
  std::string out = text("<path class='curve c", curve.color, faint ? " faint'" : "'");
  if (!faint) out += text(" stroke-width='", fixed(width, 1), "'");
  out += text(" d='", path_of(curve, frame, y_most), "'/>");
  if (curve.style != CurveStyle::kPoints) return out;
  for (size_t i = 0; i < curve.x.size(); ++i) {
    if (!std::isfinite(curve.y[i]) || curve.y[i] > y_most) continue;
    out += text("<circle class='dot c", curve.color, "' cx='", fixed(frame.at_x(curve.x[i]), 1),
                "' cy='", fixed(frame.at_y(curve.y[i]), 1), "' r='", fixed(2 + width / 2, 1),
                "'><title>", escaped(curve.name), ", step ", number(curve.x[i]), ": ",
                number(curve.y[i]), "</title></circle>");
  }
  return out;
}

/// A name beside the right end of a curve or level.
struct EndLabel {
  double y = 0;
  std::string name, classes;
};

/// Moves labels that overlap apart, each as far as its neighbour, within the drawing.
void spread(std::vector<EndLabel>& labels) {
  constexpr double kLine = 15;
  std::stable_sort(labels.begin(), labels.end(),
                   [](const EndLabel& a, const EndLabel& b) { return a.y < b.y; });
  for (int round = 0; round < 100; ++round) {
    for (size_t i = 1; i < labels.size(); ++i) {
      const double overlap = kLine - (labels[i].y - labels[i - 1].y);
      if (overlap <= 0) continue;
      labels[i - 1].y -= overlap / 2;
      labels[i].y += overlap / 2;
    }
    if (!labels.empty()) {
      labels.back().y = std::min(labels.back().y, Frame::kHeight - Frame::kBottom - 6);
    }
  }
}

std::string end_labels(const LineChart& chart, const Frame& frame) {
  std::vector<EndLabel> labels;
  for (const Curve& curve : chart.curves) {
    if (curve.style == CurveStyle::kFaint || curve.y.empty() || !std::isfinite(curve.y.back())) {
      continue;
    }
    labels.push_back({frame.at_y(std::min(curve.y.back(), chart.y_most)), curve.name,
                      text("name c", curve.color)});
  }
  for (const Level& level : chart.levels) labels.push_back({frame.at_y(level.y), level.name, ""});
  spread(labels);
  std::string out;
  for (const EndLabel& each : labels) {
    out += text("<g class='", each.classes, "'>",
                label(Frame::kWidth - Frame::kRight + 10, each.y + 4, "start", each.name), "</g>");
  }
  return out;
}

std::string open_svg(std::string_view title, double width, double height) {
  return text("<svg viewBox='0 0 ", width, ' ', height, "' role='img' aria-label='", escaped(title),
              "'><title>", escaped(title), "</title>");
}

}  // namespace

std::string escaped(std::string_view words) {
  std::string out;
  for (const char c : words) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::vector<double> ticks(double low, double high, int count) {
  if (!(high > low) || count < 1) return {low};
  const double rough = (high - low) / count, power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> values;
  for (double i = std::ceil(low / step); i * step <= high * (1 + 1e-12); ++i) {
    values.push_back(i * step);
    if (values.size() > 100) break;
  }
  return values;
}

std::string svg(const LineChart& chart) {
  const Frame frame = frame_of(chart);
  const double left = Frame::kLeft, right = Frame::kWidth - Frame::kRight;
  std::string out = open_svg(chart.title, Frame::kWidth, Frame::kHeight);
  out += axes(chart, frame);
  for (const Level& level : chart.levels) {
    const std::string at = fixed(frame.at_y(level.y), 1);
    out +=
        text("<line class='level' x1='", left, "' x2='", right, "' y1='", at, "' y2='", at, "'/>");
  }
  auto over = static_cast<size_t>(
      std::count_if(chart.curves.begin(), chart.curves.end(),
                    [](const Curve& each) { return each.style == CurveStyle::kPoints; }));
  for (const Curve& curve : chart.curves) {
    over -= curve.style == CurveStyle::kPoints;
    out += drawn(curve, frame, chart.y_most, over);
  }
  return out + end_labels(chart, frame) + "</svg>";
}

std::string svg(const HeatMap& map) {
  constexpr double kCellWidth = 7, kLeft = 22;
  const double height = map.rows > 32 ? 4 : 13;
  const double width = kLeft + kCellWidth * static_cast<double>(map.columns);
  const double bottom = height * static_cast<double>(map.rows);
  std::string out = open_svg(map.title, width, bottom + 14);
  out += label(kLeft, bottom + 11, "start", "step 1");
  out += label(width, bottom + 11, "end", std::to_string(map.steps));
  for (int64_t row = 0; row < map.rows; ++row) {
    const double y = height * static_cast<double>(row);
    if (map.rows <= 32) out += label(kLeft - 6, y + 10, "end", std::to_string(row));
    for (int64_t column = 0; column < map.columns; ++column) {
      const double share = map.share[row * map.columns + column];
      if (!std::isfinite(share)) continue;
      const double far = share <= 0 ? -1 : std::clamp(std::log2(share), -1.0, 1.0);
      out += text("<rect class='", far < 0 ? "under" : "over", "' x='",
                  kLeft + kCellWidth * static_cast<double>(column), "' y='", y, "' width='",
                  kCellWidth - 0.5, "' height='", height - 1, "' fill-opacity='",
                  fixed(std::abs(far), 2), "'><title>expert ", row, ": ", fixed(share, 2),
                  " of an even share</title></rect>");
    }
  }
  return out + "</svg>";
}

}  // namespace cadre::train
