"""`make demo` with its own cmake and setup: it builds the command line alone, and needs no Python
packages; what is configured stays."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Prints how it was called; a preset is configured by leaving its build.ninja.
TOOL = """#!/bin/sh
echo "ran: $(basename "$0") $*"
case "$*" in --preset*) mkdir -p build/$2; touch build/$2/build.ninja ;; esac
"""


class Demo(unittest.TestCase):
    def setUp(self):
        self.top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.top)
        for name in ("Makefile", "CMakePresets.json"):
            shutil.copy(ROOT / name, self.top / name)
        for path in ("bin/cmake", "bin/nvcc", "tools/setup.sh", "build/cpu/cadre"):
            file = self.top / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(TOOL)
            file.chmod(0o755)

    def calls(self):
        environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
        path = f"{self.top / 'bin'}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(["make", "demo"], cwd=self.top, text=True, check=True,
                              env=environment | {"PATH": path}, stdout=subprocess.PIPE)
        return [line.removeprefix("ran: ") for line in done.stdout.splitlines()
                if line.startswith("ran: ")]

    def test_it_builds_what_it_runs(self):
        train = ("cadre train --recipe bf16,fp8_block,mxfp8,nvfp4 --verify-resume --out build/demo"
                 " --overwrite")
        build = "cmake --build --preset cpu --target cadre_cli"
        self.assertEqual(self.calls(), ["setup.sh demo", "cmake --preset cpu", build, train])
        self.assertEqual(self.calls(), ["setup.sh demo", build, train])
        self.assertFalse((self.top / ".venv").exists())


class Setup(unittest.TestCase):
    def test_the_demo_wants_no_python_packages(self):
        with tempfile.TemporaryDirectory() as top:
            script = pathlib.Path(top) / "tools/setup.sh"
            script.parent.mkdir()
            shutil.copy(ROOT / "tools/setup.sh", script)
            query = pathlib.Path(top) / "dpkg-query"  # all is installed
            query.write_text("#!/bin/sh\necho install ok installed\n")
            query.chmod(0o755)
            subprocess.run([script, "demo"], check=True,
                           env=os.environ | {"PATH": f"{top}{os.pathsep}{os.environ['PATH']}"})
            self.assertFalse((pathlib.Path(top) / ".venv").exists())


if __name__ == "__main__":
    unittest.main()
