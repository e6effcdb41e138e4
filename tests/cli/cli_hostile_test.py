"""What nobody should type: `cli_hostile_test.py CADRE [few]`. Calls end soon: code 2 and one line.

Numbers beyond 2^31 and 2^63, files that never end, seeds that do not fit, a full disk.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import cli_test

HUGE = (2**31, 2**62) if cli_test.FEW else (2**31, 2**32, 2**43, 2**61, 2**62, 2**63 - 1)
GEMM = "grouped_gemm fprop R=64 N=32 K=16 E=4"


class Numbers(cli_test.Cli):
    def ends_in_words(self, *words):
        """Good, or refused in one line; nothing crashes, and no size is negative."""
        done = cli_test.run(*words)
        self.assertIn(done.returncode, (0, 2), (words, done.stderr))
        self.assertNotRegex(done.stdout, r" -\d", words)
        self.assertEqual(done.stderr.count("\n"), 1 if done.returncode else 0, (words, done.stderr))

    def test_explain(self):
        for value in HUGE:
            for name, usual in (("N", "32"), ("K", "16")):
                for words in (GEMM, GEMM.replace("fprop", "wgrad"), GEMM + " format=nvfp4",
                              GEMM + " format=f32 out=f32"):
                    problem = words.replace(f"{name}={usual}", f"{name}={value}")
                    self.ends_in_words("explain", problem)
            self.ends_in_words("explain",
                               f"grouped_gemm wgrad R={2**31 - 1} N={value} K={value} E=4")
            self.ends_in_words("explain", f"grouped_linear R=64 N={value} K=16 E=4")
            self.ends_in_words("explain", f"grouped_mlp R=64 H=16 F={value} E=4")

    def test_the_field_is_named(self):
        for verb in "explain", "check", "bench":
            self.wrong(verb, f"grouped_gemm fprop R=64 N={2**62} K=16 E=4",
                       says=[f"R * N is 64 * {2**62}, must be at most 2^44"])
            self.wrong(verb, f"permute permute T=1 top_k=1 R=1 H={2**62} E=4",
                       says=[f"T * H is 1 * {2**62}, must be at most 2^44"])
            self.wrong(verb, f"offsets counts R=9 E={2**31 - 1}",
                       says=[f"E is {2**31 - 1}, must be below 2^24"])

    def test_more_than_the_memory(self):
        problem = f"bias_grad R=1 N={2**41} E=4"
        for verb in "check", "bench":
            self.wrong(verb, problem, "--limit", "0",
                       says=["tensors of the problem need ", " MB, must be at most "])

    def test_what_would_take_too_long(self):
        long = ["offsets counts R=2147483647 E=4",
                "routing forward softmax T=9000000 E=4096 top_k=64",
                "grouped_gemm fprop R=8000000 N=16384 K=8192 E=4",
                "activation forward silu R=9000000 F=99999 E=4", "bias_grad R=9 N=9999999 E=99999",
                "permute permute T=99000000 top_k=1 R=99000000 H=99999 E=4",
                "quantize weights N=99999 K=99999 E=999 along_k=mxfp8 role=w",
                "dequantize weights N=99999 K=99999 E=999 format=mxfp8"]
        layers = ["grouped_linear R=9000000 N=16384 K=8192 E=4",
                  "grouped_mlp R=9000000 H=16384 F=8192 E=4",
                  "sequential | grouped_linear R=9000000 N=16384 K=8192 E=4"]
        too_long = r"cadre: \w+: the problem would take about \d+ s here, must be at most "
        for words in (*(["check", problem] for problem in long + layers),
                      ["check", "--random", "1000000"], ["bench", long[2], "--repeat", "99"],
                      ["bench", layers[0], "--host-time"], ["bench", layers[1], "--host-time"]):
            done = cli_test.run(*words, "--limit", "60")
            self.assertEqual(done.returncode, 2, (words, done.stderr))
            self.assertRegex(done.stderr, too_long)
            self.assertEqual(done.stdout, "")

    def test_seeds(self):
        for verb in "check", "bench":
            for seed in "-1", str(2**64), str(2**32), "1.5", "0x1", "":
                self.wrong(verb, "offsets counts R=9 E=2", "--seed", seed,
                           says=["--seed", "must be a whole number from 0 to 4294967295"])
        self.good("check", "offsets counts R=9 E=2", "--seed", str(2**32 - 1))


class Words(cli_test.Cli):
    def test_empty_values(self):
        for verb, option in (("check", "--file"), ("check", "--only"), ("check", "--device"),
                             ("bench", "--json"), ("bench", "--beside"), ("train", "--resume"),
                             ("train", "--out"), ("train", "--steps"), ("train", "--lr")):
            words = ["README.md"] if verb == "train" else ["offsets counts R=9 E=2"]
            self.wrong(verb, *words, option, "", says=[f"{option} is '', must not be empty"])

    def test_what_is_no_text_does_not_reach_the_terminal(self):
        done = cli_test.run("explain", "offsets counts \x1b[31m=1")
        self.assertEqual(done.returncode, 2)
        self.assertIn("name is '·[31m'", done.stderr)
        done = subprocess.run([cli_test.CADRE, "explain", b"caf\xe9"], capture_output=True)
        self.assertIn("first word is 'caf·'", done.stderr.decode())


class Files(cli_test.Cli):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def test_counts_that_overflow(self):
        counts = self.path / "counts"
        counts.write_text(f"{2**63 - 1} {2**63 - 1} 4 4")
        for words in "activation forward silu R=64 F=9 E=4", "offsets counts R=9 E=4":
            self.wrong("check", words, "--offsets", str(counts), says=["below 2^31"])
        counts.write_text(f"{2**31 - 1} {2**31 - 1} 4 4")
        self.wrong("check", "offsets counts R=9 E=4", "--offsets", str(counts),
                   says=[f"sum to {2**32 + 6}, must be R = 9 or less"])

    def test_a_zero_byte(self):
        file = self.path / "file"
        for content in b"4 5\0", b"4 5\n# \0 twelve", b"4\x005 x":
            file.write_bytes(content)
            says = f"byte {content.index(0)} of '{file}' is zero, must be text"
            self.wrong("check", "offsets counts R=9 E=2", "--offsets", str(file),
                       says=["offsets: " + says])
            self.wrong("check", "--file", str(file), says=["shape file: " + says])

    def test_what_never_ends(self):
        pipe = self.path / "pipe"
        os.mkfifo(pipe)
        for file in str(pipe), "/dev/zero", str(self.path):
            self.wrong("check", "offsets counts R=9 E=2", "--offsets", file,
                       says=[f"offsets: '{file}' is no regular file"])
            self.wrong("check", "--file", file, says=[f"shape file: '{file}' is no regular file"])
        large = self.path / "large"
        with open(large, "wb") as file:
            file.truncate(2**30)
        self.wrong("check", "--file", str(large), says=[f"has {2**30} bytes, must be at most"])

    def test_a_shape_file_is_named_with_its_line(self):
        shapes = self.path / "shapes"
        shapes.write_text("# one\noffsets counts R=9 E=2\n\noffsets counts R=x E=2\n")
        for verb in "check", "bench":
            self.wrong(verb, "--file", str(shapes), prints=True, says=[f"{shapes}:4: ", "R is 'x'"])
        shapes.write_text("sequential R=16\n")
        self.wrong("bench", "--host-time", "--file", str(shapes), says=[f"{shapes}:1: "])

    def test_an_old_record_stays_until_there_is_a_new_one(self):
        record = self.path / "record.json"
        record.write_text("precious" * 1000)
        layer, wrong = "grouped_linear R=9 N=8 K=16 E=2", "grouped_linear R=9 N=0 K=16 E=2"
        self.wrong("bench", wrong, "--host-time", "--json", str(record), says=["N is 0"])
        self.assertEqual(record.read_text(), "precious" * 1000)
        self.good("bench", layer, "--host-time", "--json", str(record))
        self.assertEqual(len(json.loads(record.read_text())["cases"]), 2)

    def test_what_times_of_the_host_do_not_hear(self):
        layer = "grouped_linear R=9 N=8 K=16 E=2"
        for words in (["--only", "cpu_reference"], ["--beside", "R=3"], ["--repeat", "2"],
                      ["--load", "0"]):
            self.wrong("bench", layer, "--host-time", *words,
                       says=[f"{words[0]} is given, must not be with --host-time"])
        self.wrong("bench", layer, "--host-time", "--offsets", "uniform,onehot",
                   says=["--offsets are 2, must be one with --host-time"])
        self.good("bench", layer, "--host-time", "--offsets", "onehot")

    def test_numbers_are_decimal(self):
        problem = "offsets counts R=9 E=2"
        for words in (["check", problem, "--limit", "0x10"], ["bench", problem, "--repeat", " 4"],
                      ["bench", problem, "--load", "nan"], ["bench", problem, "--threads", "+1"],
                      ["train", "--steps", "0100x"], ["train", "--lr", "0x1p-3"]):
            self.wrong(*words, says=[f"{words[-2]}: '{words[-1]}', must be "])
        self.assertIn("10 random problems", self.good("check", "--random", "010"))
        drawn = "quantize rows R=64 C=64 E=2 along_k=mxfp8"
        octal, ten, eight = (self.good("check", drawn, "--digest", "--seed", seed)
                             for seed in ("010", "10", "8"))
        self.assertEqual(octal, ten)
        self.assertNotEqual(octal, eight)

    def test_an_implementation_that_random_problems_have_not(self):
        self.wrong("check", "--random", "1", "--only", "nonsense", prints=True,
                   says=["implementation is 'nonsense', must be one of "])

    def test_a_record_for_a_pipe(self):
        pipe = self.path / "pipe"
        os.mkfifo(pipe)
        words = ["bench", "offsets counts R=9 E=2", "--repeat", "1", "--json"]
        self.wrong(*words, str(pipe), says=["cannot be written"])
        out, into = os.pipe()
        with open(out) as reader:
            done = subprocess.run([cli_test.CADRE, *words, f"/dev/fd/{into}"], pass_fds=[into],
                                  stdout=subprocess.DEVNULL)
            os.close(into)
            self.assertEqual(done.returncode, 0)
            self.assertEqual(len(json.load(reader)["cases"]), 1)

    def test_a_record_of_a_command_that_is_no_text(self):
        counts = os.fsencode(self.path) + b"/counts\xff"
        with open(counts, "w") as file:
            file.write("4 5")
        record = self.path / "record.json"
        done = subprocess.run([cli_test.CADRE, "bench", "offsets counts R=9 E=2", "--repeat", "1",
                               "--offsets", counts, "--json", record],
                              capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertIn("/counts\ufffd", json.loads(record.read_text())["command"])

    def test_the_command_of_a_record_can_be_pasted(self):
        problem = "sequential | activation forward relu R=9 F=8 E=2"
        for name in "a b.json", "$HOME;#", "it's", '"\\`!*', "+plain-1.json":
            words = ["bench", problem, "--repeat", "1", "--json", name]
            done = subprocess.run([os.path.abspath(cli_test.CADRE), *words], cwd=self.path,
                                  capture_output=True)
            self.assertEqual((done.returncode, done.stderr), (0, b""), name)
            command = json.loads((self.path / name).read_text())["command"]
            said = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], cwd=self.path,
                                  capture_output=True, text=True).stdout
            self.assertEqual(said.splitlines(), ["cadre", *words])
        self.assertEqual(command, f"cadre bench '{problem}' --repeat 1 --json +plain-1.json")

    def test_a_full_disk_behind_stdout(self):
        for words in (["info"], ["--help"], ["check", "offsets counts R=9 E=2"],
                      ["explain", "offsets counts R=9 E=2"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([cli_test.CADRE, *words], stdout=full, text=True,
                                      stderr=subprocess.PIPE)
            self.assertEqual(done.returncode, 2, words)
            self.assertIn("standard output could not be written", done.stderr)


if __name__ == "__main__":
    cli_test.CADRE = sys.argv.pop(1)
    unittest.main(argv=[word for word in sys.argv if word != "few"])
