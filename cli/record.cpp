#include "cli/record.h"

#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/accelerator.h"
#include "bench/text_file.h"
#include "cadre/error.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

using Json = nlohmann::ordered_json;

/// A word as a shell takes it: in quotes where it has characters that a shell may read.
std::string shell_word(const std::string& word) {
  constexpr const char* kPlain =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_=:.,/+- ";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos)
    return word.find(' ') == word.npos ? word : '"' + word + '"';
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

double rounded(double value) { return std::round(value * 1000) / 1000; }

void add_work(const bench::Measurement& m, Json& row) {
  row["flops"] = m.flops;
  row["bytes"] = m.bytes;
  if (m.is_of_ranks) {
    row["delivered_bytes"] = m.delivered_bytes;
    row["crossed_bytes"] = m.crossed_bytes;
  } else if (m.call.empty()) {
    row["error_of_bound"] = rounded(m.check.error_of_bound);
    row["checked_rows"] = m.checked_rows;
  } else {
    row["kept_bytes"] = m.kept_bytes;
    row["workspace_bytes"] = m.workspace_bytes;
  }
  if (m.checked_elements) row["checked_elements"] = m.checked_elements;
}

Json one_case(const Case& c) {
  const bench::Measurement& m = c.measured;
  Json us = Json::object(), p10 = us, p90 = us, speed = us, peers = us;
  Json joules = us, watts = us, sm_mhz = us;
  for (const bench::Timing& t : m.timings) {
    us[t.name] = rounded(t.us.median);
    p10[t.name] = rounded(t.us.p10);
    p90[t.name] = rounded(t.us.p90);
    if (t.sm_mhz > 0) {
      joules[t.name] = t.joules;
      watts[t.name] = rounded(t.watts);
      sm_mhz[t.name] = t.sm_mhz;
    }
    if (t.name == "cadre") continue;
    speed[t.name] = rounded(t.speed);
    peers[t.name] = t.what;
  }
  Json row = {{"problem", m.problem}, {"routing", c.routing}};
  if (!c.layer.empty()) row["layer"] = c.layer;
  if (!m.call.empty()) row["call"] = m.call;
  row["us"] = us;
  row["us_p10"] = p10;
  row["us_p90"] = p90;
  row["speed_of_peer"] = speed;
  row["peers"] = peers;
  if (!joules.empty()) {
    row["joules"] = joules;
    row["watts"] = watts;
    row["sm_mhz"] = sm_mhz;
  }
  add_work(m, row);
  row["plan"] = m.plan;
  return row;
}

Json one_case(const HostCase& c) {
  const bench::HostTime& m = c.measured;
  Json row = {{"problem", m.problem}};
  if (!c.layer.empty()) row["layer"] = c.layer;
  row["call"] = m.call;
  row["host_us"] = rounded(m.us.median);
  row["host_us_p10"] = rounded(m.us.p10);
  row["host_us_p90"] = rounded(m.us.p90);
  row["calls"] = m.calls;
  row["plan"] = m.plan;
  return row;
}

Json one_case(const bench::Fact& f) {
  Json row = {{"name", f.name}, {"value", rounded(f.value)}};
  if (!f.unit.empty()) row["unit"] = f.unit;
  row["how"] = f.how;
  return row;
}

template <class AnyCase>
Json record_of(const char* list_name, const std::vector<AnyCase>& cases,
               const std::string& machine) {
  Json list = Json::array();
  for (const AnyCase& c : cases) list.push_back(one_case(c));
  return {{"command", command_line()},
          {"machine", machine},
          {"date", now()},
          {"commit", commit()},
          {list_name, list}};
}

}  // namespace

std::string machine(const Device& device) {
  if (const auto accelerator = bench::open_accelerator(device)) return accelerator->name();
  std::ifstream cpus("/proc/cpuinfo");
  std::string name = "unknown CPU";
  for (std::string line; std::getline(cpus, line);)
    if (line.rfind("model name", 0) == 0) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  return text(name, ", ", device.units, " threads");
}

std::string now() {
  const std::time_t time = std::time(nullptr);
  char words[32];
  std::strftime(words, sizeof words, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&time));
  return words;
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string all;
  for (std::string word; std::getline(file, word, '\0');) {
    if (all.empty()) word = word.substr(word.rfind('/') + 1);
    if (!all.empty()) all += ' ';
    all += shell_word(word);
  }
  return all;
}

Json record(const std::vector<Case>& cases, const std::string& machine) {
  return record_of("cases", cases, machine);
}
Json record(const std::vector<HostCase>& cases, const std::string& machine) {
  return record_of("cases", cases, machine);
}

Json record(const std::vector<bench::Fact>& facts, const std::string& machine) {
  return record_of("facts", facts, machine);
}

std::ofstream open_record(std::string_view verb, const std::string& path) {
  std::ofstream file = bench::open_to_write(path);
  if (!file.is_open())
    throw UsageError(
        text(verb, ": '", path, "' cannot be written; give --json a path that can be"));
  return file;
}

void write_record(std::string_view verb, const std::string& path, std::ofstream& file,
                  const Json& json) {
  std::error_code no_regular_file;
  std::filesystem::resize_file(path, 0, no_regular_file);
  const std::string words = json.dump(1, ' ', false, Json::error_handler_t::replace);
  if (!(file << words << "\n").flush())
    throw UsageError(text(verb, ": '", path, "' could not be written; is the disk full?"));
}

}  // namespace cadre::cli
