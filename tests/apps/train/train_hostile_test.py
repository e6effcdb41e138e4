"""cadre train where somebody is careless: names, signals, readers, and two runs in one folder.

usage: train_hostile_test.py CADRE [few] [TEST...]
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import unittest

from train_command_test import CADRE, Case, FEW, ONE_THREAD, TINY, prose

STEPS = 200 if FEW else 1000


class Words(Case):
    def test_empty_and_odd_values(self):
        for words, part in [
            (["--resume", ""], "--resume is '', must not be empty"),
            (["--out", ""], "--out is '', must not be empty"),
            (["--seed", ""], "--seed is '', must not be empty"),
            (["--seed", "-1"], "--seed is -1, must be 0 to"),
            (["--seed", 2**53 + 1], "--seed is 9007199254740993, must be 0 to"),
            (["--seed", 2**64], "--seed"),
        ]:
            with self.subTest(words):
                self.assert_refused(self.train(self.text, *TINY, "--steps", 5, *words), part)
        self.assertFalse((self.path / "cadre-train").exists())

    def test_the_demo_runs_again(self):
        makefile = pathlib.Path(__file__).resolve().parents[3] / "Makefile"
        line = re.search(r"^\tbuild/cpu/cadre train --recipe \S+ (.*)$", makefile.read_text(), re.M)
        for _ in range(2):
            done = self.train(self.text, *TINY, "--steps", 2, *line[1].split())
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_pipe_is_no_text(self):
        os.mkfifo(self.path / "pipe")
        self.assert_refused(self.train("pipe", timeout=60), "pipe is no regular file")
        self.assert_refused(self.train("--resume", "pipe", timeout=60), "pipe is no regular file")

    def test_an_installed_program_has_no_text_of_its_own(self):
        header = self.path / "include/cadre/error.h"
        header.parent.mkdir(parents=True)
        header.write_text(prose(6000))
        program = self.path / "bin/cadre"
        program.parent.mkdir()
        shutil.copy(CADRE, program)
        done = subprocess.run([program, "train", *TINY, "--steps", "5"], capture_output=True,
                              text=True, cwd=self.path)
        self.assert_refused(done, "no text is named", "cadre train PATH...")

    def test_threads_sleep_while_they_wait(self):
        def spins(verb, **more):
            """How often the runtime of OpenMP looks before it sleeps, as it says itself."""
            env = {k: v for k, v in ONE_THREAD.items() if k != "OMP_WAIT_POLICY"}
            done = subprocess.run([CADRE, verb, "--help"], capture_output=True, text=True,
                                  env={**env, "OMP_DISPLAY_ENV": "verbose", **more})
            return int(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[-1])

        self.assertEqual(spins("train"), 0)
        self.assertGreater(spins("train", OMP_WAIT_POLICY="active"), 0)
        self.assertEqual(spins("train", GOMP_SPINCOUNT="7"), 7)
        self.assertGreater(spins("check"), 0)

    def test_the_dynamic_linker_may_start_it(self):
        linker = next(iter(re.findall(r"/\S*/ld-linux\S*", subprocess.run(
            ["ldd", CADRE], capture_output=True, text=True).stdout)), None)
        if linker is None:
            self.skipTest("no dynamic linker is named")
        env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        done = subprocess.run([linker, CADRE, "train", "--help"], capture_output=True, text=True,
                              env=env)
        self.assertEqual(done.returncode, 0, done.stderr)


class Runs(Case):
    def test_a_path_that_is_not_utf8_is_trained_on_and_resumed(self):
        folder = os.fsencode(self.path) + b"/caf\xe9"
        os.mkdir(folder)
        with open(folder + b"/text", "w") as text:
            text.write(prose(6000))
        words = [*TINY, "--steps", "20", "--out", str(self.out), "--sample", "0"]
        done = subprocess.run([CADRE, "train", folder, *words], capture_output=True,
                              cwd=self.path, env=ONE_THREAD)
        self.assertEqual(done.returncode, 0, done.stderr)
        json.loads((self.out / "results.json").read_text())
        (self.out / "report.html").read_text()
        again = subprocess.run([CADRE, "train", "--resume", str(self.out)], capture_output=True,
                               cwd=self.path, env=ONE_THREAD)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn(b"bf16 is finished already", again.stdout)

    def words(self):
        return [self.text, *TINY, "--steps", STEPS, "--out", self.out, "--sample", 0]

    def test_a_terminal_that_closes_saves_the_run(self):
        code, seen = self.start_and_signal(self.words(), f"step {STEPS // 10}/", signal.SIGHUP)
        self.assertEqual(code, 128 + signal.SIGHUP, seen)
        self.assertIn("interrupted: bf16 is at step ", seen)
        self.assert_good(self.train("--resume", self.out))

    def test_nohup_is_respected(self):
        done = self.train_text(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.assert_good(done)

    def test_a_reader_that_leaves_saves_the_run(self):
        run = subprocess.Popen([CADRE, "train", *map(str, self.words())], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, cwd=self.path, env=ONE_THREAD)
        for line in run.stdout:
            if f"step {STEPS // 10}/" in line:
                break
        run.stdout.close()
        errors = run.stderr.read()
        run.stderr.close()
        self.assertIn(run.wait(), (128 + signal.SIGPIPE, -signal.SIGPIPE), errors)
        done = self.train("--resume", self.out)
        self.assert_good(done)
        self.assertIn("bf16 goes on at step ", done.stdout)

    def test_two_runs_do_not_share_a_folder(self):
        words = [self.text, *TINY, "--steps", 100000, "--out", self.out]
        run = subprocess.Popen([CADRE, "train", *map(str, words)], stdout=subprocess.PIPE,
                               text=True, cwd=self.path, env=ONE_THREAD)
        while "runs on" not in run.stdout.readline():
            pass
        for other in self.train(*words), self.train(*words, "--overwrite"):
            self.assert_refused(other, f"folder {self.out} is in use by another run")
        run.kill()
        run.stdout.close()
        run.wait()
        self.assert_good(self.train_text())  # the lock went with its holder

    def test_a_finished_run_is_not_replaced_in_silence(self):
        self.assert_good(self.train_text())
        old = (self.out / "bf16.safetensors").read_bytes()
        self.assert_refused(self.train_text("--seed", 2), "holds a finished run, step 20 of 20",
                            "--overwrite", "--out")
        self.assertEqual((self.out / "bf16.safetensors").read_bytes(), old)
        self.assert_good(self.train_text("--seed", 2, "--overwrite"))
        self.assertNotEqual((self.out / "bf16.safetensors").read_bytes(), old)

    def test_a_renamed_checkpoint_is_not_passed_over(self):
        """Beside it lies one that has its name."""
        self.assert_good(self.train_text())
        here = self.out / "bf16.safetensors"
        before = self.out / "before.safetensors"
        shutil.copy(here, before)
        for other in before, self.path / "bf16-1.safetensors":
            shutil.copy(here, other)
            self.assert_refused(self.train("--resume", other), f"checkpoint {other} is of recipe "
                                "bf16, must be called bf16.safetensors; rename it")
        self.assert_good(self.train("--resume", self.out))
        here.rename(self.path / "kept")
        self.assert_refused(self.train("--resume", self.out), f"checkpoint {before} is of recipe "
                            "bf16, must be called bf16.safetensors; rename it")
        (self.path / "kept").rename(here)
        moved = self.path / "moved/bf16.safetensors"
        moved.parent.mkdir()
        shutil.copy(here, moved)
        self.assert_good(self.train("--resume", moved))

    def test_the_report_of_another_recipe_is_not_replaced_in_silence(self):
        self.assert_good(self.train_text())
        report = (self.out / "report.html").read_text()
        other = ["--recipe", "f32"]
        self.assert_refused(self.train_text(*other), "results.json is of another run",
                            "--overwrite", "--out")
        self.assertFalse((self.out / "f32.safetensors").exists())
        self.assert_good(self.train_text(*other, "--overwrite"))
        self.assertNotEqual((self.out / "report.html").read_text(), report)
        bf16 = self.out / "bf16.safetensors"
        self.assert_refused(self.train("--resume", bf16), "results.json is of another run")
        self.assert_good(self.train("--resume", self.out))
        (self.out / "results.json").write_text('{"settings": 1, "runs": [1, {"recipe": []}]}')
        self.assert_refused(self.train("--resume", self.out), "results.json is of another run")
        (self.out / "results.json").unlink()
        self.assert_refused(self.train("--resume", self.out), "report.html is of another run")

    def test_a_folder_that_may_not_be_written_says_why(self):
        self.out.mkdir(mode=0o555)
        self.path.chmod(0o755)
        nobody = {"user": 65534, "group": 65534} if os.getuid() == 0 else {}
        done = self.train_text(**nobody)
        self.assert_refused(done, f"folder {self.out} cannot be written: Permission denied")

    def test_a_full_disk_behind_stdout_is_told(self):
        with open("/dev/full", "w") as full:
            words = [self.text, *TINY, "--steps", 5, "--out", self.out]
            done = subprocess.run([CADRE, "train", *map(str, words)], stdout=full,
                                  stderr=subprocess.PIPE, text=True, env=ONE_THREAD)
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output could not be written", done.stderr)
        self.assertTrue((self.out / "report.html").exists())


if __name__ == "__main__":
    unittest.main()
