"""tools/docs.py on a small tree with a command line of its own: writes tables, sees stale ones."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools/docs.py"
INFO = {"formats": [{"name": "mxfp8", "element": "e4m3", "bits": 8, "block": 32,
                     "block_scale": "e8m0", "expert_scale": None, "options": ["2d"],
                     "summary": "small"}]}
PAGE = """before
<!-- table {name}, written by tools/docs.py -->
{table}<!-- end of table -->
behind
"""
TABLE = """| format | code | scales | bits a value | options |  |
|---|---|---|---|---|---|
| `mxfp8` | e4m3 | e8m0 per 32 | 8.25 | `2d` | small |
"""


class Docs(unittest.TestCase):
    def setUp(self):
        self.top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.top)
        (self.top / "tools").mkdir()
        (self.top / "docs/ops").mkdir(parents=True)
        for tool in TOOL.parent.glob("docs*.py"):
            shutil.copy(tool, self.top / "tools")
        self.page = self.top / "docs/ops/page.md"
        self.cadre = self.top / "cadre"
        self.cadre.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(INFO)}\nEND\n")
        self.cadre.chmod(0o755)

    def run_tool(self, *arguments):
        return subprocess.run([sys.executable, self.top / "tools/docs.py", *arguments, self.cadre],
                              capture_output=True, text=True)

    def test_writes_the_table_and_nothing_else(self):
        self.page.write_text(PAGE.format(name="formats", table="old\n"))
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertEqual(self.page.read_text(), PAGE.format(name="formats", table=TABLE))

    def test_speeds_are_those_of_an_h200(self):
        results = self.top / "bench/results"
        results.mkdir(parents=True)
        cases = [{"call": "step", "problem": "moe", "speed_of_peer": {"torch": speed}}
                 for speed in (1, 4)]
        cases += [{"call": "forward", "problem": "moe", "speed_of_peer": {"torch": 9}},
                  {"call": "step", "problem": "moe", "speed_of_peer": {"other": 9}}]
        for chip in "H100", "H200":
            (results / f"{chip}-moe-torch.json").write_text(json.dumps(
                {"machine": f"NVIDIA {chip}, 132 SMs", "date": "2030-01-02T03:04:05Z",
                 "cases": cases if chip == "H200" else cases[:1]}))
        self.page.write_text(PAGE.format(name="speeds", table=""))
        self.assertEqual(self.run_tool().returncode, 0)
        row = ("| MoE layer, bf16, training step | torch | 2.00 | 1.00 to 4.00 | 2 | 2030-01-02 | "
               "[page](docs/layers/moe.md) |\n")
        self.assertIn(row, self.page.read_text())
        self.assertEqual(self.page.read_text().count("training step"), 1)

    def test_facts_come_from_records_alone(self):
        page = PAGE.format(name="facts", table="")
        self.page.write_text(page)
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertIn("No GPU is recorded yet", self.page.read_text())
        results = self.top / "bench/results"
        results.mkdir(parents=True)
        (results / "chip-facts.json").write_text(json.dumps(
            {"machine": "chip, 3 SMs", "date": "2030-01-02T03:04:05Z", "facts": [
                {"name": "copy", "value": 4180.26, "unit": "GB/s", "how": "by hand"},
                {"name": "read of the second cache", "value": 65536, "how": "a multiprocessor"}]}))
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertEqual(self.page.read_text(), PAGE.format(name="facts", table=(
            "| chip, 3 SMs, 2030-01-02 |  |  |  |\n|---|---|---|---|\n"
            "| copy | 4180 | GB/s | by hand |\n| read of L2 | 65536 |  | an SM |\n")))

    def test_facts_of_two_gpus_are_a_table_of_their_own(self):
        results = self.top / "bench/results"
        results.mkdir(parents=True)
        (results / "chip-link.json").write_text(json.dumps(
            {"machine": "chip", "date": "2030-01-02T03:04:05Z", "facts": [
                {"name": "word", "value": 1.5, "unit": "us", "how": "there and back"}]}))
        for name, row in (("facts", "No GPU is recorded yet"),
                          ("link_facts", "| word | 1.5 | us | there and back |")):
            with self.subTest(name):
                self.page.write_text(PAGE.format(name=name, table=""))
                self.assertEqual(self.run_tool().returncode, 0)
                self.assertIn(row, self.page.read_text())

    def test_the_readme_has_what_is_recorded_of_its_commands(self):
        readme = self.top / "README.md"
        readme.write_text(PAGE.format(name="commands", table=""))
        results = self.top / "bench/results"
        results.mkdir(parents=True)
        (results / "chip-commands.json").write_text(json.dumps(
            {"machine": "chip", "date": "2030-01-02T03:04:05Z", "cases": [
                {"command": "make demo", "first_minutes": 5},
                {"command": "make test", "first_minutes": 9, "disk_gb": 10.5}]}))
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertEqual(readme.read_text(), PAGE.format(name="commands", table=(
            "| command | minutes | GB on the disk | machine |\n|---|---|---|---|\n"
            "| `make demo` | 5 | - | chip, 2030-01-02 |\n"
            "| `make test` | 9 | 10.5 | chip, 2030-01-02 |\n")))

    def test_headers_have_their_types(self):
        (self.top / "include/cadre").mkdir(parents=True)
        (self.top / "include/cadre/a.h").write_text(
            "struct Elsewhere;\nstruct Here {\n  struct In {};\n};\n"
            "enum class Kind : uint8_t { kOne };\n")
        self.page.write_text(PAGE.format(name="headers", table=""))
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertEqual(self.page.read_text(), PAGE.format(name="headers", table=(
            "| header | its types |\n|---|---|\n"
            "| [`a.h`](../include/cadre/a.h) | `Here` `Kind` |\n")))

    def test_public_names_have_their_first_sentence_wherever_they_are_defined(self):
        (self.top / "torch/cadre").mkdir(parents=True)
        modules = {
            "__init__": 'from . import ops\nfrom .deep import Inner as Outer, f\n'
                        '__all__ = [\n    "f", "Outer", "ops"]\n',
            "deep": 'from .deeper import Inner\ndef f():\n    """y[r]\n    = 1. More."""\n',
            "deeper": 'class Inner:\n    """Of all:\n\n    a list."""\n', "ops": "__all__ = []",
            "checkpoints": '__all__ = ["LIMIT"]\nLIMIT = 1', "huggingface": "__all__ = []",
            "megatron": "__all__ = []"}
        for name, text in modules.items():
            (self.top / f"torch/cadre/{name}.py").write_text(text)
        self.page.write_text(PAGE.format(name="python", table=""))
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertEqual(self.page.read_text(), PAGE.format(name="python", table=(
            "| name |  | source |\n|---|---|---|\n"
            "| `cadre.Outer` | Of all | [deeper.py](../torch/cadre/deeper.py) |\n"
            "| `cadre.f` | y\\[r] = 1 | [deep.py](../torch/cadre/deep.py) |\n")))

    def test_what_the_row_above_begins_with_is_not_said_again(self):
        row = INFO["formats"][0]
        twice = json.dumps({"formats": [row, row]})
        self.cadre.write_text(f"#!/bin/sh\ncat <<'END'\n{twice}\nEND\n")
        self.page.write_text(PAGE.format(name="formats", table=""))
        self.assertEqual(self.run_tool().returncode, 0)
        again = TABLE.split("\n")[2].replace("`mxfp8`", "", 1)
        self.assertEqual(self.page.read_text(), PAGE.format(name="formats",
                                                            table=TABLE + again + "\n"))

    def test_a_peer_that_was_left_out_has_no_numbers(self):
        results = self.top / "bench/results"
        results.mkdir(parents=True)
        case = {"layer": "small", "routing": "uniform", "from": "logits"}

        def record(topic, *cases, machine="chip", day=2):
            (results / f"{machine}-{topic}.json").write_text(json.dumps(
                {"machine": machine, "date": f"2030-01-0{day}T03:04:05Z",
                 "cases": [case | more for more in cases]}))

        record("moe-torch",
               {"call": "forward", "us": {"cadre": 1500, "torch": 3000},
                "speed_of_peer": {"torch": 2}},
               {"call": "step", "us": {"cadre": 4000, "sonicmoe": 3000},
                "speed_of_peer": {"sonicmoe": 0.75},
                "kept_bytes": {"cadre": 2**20, "sonicmoe": 2**22},
                "peak_bytes": {"cadre": 2**22, "sonicmoe": 2**24}})
        record("moe-torch", {"call": "step", "us": {}, "speed_of_peer": {},
                             "kept_bytes": {"sonicmoe": 1}, "peak_bytes": {"sonicmoe": 1}},
               machine="other")
        record("moe-memory", {"call": "step", "kept_bytes": {"cadre": 2**21},
                              "peak_bytes": {"cadre": 2**23}}, day=5)
        for name, rows in (
                ("moe_layers", "| chip, 2030-01-02 | small | uniform | forward | logits | 1.50 "
                 "| 2.00 | - |\n|  | small | uniform | step | logits | 4.00 | - | 0.75 |\n"),
                ("moe_memory", "| chip, 2030-01-05 | small | logits | 2 / - / 4 | 8 / - / 16 |\n")):
            with self.subTest(name):
                self.page.write_text(PAGE.format(name=name, table=""))
                self.assertEqual(self.run_tool().returncode, 0)
                self.assertIn(rows, self.page.read_text())

    def test_check_accepts_what_was_written(self):
        self.page.write_text(PAGE.format(name="formats", table=TABLE))
        self.assertEqual(self.run_tool("--check").returncode, 0)

    def test_check_sees_a_stale_table_and_leaves_it(self):
        stale = PAGE.format(name="formats", table=TABLE.replace("8.25", "8"))
        self.page.write_text(stale)
        result = self.run_tool("--check")
        self.assertEqual(result.returncode, 1)
        self.assertIn("docs/ops/page.md: out of date", result.stdout)
        self.assertEqual(self.page.read_text(), stale)

    def test_an_unknown_table_or_none_is_an_error(self):
        self.page.write_text(PAGE.format(name="fromats", table=""))
        self.assertIn("no table is called fromats", self.run_tool("--check").stderr)
        self.page.write_text("no marker")
        self.assertIn("no marked table", self.run_tool("--check").stderr)


if __name__ == "__main__":
    unittest.main()
