"""tools/plots.py: what is drawn says what records say, and a plot that is not theirs is seen."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import plots  # noqa: E402

MARKS = ".//{*}path[@transform]"


def place(mark):
    return tuple(map(float, re.findall(r"[\d.]+", mark.get("transform"))))


class Plots(unittest.TestCase):
    def test_a_mark_stands_where_its_value_is(self):
        svg = plots.dots("title", "below", 1, ["a", "b"], ["one", "two"],
                         {"row": [(0.5, 0, 0), (1.5, 1, 1)], "other": [(1.0, 0, 1)]})
        at = {mark[0].text: place(mark) for mark in ET.fromstring(svg).iterfind(MARKS)}
        left, right, middle = at["row, a, one: 0.5"], at["row, b, two: 1.5"], at["other, a, two: 1"]
        self.assertAlmostEqual(middle[0], (left[0] + right[0]) / 2, delta=0.1)
        self.assertLess(left[1], right[1])
        self.assertLess(right[1], middle[1])

    def test_lines_go_down_where_values_do(self):
        root = ET.fromstring(plots.lines("title", "", "steps", {"loss <1>": [(0, 4), (10, 2)]}))
        marks = {mark[0].text: place(mark) for mark in root.iterfind(MARKS)}
        self.assertLess(marks["loss <1>, 0: 4"][1], marks["loss <1>, 10: 2"][1])
        self.assertLess(marks["loss <1>, 0: 4"][0], marks["loss <1>, 10: 2"][0])

    def test_ticks_are_round_and_hold_the_values(self):
        for low, high in ((0.74, 1.56), (1.8, 1.85), (3, 299), (2, 5)):
            at = plots.ticks(low, high)
            self.assertLessEqual(at[0], low)
            self.assertGreaterEqual(at[-1], high)
            self.assertLessEqual(len(at), 8)

    def test_nothing_leaves_the_picture(self):
        for name, draw in plots.PLOTS.items():
            root = ET.fromstring(draw())
            wide, high = map(float, root.get("viewBox").split()[2:])
            for mark in root.iterfind(MARKS):
                x, y = place(mark)
                self.assertTrue(5 < x < wide - 5 and 5 < y < high - 5, f"{name}: {mark[0].text}")

    def test_a_peer_that_was_left_out_has_no_mark(self):
        one = plots.record("nvidia-h200-moe-torch")
        for case in one["cases"][1:]:
            case["speed_of_peer"].pop("sonicmoe")
        with mock.patch.object(plots, "record", lambda name: one):
            words = [mark[0].text for mark in ET.fromstring(plots.moe()).iterfind(MARKS)]
        self.assertEqual(sum(", SonicMoE, " in word for word in words), 1)

    def test_a_plot_that_is_out_of_date_or_missing_is_seen(self):
        top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, top)
        for part in ("tools", "docs/plots", "bench/results"):
            shutil.copytree(ROOT / part, top / part, ignore=shutil.ignore_patterns("wheel"))

        def run(*arguments):
            return subprocess.run([sys.executable, top / "tools/plots.py", *arguments],
                                  capture_output=True, text=True)

        self.assertEqual(run("--check").returncode, 0)
        record = top / "bench/results/nvidia-h200-moe-torch.json"
        found = json.loads(record.read_text())
        found["cases"][0]["speed_of_peer"]["torch"] += 0.1
        record.write_text(json.dumps(found))
        (top / "docs/plots/gpt.svg").unlink()
        result = run("--check")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout, "docs/plots/moe.svg: out of date; run tools/plots.py\n"
                                        "docs/plots/gpt.svg: out of date; run tools/plots.py\n")
        self.assertFalse((top / "docs/plots/gpt.svg").exists())
        self.assertEqual(run().returncode, 0)
        self.assertEqual(run("--check").returncode, 0)
        self.assertIn("usage", run("--chekc").stderr)


if __name__ == "__main__":
    unittest.main()
