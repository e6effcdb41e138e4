// What is shown: progress, numbers, drawings, the page, the sample's characters.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "apps/train/chart.h"
#include "apps/train/number_text.h"
#include "apps/train/progress.h"
#include "apps/train/result.h"
#include "apps/train/utf8.h"

using namespace cadre::train;

namespace {

const RunStatus kStatus{"mxfp8", 120, 400, 1.5, 31234.5, 62};

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
  return found;
}

std::vector<RunResult> some_runs() {
  std::vector<RunResult> runs(2);
  for (size_t i = 0; i < 2; ++i) {
    RunResult& run = runs[i];
    run.recipe = i == 0 ? "bf16" : "nvfp4";
    run.device = "a <GPU>";
    run.plans = "grouped_gemm fast & small";
    run.settings.steps = 4;
    run.history.loss = {5, 4, 3, 2.5};
    run.history.eval_step = {2, 4};
    run.history.eval_bits = {4.0, i == 0 ? 3.0 : 3.06};
    run.history.held_bits = {i == 0 ? 3.0 : 3.06};
    run.history.load.assign(kLoadBins * run.settings.blocks * run.settings.experts, 7);
    run.model_parameters = 1234567;
    run.seconds = 2;
    run.steps_here = 4;
    run.sample = "<script>alert(1)</script>\x01&";
  }
  return runs;
}

const TextFacts kFacts{{"a.txt", "<b>.md"}, {"junk.bin"}, 1000, 50, 4.0};
const Origin kOrigin{"a <CPU>, 4 threads", "2026-11-23T05:00:00Z", "1234567-dirty"};

}  // namespace

TEST(Progress, FitsTheTerminal) {
  EXPECT_EQ(progress_line(kStatus),
            "mxfp8  step 120/400  loss 1.500  2.164 bits/byte  31,234 rows/s  1:02 left");
  for (int columns = 2; columns < 200; ++columns) {
    const std::string bar = progress_bar(kStatus, {true, columns, false});
    EXPECT_LT(bar.size(), size_t(columns)) << bar;
  }
  const std::string wide = progress_bar(kStatus, {true, 200, false});
  EXPECT_EQ(count(wide, "#"), 12u);
  EXPECT_EQ(wide.find("mxfp8     ############............................ 120/400"), 0u) << wide;
  EXPECT_EQ(count(progress_bar(kStatus, {true, 200, true}), "█"), 12u);
}

TEST(Progress, IsTenPlainLinesWithoutATerminal) {
  std::ostringstream out;
  Progress progress(out, {});
  for (int64_t step = 1; step <= 400; ++step) progress.show({"bf16", step, 400, 1, 1, 1});
  progress.clear();
  EXPECT_EQ(count(out.str(), "\n"), 10u);
  EXPECT_EQ(count(out.str(), "\r") + count(out.str(), "\x1b"), 0u);
  EXPECT_NE(out.str().find("step 400/400"), std::string::npos);
  std::ostringstream few;
  Progress short_run(few, {});
  for (int64_t step = 1; step <= 3; ++step) short_run.show({"bf16", step, 3, 1, 1, 1});
  EXPECT_EQ(count(few.str(), "\n"), 3u);
}

TEST(Progress, IsDueWhereItShows) {
  std::ostringstream out;
  Progress lines(out, {}), bar(out, {true, 100, false});
  for (int64_t step = 1; step <= 40; ++step) EXPECT_EQ(lines.due(step, 40), step % 4 == 0) << step;
  EXPECT_TRUE(bar.due(1, 40));
  bar.show({"bf16", 1, 40, 1, 1, 1});
  EXPECT_FALSE(bar.due(2, 40));  // a tenth of a second has not passed
  EXPECT_TRUE(bar.due(40, 40));
}

TEST(Progress, DrawsOverItselfOnATerminalAndClears) {
  std::ostringstream out;
  Progress progress(out, {true, 100, false});
  progress.show({"bf16", 1, 2, 1, 1, 1});
  progress.show({"bf16", 2, 2, 1, 1, 1});
  progress.clear();
  EXPECT_EQ(count(out.str(), "\n"), 0u);
  EXPECT_EQ(count(out.str(), "\r"), 3u);
  EXPECT_TRUE(out.str().ends_with("\r\x1b[K"));
}

TEST(NumberText, IsWhatPeopleRead) {
  EXPECT_EQ(thousands(0), "0");
  EXPECT_EQ(thousands(999), "999");
  EXPECT_EQ(thousands(1234567), "1,234,567");
  EXPECT_EQ(thousands(-1000), "-1,000");
  EXPECT_EQ(thousands(-100), "-100");
  EXPECT_EQ(duration(7.4), "0:07");
  EXPECT_EQ(duration(59.6), "1:00");
  EXPECT_EQ(duration(3661), "1:01:01");
  EXPECT_EQ(signed_percent(0.004), "+0.4 %");
  EXPECT_EQ(signed_percent(-0.4), "-40.0 %");
}

TEST(Printable, ReplacesWhatATerminalMustNotSee) {
  EXPECT_EQ(printable("a\tb\n\x1b[31m\x7f"), "a\tb\n·[31m·");
  EXPECT_EQ(printable("é\xE9 \xE2\x82"), "é· ··");
  EXPECT_EQ(printable("\xC0\xAF\xED\xA0\x80\xF5"), "······");
  EXPECT_EQ(utf8_length("€", 0), 3u);
  EXPECT_EQ(utf8_length("😀", 0), 4u);
  EXPECT_EQ(utf8_length("\xF4\x90\x80\x80", 0), 0u);
}

TEST(Chart, TicksAreRoundAndInside) {
  EXPECT_EQ(ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  for (const auto& [low, high] : {std::pair{2.1, 4.05}, {0.0, 400.0}, {-0.3, 1.7}, {1e-9, 2e-9}}) {
    const auto values = ticks(low, high, 6);
    EXPECT_GE(values.size(), 2u);
    EXPECT_LE(values.size(), 13u);
    for (const double v : values) EXPECT_TRUE(v >= low - 1e-12 && v <= high + 1e-12);
  }
  EXPECT_EQ(ticks(1, 1, 6).size(), 1u);
  EXPECT_EQ(ticks(1, std::nan(""), 6).size(), 1u);
}

TEST(Chart, LeavesOutWhatIsNotFinite) {
  LineChart chart{
      "t", "y", {{"a<b", 0, CurveStyle::kPoints, {1, 2, 3}, {1, std::nan(""), 2}}}, {{"l", 3}}};
  const std::string drawing = svg(chart);
  EXPECT_EQ(drawing.find("nan"), drawing.npos);
  EXPECT_EQ(count(drawing, "<circle"), 2u);
  EXPECT_NE(drawing.find("a&lt;b"), drawing.npos);
  chart.curves[0].y = {std::nan(""), std::nan(""), std::nan("")};
  chart.levels.clear();
  EXPECT_EQ(svg(chart).find("nan"), std::string::npos);
}

TEST(HeatMap, ColoursMoreAndLessThanEven) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::string map = svg(HeatMap{"m", 2, 3, 60, {1, 4, 0, 0.5, std::nan(""), inf}});
  EXPECT_EQ(count(map, "<rect"), 4u);
  EXPECT_EQ(count(map, "fill-opacity='0.00'"), 1u);
  EXPECT_EQ(count(map, "class='under'"), 2u);
  EXPECT_EQ(count(map, "class='over'"), 2u);
}

TEST(Report, IsOnePageWithoutAssetsAndEscapesText) {
  const std::string page = report_html(kFacts, some_runs(), "<p>", kOrigin);
  for (const char* outside : {"http", "src=", "href=", "url(", "@import", "<script"}) {
    EXPECT_EQ(page.find(outside), page.npos) << outside;
  }
  EXPECT_NE(page.find("&lt;script&gt;alert(1)"), page.npos);
  EXPECT_NE(page.find("prefers-color-scheme: dark"), page.npos);
  EXPECT_EQ(count(page, "<svg"), count(page, "</svg>"));
  EXPECT_EQ(count(page, "<svg"), 3u + 2 * 2u);  // three charts, two blocks of two recipes
  EXPECT_NE(page.find("25.0 % below the bigram entropy"), page.npos);
  EXPECT_NE(page.find("+2.0 % against bf16"), page.npos);
  EXPECT_NE(page.find("bytes on a &lt;GPU&gt;; once for"), page.npos);
  EXPECT_EQ(count(page, " on a &lt;GPU&gt;: grouped_gemm fast &amp; small"), 2u);
  for (const char* tag : {"div", "figure", "table", "details", "ul", "pre", "h2", "h3", "p"}) {
    const std::string name = tag;
    EXPECT_EQ(count(page, "<" + name + ">") + count(page, "<" + name + " "),
              count(page, "</" + name + ">"))
        << tag;
  }
}

TEST(Report, NamesAxesMachineDateAndCommit) {
  const std::string page = report_html(kFacts, some_runs(), "", kOrigin);
  EXPECT_NE(page.find("a &lt;CPU&gt;, 4 threads; 2026-11-23T05:00:00Z; commit 1234567-dirty"),
            page.npos);
  EXPECT_EQ(count(page, ">steps</text>"), 3u);
  EXPECT_EQ(count(page, ">bits per byte</text>"), 1u);
  EXPECT_EQ(count(page, ">% above bf16</text>"), 2u);
  EXPECT_EQ(count(page, ">step 1</text>"), 4u);
  EXPECT_EQ(page.find(">2.5</text>"), page.npos) << "a step and a half";
  const std::string json = results_json(kFacts, some_runs(), kOrigin);
  for (const char* words : {"\"machine\": \"a <CPU>, 4 threads\"", "\"commit\": \"1234567-dirty\""})
    EXPECT_NE(json.find(words), json.npos) << json;
}

TEST(Report, TellsEqualRecipesApart) {
  const std::string page = report_html(kFacts, some_runs(), "", kOrigin);
  EXPECT_NE(page.find("class='curve c0' stroke-width='3.6'"), page.npos);
  EXPECT_NE(page.find("class='curve c1' stroke-width='2.0'"), page.npos);
  EXPECT_NE(page.find("nvfp4, step 4: 2</title>"), page.npos) << "3.06 is 2 % above 3";
}

TEST(Report, OfTextThatRepeatsItselfHasNoInfinity) {
  TextFacts facts = kFacts;
  facts.bigram_bits = 0;
  const std::vector<RunResult> runs = some_runs();
  for (const std::string& words :
       {report_html(facts, runs, "", kOrigin), summary_table(facts, runs),
        results_json(facts, runs, kOrigin)}) {
    EXPECT_EQ(words.find("inf"), words.npos) << words;
    EXPECT_EQ(words.find("nan"), words.npos) << words;
  }
}

TEST(Report, OfOneRunHasNoComparison) {
  std::vector<RunResult> runs = some_runs();
  runs.resize(1);
  runs[0].sample.clear();
  const std::string page = report_html(kFacts, runs, "", kOrigin);
  EXPECT_EQ(page.find("What the formats cost"), page.npos);
  EXPECT_EQ(page.find("Text that the models write"), page.npos);
}

TEST(Results, AreATableAndJson) {
  std::vector<RunResult> runs = some_runs();
  runs[1].steps_here = 0;
  runs[0].resumes_equal = true;
  const std::string table = summary_table(kFacts, runs);
  EXPECT_NE(table.find("bf16            3.000     -25.0 %         +0.0 %     2,048    0:02\n"),
            table.npos)
      << table;
  EXPECT_NE(table.find("nvfp4           3.060     -23.5 %         +2.0 %         -       -\n"),
            table.npos)
      << table;
  const std::string json = results_json(kFacts, runs, kOrigin);
  EXPECT_NE(json.find("\"held_out_bits_per_byte\": 3.06"), json.npos);
  EXPECT_NE(json.find("\"resumes_equal\": true"), json.npos);
  EXPECT_EQ(count(json, "\"device\": \"a <GPU>\""), 2u);
  EXPECT_EQ(count(json, "\"plans\": \"grouped_gemm fast & small\""), 2u);
  EXPECT_EQ(count(json, "resumes_equal"), 1u);
}

TEST(Results, BelongToTheirRun) {
  const std::vector<RunResult> runs = some_runs();
  const std::string json = results_json(kFacts, runs, kOrigin);
  const Settings& settings = runs[0].settings;
  EXPECT_TRUE(is_result_of(json, settings, {"bf16", "nvfp4"}));
  EXPECT_FALSE(is_result_of(json, settings, {"bf16"}));
  EXPECT_FALSE(is_result_of(json, settings, {"nvfp4", "bf16"}));
  EXPECT_FALSE(is_result_of(json, Settings{}, {"bf16", "nvfp4"}));
  for (const char* words : {"", "[]", "{}", "{\"settings\": 1, \"runs\": [1, {\"recipe\": {}}]}"})
    EXPECT_FALSE(is_result_of(words, settings, {"bf16", "nvfp4"})) << words;
}
