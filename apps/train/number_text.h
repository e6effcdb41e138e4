#pragma once
#include <cstdint>
#include <string>

namespace cadre::train {

/// "2.264": a fixed number of digits behind the point, whatever the locale.
std::string fixed(double value, int digits);

/// "+0.4 %", "-39.5 %".
std::string signed_percent(double ratio);

/// "1,234,567".
std::string thousands(int64_t count);

/// "0:07", "12:30", "3:05:00".
std::string duration(double seconds);

}  // namespace cadre::train
