#include <algorithm>
#include <cmath>

#include "apps/train/chart.h"
#include "apps/train/number_text.h"
#include "apps/train/page_style.h"
#include "apps/train/result.h"
#include "apps/train/utf8.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

constexpr int kColors = 8;
constexpr double kBitsPerNat = 1.4426950408889634;
constexpr std::string_view kFirstWords =
    "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
    "content='width=device-width, initial-scale=1'><title>cadre train</title>";

std::string element(std::string_view tag, std::string_view content) {
  return text('<', tag, '>', content, "</", tag.substr(0, tag.find(' ')), '>');
}

/// Mean training losses of about `points` stretches, each placed at the step at which it ends.
Curve smoothed(const RunResult& run, int color, size_t points) {
  Curve curve{run.recipe, color, CurveStyle::kFaint, {}, {}};
  const std::vector<double>& loss = run.history.loss;
  const size_t width = std::max<size_t>(1, loss.size() / points);
  for (size_t first = 0; first + width <= loss.size(); first += width) {
    double sum = 0;
    for (size_t i = first; i < first + width; ++i) sum += loss[i];
    curve.x.push_back(static_cast<double>(first + width));
    curve.y.push_back(sum / static_cast<double>(width) * kBitsPerNat);
  }
  return curve;
}

Curve held_curve(const RunResult& run, int color) {
  Curve curve{run.recipe, color, CurveStyle::kPoints, {}, {}};
  for (const int64_t step : run.history.eval_step) curve.x.push_back(static_cast<double>(step));
  curve.y = run.history.eval_bits;
  return curve;
}

std::string learning_chart(const TextFacts& facts, const std::vector<RunResult>& runs) {
  LineChart chart{"Bits per byte over the steps", "bits per byte", {}, {}, 0};
  chart.levels = {{"bigram entropy", facts.bigram_bits}};
  chart.y_most = facts.bigram_bits > 0 ? std::min(8.0, 1.5 * facts.bigram_bits) : 8.0;
  for (size_t i = 0; i < runs.size(); ++i) {
    chart.curves.push_back(smoothed(runs[i], static_cast<int>(i) % kColors, 100));
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    chart.curves.push_back(held_curve(runs[i], static_cast<int>(i) % kColors));
  }
  return svg(chart);
}

/// How far curves of the other runs lie above that of the first, in percent: `curve(run, color)`.
template <class MakeCurve>
std::string gap_chart(const char* what, const std::vector<RunResult>& runs, MakeCurve&& curve_of) {
  const std::string& first = runs[0].recipe;
  LineChart chart{text(what, " above ", first), text("% above ", first), {}, {{first, 0}}, 1e300};
  const Curve base = curve_of(runs[0], 0);
  for (size_t i = 1; i < runs.size(); ++i) {
    Curve curve = curve_of(runs[i], static_cast<int>(i) % kColors);
    for (size_t at = 0; at < std::min(curve.y.size(), base.y.size()); ++at) {
      curve.y[at] = 100 * above(curve.y[at], base.y[at]);
    }
    chart.curves.push_back(std::move(curve));
  }
  return svg(chart);
}

std::string gap_section(const std::vector<RunResult>& runs) {
  const std::string first = escaped(runs[0].recipe);
  const auto training = [](const RunResult& run, int color) {
    Curve curve = smoothed(run, color, 20);
    curve.style = CurveStyle::kLine;
    return curve;
  };
  return text(
      "<h2>What the formats cost</h2><p class='quiet'>Bits per byte of the held-out text, "
      "in percent above those of ",
      first, " after as many steps.</p>",
      element("figure", gap_chart("Held-out bits per byte", runs, held_curve)),
      "<p class='quiet'>The same of the training loss, on the same batches, which jumps "
      "from batch to batch.</p>",
      element("figure", gap_chart("Training loss", runs, training)));
}

std::string cards(const TextFacts& facts, const std::vector<RunResult>& runs) {
  std::string out;
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunResult& run = runs[i];
    const double below = -above(run.bits(), facts.bigram_bits);
    out += text("<div class='card k", i % kColors, "'><h3>", escaped(run.recipe),
                "</h3><p class='big'>", fixed(run.bits(), 3), "<small> bits/byte</small></p>");
    if (std::isfinite(below)) {
      out += text("<p>", fixed(100 * std::abs(below), 1), " % ", below >= 0 ? "below" : "above",
                  " the bigram entropy</p>");
    }
    out += text("<p class='quiet'>",
                i == 0 ? "the measure of the others"
                       : signed_percent(above(run.bits(), runs[0].bits())) + " against " +
                             escaped(runs[0].recipe),
                "</p></div>");
  }
  return element("div class='cards'", out);
}

std::string run_table(const TextFacts& facts, const std::vector<RunResult>& runs) {
  std::string rows =
      "<tr><th>recipe<th>held-out bits/byte<th>against bigram<th>against first<th>rows/s"
      "<th>time<th>resumed run</tr>";
  for (const RunResult& run : runs) {
    const bool timed = run.steps_here > 0;
    rows += text("<tr><td>", escaped(run.recipe), "<td>", fixed(run.bits(), 4), "<td>",
                 signed_percent(above(run.bits(), facts.bigram_bits)), "<td>",
                 signed_percent(above(run.bits(), runs[0].bits())), "<td>",
                 timed ? thousands(static_cast<int64_t>(run.rows_per_second())) : "–", "<td>",
                 timed ? duration(run.seconds) : "–", "<td>",
                 !run.resumes_equal   ? "not asked"
                 : *run.resumes_equal ? "equal bits"
                                      : "DIFFERS",
                 "</tr>");
  }
  return "<div class='wide'>" + element("table", rows) + "</div>";
}

/// Which implementations every recipe ran in.
std::string plan_list(const std::vector<RunResult>& runs) {
  std::string items;
  for (const RunResult& run : runs) {
    items += element("li", text(element("b", escaped(run.recipe)), " on ", escaped(run.device),
                                ": ", escaped(run.plans)));
  }
  return element("ul class='quiet'", items);
}

HeatMap load_of(const RunResult& run, int64_t block) {
  const Settings& s = run.settings;
  HeatMap map{text(run.recipe, ", block ", block), s.experts, kLoadBins, s.steps, {}};
  map.share.resize(s.experts * kLoadBins);
  for (int64_t bin = 0; bin < kLoadBins; ++bin) {
    const int64_t* counts = &run.history.load[(bin * s.blocks + block) * s.experts];
    double rows = 0;
    for (int64_t e = 0; e < s.experts; ++e) rows += static_cast<double>(counts[e]);
    for (int64_t e = 0; e < s.experts; ++e) {
      const double even = rows / static_cast<double>(s.experts);
      map.share[e * kLoadBins + bin] = static_cast<double>(counts[e]) / even;  // no rows: NaN
    }
  }
  return map;
}

std::string load_section(const std::vector<RunResult>& runs) {
  std::string out;
  for (size_t i = 0; i < runs.size(); ++i) {
    std::string maps = element("h3", escaped(runs[i].recipe));
    for (int64_t block = 0; block < std::min<int64_t>(runs[i].settings.blocks, 8); ++block) {
      maps += text("<figure><figcaption>block ", block, "</figcaption>",
                   svg(load_of(runs[i], block)), "</figure>");
    }
    out += text("<div class='card k", i % kColors, "'>", maps, "</div>");
  }
  return element("div class='maps'", out);
}

std::string sample_section(const std::vector<RunResult>& runs, const std::string& prompt) {
  std::string out;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].sample.empty()) continue;
    const std::string words =
        element("b", escaped(printable(prompt))) + escaped(printable(runs[i].sample));
    out += text("<div class='card k", i % kColors, "'><h3>", escaped(runs[i].recipe), "</h3><pre>",
                words, "</pre></div>");
  }
  if (out.empty()) return "";
  return "<h2>Text that the models write</h2>" + element("div class='samples'", out);
}

std::string settings_table(const Settings& settings) {
  std::string rows;
  each_setting(settings, [&](const char* name, auto value, Range, const char* summary) {
    rows += text("<tr><td>--", name, "<td>", value, "<td>", escaped(summary), "</tr>");
  });
  return "<div class='wide'>" + element("table class='settings'", rows) + "</div>";
}

std::string file_list(const TextFacts& facts) {
  std::string items;
  for (const std::string& name : facts.names) items += element("li", escaped(printable(name)));
  for (const std::string& name : facts.skipped) {
    items += element("li", "<s>" + escaped(printable(name)) + "</s> is empty or no text");
  }
  return element("details",
                 element("summary", text(facts.names.size(), " files")) + element("ul", items));
}

std::string text_section(const TextFacts& facts) {
  return text("<h2>The text</h2><p>", thousands(facts.train_bytes), " bytes to learn from, ",
              thousands(facts.held_bytes),
              " bytes held out: the end of every file. <b>Bits per byte</b> is the mean of "
              "−log<sub>2</sub> p(byte | bytes before it) over all held-out bytes. The <b>bigram "
              "entropy</b>, ",
              fixed(facts.bigram_bits, 4),
              " bits, is the entropy of a held-out byte given the byte before it, counted on the "
              "held-out text itself; no model that looks back one byte can score less on it.</p>",
              file_list(facts));
}

}  // namespace

std::string report_html(const TextFacts& facts, const std::vector<RunResult>& runs,
                        const std::string& prompt, const Origin& origin) {
  const Settings& s = runs[0].settings;
  std::string body = "<h1>Experts learn bytes</h1>";
  body += text("<p class='lead'>A byte-level Mixture-of-Experts language model of ",
               thousands(runs[0].model_parameters), " parameters: ", s.blocks, " blocks of ",
               s.experts, " experts, ", s.top_k, " for each byte, trained for ", s.steps,
               " steps of ", s.rows, " bytes on ", escaped(runs[0].device),
               "; once for each recipe, from the same seed and with the same batches.</p>");
  body += text("<p class='quiet'>", escaped(origin.machine), "; ", escaped(origin.date),
               "; commit ", escaped(origin.commit), "</p>");
  body += cards(facts, runs);
  body +=
      "<h2>Learning</h2><p class='quiet'>Points: held-out text; of "
      "recipes that lie on each other the first is the widest. Faint: training batches.</p>" +
      element("figure", learning_chart(facts, runs));
  if (runs.size() > 1) body += gap_section(runs);
  body +=
      "<h2>Load of the experts</h2><p class='quiet'>One row an expert, steps to the right. No "
      "colour: an even share of the rows. <span class='key over'></span> twice as many or more "
      "<span class='key under'></span> half as many or fewer.</p>" +
      load_section(runs);
  body += sample_section(runs, prompt) + text_section(facts);
  body += "<h2>Runs</h2>" + run_table(facts, runs) + plan_list(runs) + "<h2>Settings</h2>" +
          settings_table(s);
  body += "<footer>Written by <code>cadre train</code>.</footer>";
  return text(kFirstWords, "<style>", kPageStyle, "</style></head><body><main>", body,
              "</main></body></html>\n");
}

bool is_report(const std::string& words) { return words.starts_with(kFirstWords); }

}  // namespace cadre::train
