"""`make test` with its own cmake and ctest: both halves run, and the end says what failed."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Says how it was called, and fails where that holds the text of the variable FAILS.
TOOL = """#!/bin/sh
call="$(basename "$0") $*"
echo "ran: $call"
case "$call" in *"$FAILS"*) exit 3 ;; esac
"""


class Make(unittest.TestCase):
    def setUp(self):
        self.top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.top)
        for name in ("Makefile", "CMakePresets.json"):
            shutil.copy(ROOT / name, self.top / name)
        for path in ("bin/cmake", "bin/ctest", "tools/setup.sh"):
            file = self.top / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(TOOL)
            file.chmod(0o755)
        (self.top / ".venv").mkdir()
        (self.top / ".venv/complete").touch()
        for preset in ("cpu", "cpu-asan"):
            (self.top / "build" / preset).mkdir(parents=True)

    def run_make(self, fails):
        """The exit code, the calls, and the last line."""
        environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
        path = f"{self.top / 'bin'}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(["make", "test", "PRESET=cpu"], cwd=self.top, text=True,
                              env=environment | {"PATH": path, "FAILS": fails},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = done.stdout.splitlines()
        calls = [line.removeprefix("ran: ") for line in lines if line.startswith("ran: ")]
        return done.returncode, calls, [line for line in lines if "make test: " in line]

    def test_both_halves_are_built_and_tested(self):
        code, calls, told = self.run_make("nothing")
        self.assertEqual((code, told), (0, []), calls)
        for preset in ("cpu", "cpu-asan"):
            self.assertIn(f"cmake --build --preset {preset}", calls)
            self.assertIn(f"--preset {preset} -LE slow", " ".join(calls))
            self.assertTrue((self.top / "build" / preset / "build.ninja").exists())

    def test_a_failure_in_one_half_does_not_stop_the_other_and_is_told(self):
        for fails, halves in (("--build --preset cpu-asan", "cpu-asan"),
                              ("--build --preset cpu", "cpu cpu-asan"),
                              ("--preset cpu -LE", "cpu"), ("--preset cpu-asan -LE", "cpu-asan"),
                              ("ctest", "cpu cpu-asan")):
            with self.subTest(fails):
                code, calls, told = self.run_make(fails)
                self.assertNotEqual(code, 0)
                self.assertEqual(told, [f"make test: FAILED: {halves}"])
                for preset in ("cpu", "cpu-asan"):
                    self.assertIn(f"cmake --build --preset {preset}", calls)


if __name__ == "__main__":
    unittest.main()
