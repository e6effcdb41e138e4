"""Verbs that start ranks: `cli_ranks_test.py CADRE [few]`. They end when one of them does."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import cli_test

PATIENCE_S = 30  # less than the minute that ranks wait for each other
SETTLED_S = 0.5  # more than a small check takes


def ranks_of(process):
    """The processes that it has started."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if int(parent) == process.pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_running(process):
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


class Ranks(cli_test.Cli):
    WORDS = "expert_parallel T=16 top_k=2 H=24 E=2 ranks=2 R=64"
    LONG = ("bench", WORDS, "--repeat", "1000000", "--limit", "0")

    def test_explain_states_the_window(self):
        text = self.good("explain", self.WORDS)
        self.assertIn("plan       window\n", text)
        self.assertIn("window     71424 bytes a rank: 66560 of flags, 512 of routing, ", text)
        answer = json.loads(self.good("explain", self.WORDS, "--json"))
        self.assertEqual(answer["window"]["bytes"], 71424)
        self.assertEqual(answer["plan"], "window")
        built = cli_test.has_cuda()
        answer = json.loads(self.good("explain", self.WORDS, "--device", "sm_90", "--json",
                                      code=0 if built else 1))
        self.assertEqual(answer["plan"], "few_tokens" if built else None)
        self.assertEqual([r["name"] for r in cli_test.info()["ranks"]], ["expert_parallel"])

    def test_explain_takes_a_route_by_an_engine(self):
        words = self.WORDS.replace("ranks=2", "ranks=100")
        text = self.good("explain", words, "--only", "collective")
        self.assertIn("plan       collective\n", text)
        self.assertIn("host       reads how many rows ranks exchange, once a dispatch", text)
        self.assertEqual(json.loads(self.good("explain", words, "--only", "collective",
                                              "--json"))["plan"], "collective")

    def test_check_starts_the_ranks(self):
        # OpenMP's threads are there before the second rank is started.
        text = self.good("check", "grouped_linear R=40 N=16 K=8 E=3", self.WORDS,
                         self.WORDS.replace("R=64", "R=40"), "--digest")
        self.assertIn(f"same  bits as one rank, 6 routings  window  {self.WORDS}", text)
        self.assertIn("of these 2 have rows without room", text)
        self.assertIn("3 checked, 0 failed", text)
        self.good("check", self.WORDS, "--only", "window")
        text = self.good("check", f"{self.WORDS} sum=rank")
        self.assertIn("same  bits as sums by rank, 6 routings  window_sum_rank  ", text)

    def test_check_and_bench_take_a_route_by_an_engine(self):
        collective = ("--only", "collective")
        for words, whole in ((self.WORDS, f"{self.WORDS} dtype=bf16"),
                             (self.WORDS.replace("R=64", "block=32"),
                              self.WORDS.replace("R=64", "block=32 R=64 dtype=bf16"))):
            text = self.good("check", words, *collective)
            self.assertIn(f"same  bits as one rank, 6 routings  collective  {whole}\n", text)
            with tempfile.TemporaryDirectory() as folder:
                record = pathlib.Path(folder) / "record.json"
                text = self.good("bench", words, "--repeat", "3", "--json", str(record),
                                 *collective)
                cases = json.loads(record.read_text())["cases"]
            self.assertEqual([c["call"] for c in cases], ["dispatch", "collect"])
            for case in cases:
                self.assertEqual((case["plan"], case["problem"]), ("collective", whole))
                self.assertEqual(set(case["us"]), {"cadre", "copy"})
                self.assertEqual(case["crossed_bytes"], cases[0]["crossed_bytes"])
                self.assertIn(f"{case['crossed_bytes']:.0f} of them crossed", text)
        by_host = f"{self.WORDS} dtype=bf16 cross=host host_ranks=1"
        text = self.good("check", by_host, *collective)
        self.assertIn(f"same  bits as one rank, 6 routings  collective  {by_host}\n", text)
        refused = "collective: moves no codes"
        for verb in "check", "bench":
            self.wrong(verb, self.WORDS.replace("H=24", "H=128") + " x=fp8_block", *collective,
                       says=[refused], code=1)

    def test_check_and_bench_take_codes(self):
        words = self.WORDS.replace("H=24", "H=128") + " x=fp8_block scales_major=column"
        self.assertIn(f"same  bits as one rank, 6 routings  window  "
                      f"{words.replace(' x=', ' dtype=bf16 x=')}", self.good("check", words))
        self.assertIn("128 bytes a token, and 4 of scales", self.good("explain", words))
        answer = json.loads(self.good("explain", words, "--json"))
        window = answer["window"]
        self.assertEqual(window["scales"] - window["tokens"], 16 * 128)
        if cli_test.has_cuda():
            text = self.good("explain", words, "--device", "sm_90")
            self.assertIn("route      few_tokens: every rank maps the memory of all, and an "
                          "exchange is one kernel", text)
            self.assertIn("128 bytes a token, and 4 of scales", text)
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record.json"
            self.good("bench", words, "--repeat", "3", "--json", str(record))
            dispatch, collect = json.loads(record.read_text())["cases"]
        self.assertEqual(dispatch["delivered_bytes"] / collect["delivered_bytes"], 132 / 256)

    def test_bench_times_both_exchanges(self):
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record.json"
            text = self.good("bench", self.WORDS, "--repeat", "3", "--json", str(record))
            cases = json.loads(record.read_text())["cases"]
        self.assertEqual([c["call"] for c in cases], ["dispatch", "collect"])
        for case in cases:
            self.assertEqual(set(case["us"]), {"cadre", "copy"})
            self.assertLess(0, case["crossed_bytes"])
            self.assertLess(case["crossed_bytes"], case["delivered_bytes"])
            self.assertIn(f"{case['delivered_bytes']:.0f} bytes delivered", text)
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record.json"
            text = self.good("bench", self.WORDS.replace("T=16", "T=0"), "--repeat", "1",
                             "--json", str(record))
            self.assertEqual(text.count("  0 bytes delivered, 0 of them crossed"), 2, text)
            for case in json.loads(record.read_text())["cases"]:
                self.assertEqual((case["delivered_bytes"], case["crossed_bytes"]), (0, 0))
                self.assertNotIn("kept_bytes", case)
        self.wrong("bench", self.WORDS, "--beside", "top_k=1",
                   says=["--beside is 'top_k=1', must not be given for ranks"])

    def started(self):
        """A long run, and its ranks once those are there that are timed, and not checked before."""
        process = subprocess.Popen([cli_test.CADRE, *self.LONG], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        ranks, since = [], time.monotonic()
        while process.poll() is None:
            now = ranks_of(process)
            if now != ranks or len(now) != 2:
                ranks, since = now, time.monotonic()
            if time.monotonic() > since + SETTLED_S:
                return process, ranks
            time.sleep(0.01)
        self.fail(process.communicate())

    def test_a_rank_that_is_killed_is_named_and_ends_the_others(self):
        process, ranks = self.started()
        os.kill(ranks[0], signal.SIGKILL)
        out, err = process.communicate()
        self.assertEqual((process.returncode, out), (2, ""))
        self.assertRegex(err, r"^cadre: .*expert_parallel: rank [01] was killed by signal 9 in .*; "
                              r"the other ranks were ended.*\n$")
        self.assertFalse(any(os.path.exists(f"/proc/{rank}") for rank in ranks))

    def test_ranks_end_with_the_program(self):
        process, ranks = self.started()
        process.kill()
        process.wait()
        until = time.monotonic() + PATIENCE_S
        while any(is_running(rank) for rank in ranks) and time.monotonic() < until:
            time.sleep(0.01)
        left = [rank for rank in ranks if is_running(rank)]
        for rank in left:
            os.kill(rank, signal.SIGKILL)
        process.communicate()
        self.assertEqual(left, [])


if __name__ == "__main__":
    cli_test.CADRE = sys.argv.pop(1)
    unittest.main(argv=[word for word in sys.argv if word != "few"])
