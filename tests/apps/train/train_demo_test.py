"""What `make demo` shows, asserted: every recipe learns this repository's text.

usage: train_demo_test.py CADRE
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

CADRE = os.path.abspath(sys.argv.pop(1))
MOST_ABOVE_BF16 = {"bf16": 0.0, "fp8_block": 0.02, "mxfp8": 0.02, "nvfp4": 0.05}


class Demo(unittest.TestCase):
    def test_every_recipe_learns_and_resumes(self):
        with tempfile.TemporaryDirectory(prefix="cadre_demo_") as out:
            subprocess.run([CADRE, "train", "--recipe", ",".join(MOST_ABOVE_BF16), "--out", out,
                            "--verify-resume"], check=True, cwd=os.path.dirname(CADRE))
            with open(os.path.join(out, "results.json"), encoding="utf-8") as file:
                results = json.load(file)
        self.assertEqual([run["recipe"] for run in results["runs"]], list(MOST_ABOVE_BF16))
        for run in results["runs"]:
            with self.subTest(run["recipe"]):
                self.assertLess(run["above_bigram"], -0.15)
                self.assertLessEqual(run["above_first_recipe"], MOST_ABOVE_BF16[run["recipe"]])
                self.assertTrue(run["resumes_equal"])


if __name__ == "__main__":
    unittest.main()
