"""The README's promises: its program is the consumer's, its commands run as pasted.

`readme_test.py CADRE` with CADRE the program that was built.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CADRE = pathlib.Path(sys.argv.pop()).resolve() if len(sys.argv) > 1 else None


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


class Readme(unittest.TestCase):
    def test_its_program_is_the_one_that_the_consumer_tests_build(self):
        self.assertEqual(blocks("cpp"), [(ROOT / "tests/consumer/main.cpp").read_text()])

    def test_its_commands_run(self):
        path = f"{CADRE.parent}{os.pathsep}{os.environ['PATH']}"
        lines = [line for block in blocks("sh") for line in block.splitlines()]
        self.assertGreaterEqual(len(lines), 5)
        with tempfile.TemporaryDirectory() as folder:
            for name in ("README.md", "docs"):
                os.symlink(ROOT / name, pathlib.Path(folder, name))
            for line in lines:
                with self.subTest(line):
                    done = subprocess.run(line.split(), cwd=folder, env=os.environ | {"PATH": path},
                                          text=True, capture_output=True)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertTrue(done.stdout)

    def test_its_make_targets_exist(self):
        targets = re.findall(r"^make (\w+)", "".join(blocks("")), re.M)
        self.assertEqual(targets, ["demo", "test"])
        for target in targets:
            self.assertRegex((ROOT / "Makefile").read_text(), rf"(?m)^{target}:")


if __name__ == "__main__":
    unittest.main()
