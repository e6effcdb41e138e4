"""cadre train as a user sees it: exit codes, messages, files, Ctrl-C, resume, full disks.

usage: train_command_test.py CADRE [few] [TEST...]

With `few`, for a sanitized CADRE whose steps take ten times longer, runs to interrupt are shorter.
"""
import json
import os
import pathlib
import pty
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

CADRE = os.path.abspath(sys.argv.pop(1))
FEW = sys.argv[1:2] == ["few"] and bool(sys.argv.pop(1))
TINY = ["--window", "3", "--hidden", "16", "--features", "16", "--experts", "4", "--rows", "32",
        "--eval-every", "50"]
# Tests run side by side, so one thread each; that the bits do not depend on it has its own test.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
WORDS = ["the ", "rows ", "of an ", "expert ", "are ", "few\n"]


def prose(size):
    words, number = "", 1
    while len(words) < size:
        number = number * 48271 % 2147483647
        words += WORDS[number % 6]
    return words[:size]


def has_gpu():
    info = subprocess.run([CADRE, "info", "--json"], capture_output=True, text=True)
    return any(d["name"].startswith("cuda") for d in json.loads(info.stdout)["devices"])


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="cadre_train_")
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)
        self.text = self.path / "text.txt"
        self.text.write_text(prose(6000))
        self.out = self.path / "out"

    def train(self, *words, **options):
        options.setdefault("cwd", self.path)
        options.setdefault("env", ONE_THREAD)
        command = [CADRE, "train", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, **options)

    def train_text(self, *words, out=None, steps=20, **options):
        return self.train(self.text, *TINY, "--steps", steps, "--out", out or self.out, *words,
                          **options)

    def assert_good(self, done):
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertEqual(done.stderr, "")

    def assert_refused(self, done, *parts):
        self.assertEqual(done.returncode, 2, done.stderr + done.stdout)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)

    def start_and_signal(self, words, wait_for, number):
        """Starts a run, sends the signal once `wait_for` is printed, returns code and output."""
        command = [CADRE, "train", *map(str, words)]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.path,
                               env=ONE_THREAD)
        seen = ""
        for line in run.stdout:
            seen += line
            if wait_for in line:
                break
        run.send_signal(number)
        seen += run.stdout.read()
        run.stdout.close()
        return run.wait(), seen

    def wait_for_checkpoint(self, run):
        while not (self.out / "bf16.safetensors").exists():
            self.assertIsNone(run.poll(), "ended without a checkpoint")
            time.sleep(0.01)


class Output(Case):
    def test_trains_reports_and_samples(self):
        done = self.train_text("--recipe", "bf16,mxfp8", "--prompt", "the ", "--verify-resume")
        self.assert_good(done)
        self.assertNotIn("\r", done.stdout)
        self.assertEqual(done.stdout.count("mxfp8  step "), 10)
        self.assertEqual(done.stdout.count("equal bit for bit"), 2)
        self.assertIn("-- mxfp8 writes\nthe ", done.stdout)
        names = sorted(p.name for p in self.out.iterdir())
        self.assertEqual(names, ["bf16.safetensors", "mxfp8.safetensors", "report.html",
                                 "results.json"])
        page = (self.out / "report.html").read_text()
        self.assertNotIn("http", page)
        results = json.loads((self.out / "results.json").read_text())
        self.assertEqual([run["recipe"] for run in results["runs"]], ["bf16", "mxfp8"])
        self.assertTrue(all(run["resumes_equal"] for run in results["runs"]))
        for run in results["runs"]:
            self.assertEqual(run["device"], "CPU")
            self.assertRegex(run["plans"], r"^activation \w+, grouped_gemm \w+.*, routing \w+$")
            self.assertIn(f'\n{run["recipe"]} runs on CPU: {run["plans"]}\n', done.stdout)
            self.assertIn(f'<b>{run["recipe"]}</b> on CPU: {run["plans"]}', page)
        self.assertIn("bytes on CPU; once for", page)

    def test_draws_a_bar_on_a_terminal(self):
        master, slave = pty.openpty()
        command = [CADRE, "train", str(self.text), *TINY, "--steps", "20", "--out", str(self.out)]
        run = subprocess.Popen(command, stdout=slave, stderr=slave, cwd=self.path,
                               env=ONE_THREAD)
        os.close(slave)
        seen = b""
        try:
            while piece := os.read(master, 65536):
                seen += piece
        except OSError:  # nobody has the other end any more
            pass
        os.close(master)
        self.assertEqual(run.wait(), 0, seen)
        self.assertIn(b"\rbf16 ", seen)
        self.assertIn(b"rows/s", seen)
        self.assertIn(b" left", seen)

    def test_same_bits_for_any_number_of_threads(self):
        for threads in "1", "3":
            done = self.train_text("--recipe", "nvfp4", out=self.path / threads,
                                   env={**os.environ, "OMP_NUM_THREADS": threads})
            self.assert_good(done)
        one, three = ((self.path / t / "nvfp4.safetensors").read_bytes() for t in "13")
        self.assertEqual(one, three)

    def test_help_teaches(self):
        done = self.train("--help")
        self.assert_good(done)
        for part in ("--resume", "--recipe", "nvfp4", "--balance", "Ctrl-C", "cadre train --resume",
                     "--device", "cpu, cuda or cuda:1", "only near on two"):
            self.assertIn(part, done.stdout)


class Refusals(Case):
    def test_words(self):
        for words, parts in [
            (["--recipe", "bf17"], ["bf17", "mxfp8"]),
            (["--recipe", "bf16,bf16"], ["recipe bf16 stands twice"]),
            (["--recipe", ""], ["recipe"]),
            (["--steps", "0"], ["--steps is 0, must be 1 to"]),
            (["--steps", "-5"], ["--steps is -5, must be 1 to"]),
            (["--steps", "many"], ["--steps", "many"]),
            (["--steps", "99999999999999999999"], ["--steps"]),
            (["--lr", "nan"], ["--lr: 'nan', must be a number"]),
            (["--lr", "0"], ["--lr is 0, must be"]),
            (["--experts", "0"], ["--experts is 0, must be 1 to 1024"]),
            (["--top-k", "9"], ["--top-k is 9, must be at most --experts, which is 8"]),
            (["--hidden", "20"], ["--hidden is 20, must be a multiple of 16"]),
            (["--held-out", "1"], ["--held-out is 1, must be 0.001 to 0.5"]),
            (["--save-every", "0"], ["--save-every is 0, must be 1 or more"]),
            (["--sample", "-1"], ["--sample is -1, must be 0 to"]),
            (["--temperature", "-1"], ["--temperature is -1, must be 0 to"]),
            (["--hidden", "8192", "--features", "32768"], ["parameters, must be at most 10000000"]),
            (["--no-such-option"], ["--no-such-option"]),
            (["--device", "tpu"], ["device: name is 'tpu', must be cpu, cuda or cuda:<index>"]),
            (["--device", "sm_90"], ["'sm_90'", "only 'cadre explain' plans for"]),
            (["--resume", "nowhere"], ["nowhere does not exist; name the --out folder"]),
        ]:
            with self.subTest(words):
                done = self.train(self.text, "--out", self.out, *words)
                self.assert_refused(done, *parts)
                self.assertFalse(self.out.exists())

    def test_gpu(self):
        if has_gpu():
            self.skipTest("a GPU is here")
        for word in "cuda", "cuda:1":
            done = self.train(self.text, "--out", self.out, "--device", word)
            self.assert_refused(done, f"device: '{word}' is not here; ", "give --device cpu")
            self.assertEqual(done.stdout, "")
            self.assertFalse(self.out.exists())

    def test_text(self):
        def file(name, content):
            (self.path / name).write_bytes(content)
            return name

        (self.path / "nothing").mkdir()
        (self.path / "binaries").mkdir()
        file("binaries/a", bytes(5000))
        for path, parts in [
            ("missing.txt", ["path 'missing.txt' does not exist", "check the spelling"]),
            (file("empty.txt", b""), ["empty.txt is no text: it is empty"]),
            (file("junk.bin", os.urandom(5000)), ["junk.bin is no text"]),
            (file("program", pathlib.Path(CADRE).read_bytes()[:9000]), ["is no text: byte"]),
            (file("short.txt", b"hello"), ["text has 5 bytes, must be at least 2048"]),
            ("nothing", ["text has 0 bytes"]),
            ("binaries", ["text has 0 bytes"]),
            ("/dev/zero", ["is no regular file"]),
            ("/proc/self/mem", ["cannot be read: Input/output error"]),
        ]:
            with self.subTest(path):
                done = self.train(path, *TINY, "--steps", 5, "--out", self.out)
                self.assert_refused(done, *parts)
                self.assertFalse(self.out.exists())

    @unittest.skipIf(os.geteuid() == 0, "root may read every file")
    def test_unreadable_text(self):
        self.text.chmod(0)
        self.assert_refused(self.train_text(), "cannot be opened: Permission denied")

    def test_no_text_outside_of_the_repository(self):
        program = self.path / "cadre"
        program.write_bytes(pathlib.Path(CADRE).read_bytes())
        program.chmod(0o755)
        done = subprocess.run([program, "train", "--steps", "5"], capture_output=True, text=True,
                              cwd=self.path)
        self.assert_refused(done, "no text is named", "cadre train PATH...")

    def test_out_is_a_file(self):
        self.out.write_text("mine")
        self.assert_refused(self.train_text(), "out cannot be made", "--out")
        self.assertEqual(self.out.read_text(), "mine")

    def test_foreign_files_are_not_overwritten(self):
        self.out.mkdir()
        checkpoint = self.out / "bf16.safetensors"
        header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        for content in b"somebody's notes", len(header).to_bytes(8, "little") + header + bytes(4):
            checkpoint.write_bytes(content)
            self.assert_refused(self.train_text(), "checkpoint", "bf16.safetensors")
            self.assert_refused(self.train_text("--overwrite"), "checkpoint")
            self.assert_refused(self.train("--resume", self.out), "checkpoint")
            self.assertEqual(checkpoint.read_bytes(), content)
        checkpoint.unlink()
        for name, content in [("report.html", "<!doctype html>\n<html lang='en'><head>"),
                              ("results.json", '{"runs": 3}'), ("results.json", "[]"),
                              ("results.json", ""), ("results.json", "{")]:
            (self.out / name).write_text(content)
            for words in [], ["--overwrite"]:
                self.assert_refused(self.train_text(*words), f"{self.out / name} is no file of "
                                    "cadre train, must be one to be replaced; move it away")
            self.assertEqual((self.out / name).read_text(), content)
            (self.out / name).unlink()
        self.assert_good(self.train_text())
        self.assert_good(self.train_text("--overwrite"))


@unittest.skipUnless(has_gpu(), "no GPU here")
class Gpu(Case):
    def test_trains_resumes_and_says_where(self):
        done = self.train_text("--device", "cuda", "--verify-resume", "--sample", 5, steps=3)
        self.assert_good(done)
        self.assertIn("equal bit for bit", done.stdout)
        [run] = json.loads((self.out / "results.json").read_text())["runs"]
        self.assertRegex(run["device"], r"\(sm_\d+\)$")
        self.assertRegex(run["plans"], r"^activation cuda_activation, grouped_gemm .*sm90_")
        self.assertIn(f'\nbf16 runs on {run["device"]}: {run["plans"]}\n', done.stdout)
        page = (self.out / "report.html").read_text()
        self.assertIn(f'bytes on {run["device"]}; once for', page)

    def test_trains_in_eight_and_four_bits(self):
        done = self.train_text("--device", "cuda", "--recipe", "mxfp8,nvfp4", "--sample", 0,
                               steps=2)
        self.assert_good(done)
        for run in json.loads((self.out / "results.json").read_text())["runs"]:
            self.assertRegex(run["plans"], r"quantize .*cuda_quantize")

    def test_goes_on_on_the_cpu_and_back(self):
        words = [CADRE, "train", self.text, *TINY, "--steps", 100000, "--out", self.out,
                 "--device", "cuda", "--save-every", 1]
        run = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True,
                               cwd=self.path, env=ONE_THREAD)
        self.wait_for_checkpoint(run)
        run.send_signal(signal.SIGINT)
        seen = run.communicate()[0]
        self.assertEqual(run.returncode, 130, seen)
        self.assertIn(f"cadre train --resume {self.out} --device cuda:0\n", seen)
        for device in "cpu", "cuda":
            code, seen = self.start_and_signal(["--resume", self.out, "--device", device],
                                               "goes on at step ", signal.SIGINT)
            self.assertEqual(code, 130, seen)


class Overwriting(Case):
    def test_a_run_that_was_to_replace_another_goes_on(self):
        """The other's report is gone when it begins."""
        self.assert_good(self.train_text())
        words = [self.text, *TINY, "--steps", 100000, "--out", self.out, "--sample", 0,
                 "--overwrite"]
        code, seen = self.start_and_signal(words, "bf16  step ", signal.SIGINT)
        self.assertEqual(code, 130, seen)
        self.assertFalse((self.out / "results.json").exists())
        self.assertFalse((self.out / "report.html").exists())
        code, seen = self.start_and_signal(["--resume", self.out], "goes on at step ",
                                           signal.SIGINT)
        self.assertEqual(code, 130, seen)


class Interruption(Case):
    STEPS = 200 if FEW else 1000  # after a tenth it is interrupted, which takes a moment
    TENTH = f"step {STEPS // 10}/"

    def words(self, out, *more):
        return [self.text, *TINY, "--recipe", "bf16,nvfp4", "--steps", self.STEPS, "--out", out,
                "--sample", 0, *more]

    def test_resumed_runs_equal_the_uninterrupted_one(self):
        whole = self.path / "whole"
        self.assert_good(self.train(*self.words(whole)))
        code, seen = self.start_and_signal(self.words(self.out), "bf16  " + self.TENTH,
                                           signal.SIGINT)
        self.assertEqual(code, 130, seen)
        self.assertIn("interrupted: bf16 is at step ", seen)
        self.assertIn(f"cadre train --resume {self.out}", seen)

        self.assert_refused(self.train(*self.words(self.out)), "holds an unfinished run, step ",
                            f"--resume {self.out / 'bf16.safetensors'} to go on", "--overwrite")
        self.assert_refused(self.train("--resume", self.out, "--steps", 7),
                            "--steps differs from the checkpoint's")
        self.assert_refused(self.train("--resume", self.out, "--recipe", "bf16"), "--recipe is")
        self.assert_refused(self.train("--resume", self.out, "--out", "x"), "--out is x")
        self.text.write_text(prose(5999))
        self.assert_refused(self.train("--resume", self.out), "belongs to a run with other text")
        self.text.write_text(prose(6000))

        code, seen = self.start_and_signal(["--resume", self.out], "nvfp4  " + self.TENTH,
                                           signal.SIGTERM)
        self.assertEqual(code, 143, seen)
        self.assertIn("bf16 goes on at step ", seen)
        done = self.train("--resume", self.out / "nvfp4.safetensors", self.text)
        self.assert_good(done)
        self.assertIn("bf16 is finished already", done.stdout)
        for name in "bf16.safetensors", "nvfp4.safetensors":
            self.assertEqual((self.out / name).read_bytes(), (whole / name).read_bytes(), name)
        again = self.train("--resume", self.out)
        self.assert_good(again)
        self.assertIn("nvfp4 is finished already", again.stdout)
        self.assert_refused(self.train("--resume", self.out, "--verify-resume"),
                            f"train: run is at step {self.STEPS}, must be before step ")

    def test_what_is_past_its_step_is_not_verified_and_says_so(self):
        self.assert_good(self.train_text("--recipe", "bf16,nvfp4"))
        for name in "nvfp4.safetensors", "report.html", "results.json":
            (self.out / name).unlink()
        done = self.train("--resume", self.out, "--verify-resume")
        self.assert_good(done)
        self.assertIn("bf16: not resumed to compare, it was past step 19 already", done.stdout)
        self.assertIn("nvfp4: resumed from step 19, equal bit for bit", done.stdout)
        self.assert_refused(self.train_text("--verify-resume", out=self.path / "one", steps=1),
                            "--steps is 1, must be 2 or more with --verify-resume")

    def words_until_evaluation(self, *more):
        """Of a run whose last evaluation takes long, and its steps do not."""
        self.text.write_text(prose(100_000 if FEW else 1_000_000))
        return [self.text, *TINY, "--steps", 2, "--held-out", 0.5, "--out", self.out,
                "--sample", 0, *more]

    def test_the_last_evaluation_hears_signals(self):
        code, seen = self.start_and_signal(self.words_until_evaluation(), "step 2/2",
                                           signal.SIGINT)
        self.assertEqual(code, 130, seen)
        self.assertIn(f"interrupted: bf16 is at step 2 of 2, saved in {self.out}", seen)
        self.assertNotIn("report: ", seen)
        done = self.train("--resume", self.out)
        self.assert_good(done)
        self.assertIn("bf16 goes on at step 2 of 2", done.stdout)

    def test_killed_in_the_last_evaluation_it_has_all_steps(self):
        run = subprocess.Popen([CADRE, "train", *map(str, self.words_until_evaluation())],
                               cwd=self.path, stdout=subprocess.DEVNULL, env=ONE_THREAD)
        self.wait_for_checkpoint(run)
        run.kill()
        run.wait()
        code, seen = self.start_and_signal(["--resume", self.out], "goes on at step 2 of 2",
                                           signal.SIGINT)
        self.assertEqual(code, 130, seen)

    def test_a_sample_hears_signals(self):
        self.assert_good(self.train_text("--sample", 0))
        code, seen = self.start_and_signal(["--resume", self.out, "--sample", 300_000],
                                           "runs on", signal.SIGINT)
        self.assertEqual(code, 130, seen)
        self.assertIn("interrupted: bf16 is at step 20 of 20, saved in ", seen)
        self.assert_good(self.train("--resume", self.out))

    def test_damaged_checkpoints_are_refused(self):
        code, seen = self.start_and_signal(self.words(self.out), "bf16  " + self.TENTH,
                                           signal.SIGINT)
        self.assertEqual(code, 130, seen)
        checkpoint = self.out / "bf16.safetensors"
        whole = checkpoint.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for content in whole[:-1], whole[:len(whole) // 2], whole[:5], b"", bytes(flipped), \
                whole + b"!":
            checkpoint.write_bytes(content)
            self.assert_refused(self.train("--resume", self.out), f"checkpoint {checkpoint}: ")
            self.assertEqual(checkpoint.read_bytes(), content)
        checkpoint.write_bytes(whole)
        empty = self.path / "empty"
        empty.mkdir()
        self.assert_refused(self.train("--resume", empty), "holds no checkpoint")

    def test_a_full_disk_keeps_the_old_checkpoint(self):
        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

        self.assert_good(self.train_text())
        checkpoint = self.out / "bf16.safetensors"
        old = checkpoint.read_bytes()
        self.assertGreater(len(old), 50_000)
        done = self.train_text("--seed", 2, "--overwrite", preexec_fn=limited)
        self.assert_refused(done, "bf16.safetensors cannot be written: File too large",
                            "the old file is untouched")
        self.assertEqual(checkpoint.read_bytes(), old)
        self.assertEqual(sorted(p.name for p in self.out.glob("*.partial")), [])

    def test_a_full_disk_on_the_way_is_a_warning(self):
        (self.out).mkdir()
        (self.out / "bf16.safetensors.partial").symlink_to("/dev/full")
        done = self.train_text("--save-every", 10)  # the symbolic link goes with the first failure
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("No space left on device", done.stderr)
        self.assertIn("training goes on", done.stderr)
        self.assertTrue((self.out / "bf16.safetensors").exists())

    def test_killed_at_any_moment_it_leaves_a_whole_checkpoint(self):
        words = [self.text, *TINY, "--steps", 100000, "--out", self.out, "--save-every", 1]
        run = subprocess.Popen([CADRE, "train", *map(str, words)], cwd=self.path,
                               stdout=subprocess.DEVNULL, env=ONE_THREAD)
        self.wait_for_checkpoint(run)
        time.sleep(0.3)
        run.kill()
        run.wait()
        code, seen = self.start_and_signal(["--resume", self.out], "goes on at step",
                                           signal.SIGINT)
        self.assertEqual(code, 130, seen)


if __name__ == "__main__":
    unittest.main()
