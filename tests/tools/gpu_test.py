"""tools/gpu.sh with programs of its own: every step runs, whatever failed before, and leaves its
record."""
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = '{"machine": "m", "commit": "c", "cases": []}'
CADRE = f"""#!/bin/sh
case "$*" in
  *--host-time*) echo "no device" >&2; exit 2 ;;
esac
while [ $# -gt 0 ]; do
  [ "$1" = --json ] && echo '{RECORD}' >"$2"
  shift
done
exit 0
"""


# Stands for timeout(1) where its time is over: no test waits for a clock.
TIMEOUT = """#!/bin/sh
[ "$1 $2" = "-k 5" ] && echo "killed after $3 s"
exit 124
"""


PYTHON = f"""#!/bin/sh
case "$*" in
  bench/digest.py*) exit 0 ;;
  *torch.distributed.run* | *pytest*) echo "$NCCL_NVLS_ENABLE $*" >>words.txt ;;
esac
while [ $# -gt 0 ]; do
  [ "$1" = --json ] && echo '{RECORD}' >"$2"
  shift
done
exit 0
"""


class Gpu(unittest.TestCase):
    def setUp(self):
        self.top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.top)
        for file in ("tools/gpu.sh", "bench/digest.py"):
            (self.top / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, self.top / file)
        self.program("cadre", CADRE)
        (self.top / "programs/commit").write_text("0123456789ab\n")

    def program(self, name, text):
        path = self.top / "programs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run_steps(self, *steps, seconds=0):
        """With `seconds` gone when the script starts."""
        path = f"{self.top / 'programs/bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run([self.top / "tools/gpu.sh", "-b", "programs", "-o", "out", *steps],
                              capture_output=True, text=True,
                              env=os.environ | {"PATH": path, "SECONDS": str(seconds)})
        self.assertEqual(done.stderr, "")
        return done

    def records(self):
        with tarfile.open(self.top / "out/records.tar.gz") as archive:
            return sorted(name for name in archive.getnames() if name != ".")

    def test_a_failure_stops_nothing_and_is_told(self):
        self.program("tests/first_on_device_test", "#!/bin/sh\necho wrong sum\nexit 3\n")
        self.program("tests/second_test_on_device", "#!/bin/sh\nexit 0\n")
        self.program("tests/plan_test", "#!/bin/sh\nexit 9\n")
        done = self.run_steps("tests", "host", "facts", "nonsense")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"test first_on_device_test: FAILED with 3, \d+ s\n    wrong")
        self.assertRegex(done.stdout, r"test second_test_on_device: good, ")
        self.assertNotIn("plan_test", done.stdout)
        self.assertRegex(done.stdout, r"host: FAILED with 2, \d+ s\n    no device")
        self.assertIn("facts: good, ", done.stdout)
        self.assertIn("nonsense: NO SUCH STEP", done.stdout)
        self.assertEqual(self.records(), ["./cpu-facts.json"])
        self.assertIn("wrong sum", (self.top / "out/log.txt").read_text())
        self.assertIn("host: FAILED", (self.top / "out/summary.txt").read_text())

    def test_what_skips_itself_is_not_good(self):
        self.program("tests/first_on_device_test", "#!/bin/sh\necho '[  SKIPPED ] no GPU here'\n")
        done = self.run_steps("tests")
        self.assertIn("first_on_device_test: SKIPPED, at least in part", done.stdout)
        self.assertEqual(done.returncode, 1)

    def test_all_good(self):
        done = self.run_steps("gemm", "few", "other")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(self.records(), [f"./cpu-grouped-gemm{topic}.json"
                                          for topic in ("-few-tokens", "-other-layers", "")])

    def test_two_ranks_run_without_multicast(self):
        self.program("bin/python3", PYTHON)
        done = self.run_steps("torch_expert_parallel", "torch_expert_layer", "expert_parallel",
                              "soak", "lost_ranks")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(self.records(), [f"./cpu-expert-{topic}.json" for topic in (
            "layer-torch", "parallel-torch", "parallel")])
        lines = (self.top / "words.txt").read_text().splitlines()
        two = "^0 -m torch.distributed.run --standalone --nproc-per-node 2 "
        for line, words in zip(lines, (
                f"{two}bench/peers/torch_expert_parallel.py --commit 0123456789ab --file",
                f"{two}bench/peers/torch_expert_layer.py --commit 0123456789ab --file",
                f"{two}tests/torch/expert_parallel_soak.py --exchanges 100000 --replays 10000 ",
                "^0 -m pytest .*/test_expert_parallel_lost_ranks.py$"), strict=True):
            self.assertRegex(line, words)

    def test_a_step_that_does_not_end_is_stopped(self):
        self.program("bin/timeout", TIMEOUT)
        for left, most in ((100000, 400), (200, 200)):  # what the step may take, or what is left
            done = self.run_steps("-t", "100000", "f16", seconds=100000 - left)
            self.assertIn("f16: STOPPED by its time limit", done.stdout)
            after = int(re.search(r"\n    killed after (\d+) s\n", done.stdout)[1])
            self.assertLessEqual(after, most)
            self.assertGreaterEqual(after, 10)
            self.assertEqual(done.returncode, 1)

    def test_what_no_longer_fits_is_left_out(self):
        done = self.run_steps("-t", "100000", "f16", "facts", seconds=100000 - 9)
        self.assertEqual(done.stdout.count("NOT RUN, no time left"), 2)
        self.assertEqual(done.returncode, 1)

    def test_without_a_step_it_says_what_there_is(self):
        done = subprocess.run([self.top / "tools/gpu.sh"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("usage: tools/gpu.sh", done.stdout)
        self.assertIn("racecheck", done.stdout)


if __name__ == "__main__":
    unittest.main()
