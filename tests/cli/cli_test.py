"""Runs the command line as a user would: `cli_test.py CADRE [few]`, with the path of the binary.

Good calls exit with 0 and say what they should; every wrong call exits with 2 and says in one line
on stderr what is wrong and what to do. With `few`, for a sanitized CADRE that takes several times
longer, each verb and option runs, but long lists of problems do not, and fewer are drawn.
"""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CADRE = ""
FEW = "few" in sys.argv
DRAWN = "3" if FEW else "12"  # random problems of a call
all_of_a_list = unittest.skipIf(FEW, "a long list, without `few` only")
VERBS = ("info", "explain", "check", "bench", "facts")


def run(*words, **environment):
    return subprocess.run([CADRE, *words], capture_output=True, text=True,
                          env={**os.environ, **environment})


def info():
    return json.loads(run("info", "--json").stdout)


def has_cuda():
    """Whether this build has kernels for GPUs."""
    return any(row["implementations"]["cuda"] != ["cuda"] for row in info()["operations"])


class Cli(unittest.TestCase):
    def good(self, *words, code=0):
        done = run(*words)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def wrong(self, *words, says, prints=False, code=2):
        """Nothing on stdout, one line on stderr that holds every text of `says`."""
        done = run(*words)
        self.assertEqual(done.returncode, code, (words, done.stdout, done.stderr))
        self.assertTrue(prints or done.stdout == "", done.stdout)
        self.assertTrue(done.stderr.startswith("cadre: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for text in says:
            self.assertIn(text, done.stderr)


class Teaching(Cli):
    def test_bare_and_help_show_every_verb_and_examples(self):
        bare = self.good()
        self.assertEqual(bare, self.good("--help"))
        for verb in VERBS:
            self.assertRegex(bare, rf"(?m)^  {verb} ")
        examples = [line.split()[1:] for line in bare.splitlines() if line.startswith("  cadre ")]
        self.assertGreaterEqual(len(examples), 3)

    def test_every_verb_has_help(self):
        for verb in VERBS:
            self.assertIn("--help", self.good(verb, "--help"))

    def test_version(self):
        self.assertRegex(self.good("--version"), r"^cadre \d+\.\d+\.\d+\n$")

    def test_unknown_words(self):
        self.wrong("inform", says=["verb is 'inform', must be one of info, explain, check, bench"])
        self.wrong("--verbose", says=["--verbose", "run 'cadre --help'"])
        self.wrong("info", "--yaml", says=["--yaml", "run 'cadre info --help'"])
        self.wrong("info", "formats", says=["formats", "run 'cadre info --help'"])


class Info(Cli):
    def test_json_is_complete(self):
        all_of = info()
        self.assertEqual(all_of["devices"][0]["name"], "cpu")
        self.assertGreaterEqual(all_of["devices"][0]["units"], 1)
        self.assertEqual([f["name"] for f in all_of["formats"]][:3], ["f32", "bf16", "f16"])
        mxfp8 = next(f for f in all_of["formats"] if f["name"] == "mxfp8")
        self.assertEqual((mxfp8["element"], mxfp8["bits"], mxfp8["block"], mxfp8["block_scale"]),
                         ("e4m3", 8, 32, "e8m0"))
        self.assertEqual(mxfp8["options"], ["e5m2", "2d", "floor"])
        self.assertEqual(all_of["activations"][0]["name"], "swiglu")
        self.assertIn("nvfp4", [r["name"] for r in all_of["recipes"]])
        for operation in all_of["operations"]:
            self.assertEqual(operation["implementations"]["cpu"][-1], "cpu_reference", operation)
            self.assertTrue(operation["example"].startswith(operation["name"] + " "))

    def test_text_shows_what_json_holds(self):
        text = self.good("info")
        all_of = info()
        for part in ("formats", "activations", "recipes", "operations", "layers"):
            for row in all_of[part]:
                self.assertRegex(text, rf"(?m)^{row['name']} ")


class Explain(Cli):
    def test_every_example_has_a_plan_on_the_cpu(self):
        for operation in info()["operations"]:
            answer = json.loads(self.good("explain", operation["example"], "--json"))
            self.assertIn(answer["plan"], operation["implementations"]["cpu"])
            self.assertTrue(answer["exact"])
            self.assertGreaterEqual(answer["workspace_bytes"], 0)

    def test_quoted_and_unquoted_problems_are_the_same(self):
        words = "offsets counts R=8192 E=64"
        self.assertEqual(self.good("explain", words), self.good("explain", *words.split()))
        self.assertIn("problem    offsets counts R=8192 E=64 index=i32\n",
                      self.good("explain", words))

    def test_a_device_without_an_implementation_is_refused_with_the_reason(self):
        for operation in info()["operations"]:
            if operation["implementations"]["cuda"] != ["cuda"]:
                self.skipTest("this build has CUDA implementations")
            text = self.good("explain", operation["example"], "--device", "sm_90", code=1)
            self.assertIn("device     sm_90", text)
            self.assertIn("plan       none: no implementation takes it", text)
            self.assertIn("refused    cuda: this build has no CUDA backend; configure with", text)

    def test_every_layer_is_explained_step_by_step(self):
        for layer in info()["layers"]:
            answer = json.loads(self.good("explain", layer["example"], "--json"))
            self.assertTrue(answer["plan"])
            self.assertTrue(answer["exact"])
            self.assertGreater(answer["kept_bytes_per_row"], 0)
            self.assertGreater(answer["memory"]["forward_workspace_bytes"] +
                               answer["memory"]["saved_bytes"], 0)
            text = self.good("explain", layer["example"])
            self.assertIn(f"problem    {answer['problem']}\n", text)
            self.assertIn("grouped_gemm fprop", text)
            if has_cuda():
                for device, name in (("sm_80", "cuda"), ("sm_90", "sm90"), ("sm_100", "cuda")):
                    self.assertIn(f": {name}_ragged_contraction",
                                  self.good("explain", layer["example"], "--device", device))
            else:
                refused = self.good("explain", layer["example"], "--device", "sm_90", code=1)
                self.assertIn("plan       none", refused)
                self.assertIn("refused    no implementation on sm_90 for '", refused)

    def test_wrong_problems(self):
        self.wrong("explain", says=["PROBLEM is required", "run 'cadre explain --help'"])
        self.wrong("explain", "gemm", "R=1",
                   says=["first word is 'gemm', must be one of ", "'cadre info' shows an example"])
        self.wrong("explain", "", says=["first word is ''"])
        self.wrong("explain", "offsets", "counts", "R=many", says=["R is 'many', must be"])
        self.wrong("explain", "offsets", "counts", "R=1", "E=0",
                   says=["E is 0, must be 1 or more", "[offsets counts R=1 E=0 index=i32]"])
        self.wrong("explain", "offsets counts R=1 E=1", "--device", "tpu",
                   says=["'tpu', must be", "cpu", "sm_90"])


def no_gpu_here(test, *words):
    """Wrong devices, and a GPU asked for where there is none."""
    test.wrong(*words, "--device", "tpu",
               says=["device: name is 'tpu', must be cpu, cuda or cuda:<index>"])
    test.wrong(*words, "--device", "sm_90", says=["'sm_90'", "only 'cadre explain' plans for"])
    if not any(d["name"].startswith("cuda") for d in info()["devices"]):
        for word in ("cuda", "cuda:1"):
            test.wrong(*words, "--device", word,
                       says=[f"device: '{word}' is not here; ", "give --device cpu"])


class Check(Cli):
    @all_of_a_list
    def test_the_built_in_list_is_good_and_covers_every_operation_and_format(self):
        text = self.good("check")
        lines = text.splitlines()
        shapes = (ROOT / "bench/shapes/check.txt").read_text().splitlines()
        shapes = [s for s in shapes if s and not s.startswith("#")]
        self.assertRegex(lines[-1], rf"^{len(shapes)} checked, 0 failed")
        for operation in info()["operations"]:
            self.assertIn(f" {operation['name']} ", text)
        for activation in info()["activations"]:
            for direction in ("forward", "backward"):
                self.assertIn(f"activation {direction} {activation['name']} ", text)
        for row in info()["formats"]:
            scaled = row["block_scale"] or row["expert_scale"]
            for operation in ("grouped_gemm", *(("quantize", "dequantize") if scaled else ())):
                self.assertRegex("\n".join(shapes), rf"(?m)^{operation} .*"
                                 rf"\b(format|x|w|dy|along_k|along_rows)={row['name']}\b")

    def test_seed_and_offsets(self):
        words = "activation forward silu R=64 F=9 E=4 z=f32 h=f32"
        with tempfile.TemporaryDirectory() as folder:
            counts = pathlib.Path(folder) / "counts"
            counts.write_text("0 7\n20 1\n")
            for offsets in ("uniform", "zipf:1.5", "gamma:1", "onehot", str(counts)):
                text = self.good("check", words, "--offsets", offsets, "--seed", "5")
                self.assertIn("1 checked, 0 failed", text)
            counts.write_text("60 7 20 1")
            self.wrong("check", words, "--offsets", str(counts),
                       says=["sum to 88, must be R = 64 or less"])
            counts.write_text("1 2 3")
            self.wrong("check", words, "--offsets", str(counts),
                       says=["holds 3 counts, must hold 4"])
            counts.write_text("1 2 3 -4")
            self.wrong("check", words, "--offsets", str(counts),
                       says=["holds '-4', must hold whole numbers"])
            counts.write_text("0 0 0 0")
            for verb in "check", "bench":
                self.good(verb, words, "--offsets", str(counts))  # all of it is tail
                for layer in ("moe T=9 top_k=2 H=8 F=16 E=4",
                              "expert_parallel T=9 top_k=2 H=8 E=2 ranks=2 R=36"):
                    self.wrong(verb, layer, "--offsets", str(counts), prints=True,
                               says=[f"counts of '{counts}' sum to 0, must be above 0"])
        self.wrong("check", words, "--offsets", "normal", says=["'normal'", "give uniform, zipf:S"])
        self.wrong("check", words, "--offsets", "zipf:x", says=["exponent of zipf is 'x'"])
        self.wrong("check", words, "--offsets", "gamma:0",
                   says=["shape of gamma is '0'", "0.01 to 100"])
        for words in ("quantize weights N=4 K=64 E=2 along_k=mxfp8",
                      "routing forward softmax T=5 E=3 top_k=2"):
            self.wrong("check", words, "--offsets", "normal", says=["give uniform, zipf:S"])
            self.wrong("check", words, "--offsets", "zipf:nan", says=["exponent of zipf is 'nan'"])
        self.wrong("check", words, "--seed", "x", says=["--seed", "run 'cadre check --help'"])

    def test_files_and_several_problems(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "shapes"
            file.write_text("# two\noffsets counts R=9 E=2  # the first\n\noffsets ends R=9 E=2\n")
            self.assertIn("2 checked, 0 failed", self.good("check", "--file", str(file)))
            self.wrong("check", "offsets counts R=9 E=2", "--file", str(file),
                       says=["both given", "give one"])
            file.write_text("# nothing\n")
            self.wrong("check", "--file", str(file), says=["has no problem; write one a line"])
        self.wrong("check", "--file", "/nowhere", says=["'/nowhere'", "cannot be read"])
        self.assertIn("2 checked, 0 failed",
                      self.good("check", "offsets counts R=9 E=2", "offsets ends R=9 E=2"))

    def test_random_problems(self):
        text = self.good("check", "--random", DRAWN, "--seed", "2")
        self.assertTrue(text.startswith(f"0 checked, 0 failed\n{DRAWN} random problems"), text)
        self.assertIn(" failed\n", text)
        self.assertRegex(text, r"(?m)^ +\d+  fprop$")
        self.assertEqual(text, self.good("check", "--random", DRAWN, "--seed", "2"))
        both = self.good("check", "offsets counts R=9 E=2", "--random", "3")
        self.assertIn("1 checked, 0 failed", both)
        self.assertIn("3 random problems of grouped_gemm checked, 0 failed", both)
        self.wrong("check", "--random", "-1", says=["--random", "run 'cadre check --help'"])

    def test_digests_tell_bits_apart(self):
        linear = "grouped_linear R=40 N=16 K=8 E=3 recipe=mxfp8"
        words = ["check", "offsets counts R=90 E=7", linear, "--random", DRAWN, "--digest"]
        text = self.good(*words)
        hashes = re.findall(r"(?m)^digest ([0-9a-f]{16})  (.*)$", text)
        self.assertEqual(len(hashes), 2 + int(DRAWN) + 1)
        self.assertGreaterEqual(len({digest for digest, _ in hashes}),
                                int(DRAWN))  # of no rows is one hash
        self.assertTrue(hashes[0][1].endswith("offsets counts R=90 E=7 index=i32"), hashes[0])
        self.assertTrue(hashes[1][1].endswith(linear), hashes[1])
        self.assertEqual(hashes[-1][1], f"of all {2 + int(DRAWN)} problems")
        self.assertIn("same  bits in two runs  quantized        " + linear, text)
        for threads in ("1", "3"):
            self.assertEqual(text, run(*words, OMP_NUM_THREADS=threads).stdout)
        other = re.findall("digest ([0-9a-f]{16})", self.good(*words, "--seed", "2"))
        for i in (0, 1, -1):
            self.assertNotEqual(hashes[i][0], other[i])
        self.assertNotIn("digest", self.good(*words[:-1]))

    def test_layers_have_no_reference(self):
        linear = "grouped_linear R=40 N=16 K=8 E=3"
        self.assertIn("1 checked, 0 failed", self.good("check", linear))
        self.wrong("check", linear, "--only", "cpu_onednn",
                   says=["--only is 'cpu_onednn', must not be given for a layer"])

    def test_devices(self):
        words = "offsets counts R=9 E=2"
        self.assertEqual(self.good("check", words, "--device", "cpu"), self.good("check", words))
        no_gpu_here(self, "check", words)

    def test_one_implementation(self):
        words = "offsets counts R=9 E=2"
        self.assertIn("self  the reference only  offsets counts R=9 E=2",
                      self.good("check", words, "--only", "cpu_reference"))
        self.wrong("check", words, "--only", "gpu",
                   says=["implementation is 'gpu', must be one of"])
        self.wrong("check", "expert_parallel T=1 H=1 R=1", "--only", "tree",
                   says=["there is no route 'tree', only few_tokens, window"])

    def test_what_no_implementation_takes(self):
        words = "grouped_gemm fprop R=9 N=8 K=16 E=2 format=mxfp8"
        only, says = ("--only", "cpu_scattered"), f"'{words}': cpu_scattered: is for rows that are"
        with tempfile.TemporaryDirectory() as folder:
            shapes = pathlib.Path(folder) / "shapes.txt"
            shapes.write_text(words)
            for verb in "check", "bench":
                self.wrong(verb, words, *only, says=["cadre: no implementation on cpu", says],
                           code=1)
                self.wrong(verb, "--file", str(shapes), *only,
                           says=[f"{shapes}:1: no implementation on cpu", says], code=1)
                self.wrong(verb, "expert_parallel T=1 H=1 R=1 block=1",
                           says=["no route takes it on cpu | few_tokens: is for GPUs"], code=1)


class Bench(Cli):
    WORDS = "permute combine T=64 top_k=2 R=128 H=96 E=4 prob=yes"

    def test_record_is_complete(self):
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record.json"
            text = self.good("bench", self.WORDS, "--offsets", "uniform,zipf:1.2", "--repeat", "3",
                             "--json", str(record))
            answer = json.loads(record.read_text())
        self.assertEqual(list(answer), ["command", "machine", "date", "commit", "cases"])
        self.assertTrue(answer["command"].startswith("cadre bench "), answer["command"])
        self.assertRegex(answer["machine"], r", \d+ threads$")
        self.assertRegex(answer["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertEqual([c["routing"] for c in answer["cases"]], ["uniform", "zipf:1.2"])
        for case in answer["cases"]:
            self.assertEqual(case["problem"], self.WORDS.replace(" prob", " dtype=bf16 prob"))
            self.assertIn(case["problem"], text)
            self.assertEqual(set(case["us"]), {"cadre", "copy"})
            for name, median in case["us"].items():
                self.assertLessEqual(0, case["us_p10"][name])
                self.assertLessEqual(case["us_p10"][name], median)
                self.assertLessEqual(median, case["us_p90"][name])
            self.assertGreater(case["speed_of_peer"]["copy"], 0)
            self.assertLessEqual(case["error_of_bound"], 1)
            self.assertEqual(case["checked_rows"], 128)
            self.assertIn(case["plan"], ("cpu", "cpu_reference"))

    def dense_peer(self):
        """What grouped_gemm is timed beside: nothing in a build without oneDNN."""
        said = self.good("explain", "grouped_gemm wgrad R=8 N=4 K=4 E=2 format=f32")
        return set() if "this build has no oneDNN" in said else {"onednn_dense"}

    def test_grouped_gemm_runs_beside_a_dense_product(self):
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record.json"
            for formats in ("format=bf16", "format=f32 out=f32", "format=nvfp4"):
                for product in ("fprop", "dgrad", "wgrad"):
                    self.good("bench", f"grouped_gemm {product} R=64 N=48 K=32 E=4 {formats}",
                              "--repeat", "2", "--json", str(record))
                    case = json.loads(record.read_text())["cases"][0]
                    self.assertEqual(set(case["us"]), {"cadre"} | self.dense_peer())
                    for words in case["peers"].values():
                        self.assertRegex(words, r"^one product in (bf16|f32), ")
                    self.assertEqual(case["flops"], 2 * 64 * 48 * 32)
                    self.assertRegex(case["plan"], r"^cpu_(avx512|onednn|portable)(_bf16)?$")

    def test_offsets_stand_before_or_behind_the_problem(self):
        words = self.WORDS.split()
        for call in (["--offsets", "uniform,onehot", *words], ["--offsets", "uniform,onehot",
                     self.WORDS], [*words, "--offsets", "uniform,onehot"],
                     ["--offsets", "uniform", *words, "--offsets", "onehot"],
                     ["--offsets=uniform", "--offsets=onehot", self.WORDS]):
            text = self.good("bench", "--repeat", "1", *call)
            self.assertEqual(re.findall(r"offsets=(\w+)", text), ["uniform", "onehot"], call)

    def test_layers_of_a_shape_file_are_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            shapes, record = pathlib.Path(folder) / "shapes", pathlib.Path(folder) / "record.json"
            shapes.write_text(self.WORDS + "  # small block\n")
            self.good("bench", "--file", str(shapes), "--repeat", "2", "--json", str(record))
            self.assertEqual(json.loads(record.read_text())["cases"][0]["layer"], "small block")

    def test_a_problem_runs_beside_itself_with_other_words(self):
        words = "grouped_gemm fprop R=64 N=48 K=32 E=4 format=f16 out=f16"
        beside = "format=bf16 out=bf16"
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record.json"
            text = self.good("bench", words, "--repeat", "2", "--beside", beside,
                             "--json", str(record))
            case = json.loads(record.read_text())["cases"][0]
        self.assertEqual(set(case["us"]), {"cadre", f"cadre {beside}"} | self.dense_peer())
        self.assertIn("N=48 K=32 E=4 format=bf16'", case["peers"][f"cadre {beside}"])
        time = r" +\d+\.\d"
        self.assertRegex(text, rf"(?m)^  cadre {time * 5}$")
        self.assertRegex(text, rf"(?m)^  cadre {beside}{time * 3} +\d\.\d\d of it")  # no rates
        for more in "N=16", "E=2 format=bf16", "format=bf16 R=64":
            size = re.search(r"(\w+)=\d", more)[1]
            for problem in words, "grouped_linear R=64 N=48 K=32 E=4":
                self.wrong("bench", problem, "--beside", more,
                           says=[f"--beside is '{more}', must not have {size}; "])
        self.wrong("bench", words, "--beside", "format=bf17", says=["bf17"])
        self.wrong("bench", words, "--beside", "offsets", says=["offsets"])

    def test_host_time(self):
        layer = "grouped_linear R=16 N=24 K=8 E=2"
        with tempfile.TemporaryDirectory() as folder:
            shapes, record = pathlib.Path(folder) / "shapes", pathlib.Path(folder) / "record.json"
            shapes.write_text(f"{self.WORDS}\n{layer}  # small block\n")
            text = self.good("bench", "--file", str(shapes), "--host-time", "--json", str(record))
            answer = json.loads(record.read_text())
        self.assertEqual(list(answer), ["command", "machine", "date", "commit", "cases"])
        self.assertEqual([c["call"] for c in answer["cases"]], ["run", "forward", "backward"])
        self.assertEqual([c.get("layer") for c in answer["cases"]], [None] + 2 * ["small block"])
        for case in answer["cases"]:
            self.assertIn(case["problem"], text)
            self.assertLess(0, case["host_us_p10"])
            self.assertLessEqual(case["host_us_p10"], case["host_us"])
            self.assertLessEqual(case["host_us"], case["host_us_p90"])
            self.assertEqual(case["calls"], 1000)
        self.wrong("bench", "sequential | grouped_linear R=16 N=8 K=8 E=2", "--host-time",
                   says=["operation is 'sequential'"])
        self.wrong("bench", "grouped_linear R=16 N=0 K=8 E=2", "--host-time", says=["N is 0"])
        no_gpu_here(self, "bench", layer, "--host-time")

    def test_devices(self):
        self.good("bench", self.WORDS, "--device", "cpu", "--repeat", "1")
        no_gpu_here(self, "bench", self.WORDS)

    def test_one_thread(self):
        self.good("bench", self.WORDS, "--threads", "1", "--repeat", "2")

    def test_wrong_calls(self):
        self.wrong("bench", says=["give either a PROBLEM or --file"])
        self.wrong("bench", self.WORDS, "--file", "x", says=["give either a PROBLEM or --file"])
        self.wrong("bench", self.WORDS, "--json", "/nowhere/x.json",
                   says=["'/nowhere/x.json' cannot be written"])
        self.wrong("bench", self.WORDS, "--repeat", "0", says=["run 'cadre bench --help'"])
        self.wrong("bench", self.WORDS, "--offsets", "uniform,lumpy", says=["'lumpy'", "zipf:S"])
        self.wrong("bench", "permute combine T=64 top_k=2 R=128 H=0 E=4", says=["H is 0"])

    def test_a_full_disk_is_told(self):
        self.wrong("bench", self.WORDS, "--repeat", "1", "--json", "/dev/full",
                   says=["'/dev/full' could not be written"], prints=True)


class Facts(Cli):
    def test_facts_are_of_a_gpu(self):
        for word in "cpu", "tpu", "sm_90":
            self.wrong("facts", "--device", word,
                       says=[f"device: name is '{word}', must be cuda or cuda:<index>"])
        if not any(d["name"].startswith("cuda") for d in info()["devices"]):
            for words in [], ["--device", "cuda:1"]:
                done = run("facts", *words)
                self.assertIn(f"device: '{(words or ['cuda'])[-1]}' is not here; ", done.stderr)
                self.assertNotIn("cpu", done.stderr)  # which it does not take
        self.wrong("facts", "--ranks", "3", says=["--ranks: 3 not in {1,2}"])


class Page(Cli):
    @all_of_a_list
    def test_every_command_of_the_page_runs(self):
        text = (ROOT / "docs/cli.md").read_text()
        commands = [line for line in text.splitlines() if line.startswith("cadre ")]
        self.assertGreaterEqual(len(commands), 10)
        for verb in VERBS:
            self.assertIn(f"\n## {verb}\n", text)
        for command in commands:
            self.good(*shlex.split(command)[1:])


class Shapes(Cli):
    @all_of_a_list
    def test_every_shape_file_parses(self):
        files = sorted((ROOT / "bench/shapes").glob("*.txt"))
        self.assertTrue(files)
        for file in files:
            for line in file.read_text().splitlines():
                problem = line.split("#")[0].strip()
                if problem:
                    self.good("explain", problem)


if __name__ == "__main__":
    CADRE = sys.argv.pop(1)
    unittest.main(argv=[word for word in sys.argv if word != "few"])
