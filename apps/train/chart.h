#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cadre::train {

enum class CurveStyle : uint8_t {
  kPoints,  ///< a line with its points
  kLine,    ///< a line with its name
  kFaint,   ///< in the background, without a name
};

/// One curve of a chart. `color` is the number of a colour of the page.
struct Curve {
  std::string name;
  int color = 0;
  CurveStyle style = CurveStyle::kPoints;
  std::vector<double> x, y;
};

/// A horizontal line with its name.
struct Level {
  std::string name;
  double y = 0;
};

/// Curves over steps. Everything that is not finite is left out. Of curves with points each lies
/// thinner on the one before, so that equal ones are seen.
struct LineChart {
  std::string title, y_name;
  std::vector<Curve> curves;
  std::vector<Level> levels;
  double y_most = 1e300;  ///< curves are cut off above
};

/// The chart as inline SVG, coloured by the page's style sheet.
std::string svg(const LineChart&);

/// Shares of the experts over a run: 1 is an even share.
struct HeatMap {
  std::string title;
  int64_t rows = 0, columns = 0, steps = 0;
  std::vector<double> share;  ///< [rows, columns]: experts, stretches of the steps
};

/// The map as inline SVG: an even share has no colour, twice and half of it are the two extremes.
std::string svg(const HeatMap&);

/// Text in which no character means anything to HTML.
std::string escaped(std::string_view);

/// Round numbers that span [low, high], about `count` of them.
std::vector<double> ticks(double low, double high, int count);

}  // namespace cadre::train
