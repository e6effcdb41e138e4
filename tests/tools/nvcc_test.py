"""tools/nvcc.sh fails where ptxas says that a kernel is slow, and only there."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOP = pathlib.Path(__file__).resolve().parents[2]
QUIET = """ptxas info    : 0 bytes gmem
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers"""


def compile_with(stderr, code=0):
    """Runs the script around a compiler that says `stderr`."""
    with tempfile.TemporaryDirectory() as folder:
        fake = pathlib.Path(folder, "nvcc")
        fake.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}\nEND\nexit {code}\n")
        fake.chmod(0o755)
        return subprocess.run([TOP / "tools/nvcc.sh", fake, "-c", "kernel.cu"], text=True,
                              capture_output=True, check=False)


class Nvcc(unittest.TestCase):
    def test_device_code_that_is_not_wanted_ends_as_ptx(self):
        code, source = "--generate-code=arch=compute_90a,code=[{}]", TOP / "src/a.cu"
        words = [code.format("sm_90a"), "-c", source, "-o", "a.o"]
        ptx = f"{code.format('compute_90a')} -c {source} -o a.o -Xcicc=-O0 -Xptxas=-v"
        alone = f"{code.format('sm_90a')} -c {source} -o a.o"
        whole = f"{alone} -Xptxas=-v"
        both = f"{alone} --generate-code=arch=compute_80,code=[sm_80] -Xptxas=-v"
        for wanted, command in (("", ptx), ("src/b.cu\nsrc/a.cuh", ptx),
                                ("src/b.cu\nsrc/a.cu", both), (None, whole)):
            environment = dict(os.environ)
            environment.pop("CADRE_DEVICE_CODE", None)
            if wanted is not None:
                environment["CADRE_DEVICE_CODE"] = wanted
            done = subprocess.run([TOP / "tools/nvcc.sh", "echo", *words], text=True,
                                  capture_output=True, check=True, env=environment)
            self.assertEqual(done.stdout, command + "\n")

    def test_device_code_of_hopper_alone_is_for_no_other(self):
        source = TOP / "src/cuda/sm90/a.cu"
        done = subprocess.run(
            [TOP / "tools/nvcc.sh", "echo", "-c", source], text=True, capture_output=True,
            check=True, env=os.environ | {"CADRE_DEVICE_CODE": "src/cuda/sm90/a.cu"})
        self.assertEqual(done.stdout, f"-c {source} -Xptxas=-v\n")

    def test_a_good_kernel_passes_in_silence(self):
        done = compile_with(QUIET)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_spills_fail(self):
        spills = "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
        done = compile_with(QUIET + "\n" + spills)
        self.assertEqual(done.returncode, 1)
        self.assertIn("12 bytes spill stores", done.stderr)

    def test_spills_of_other_gpus_pass(self):
        spills = "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
        entry = "ptxas info    : Compiling entry function 'kernel' for '{}'"
        for gpus, code in (("sm_80", 0), ("sm_90a", 1), ("sm_90a sm_80", 1), ("sm_80 sm_90a", 1)):
            lines = [f"{entry.format(gpu)}\n{spills}" for gpu in gpus.split()]
            self.assertEqual(compile_with("\n".join(lines)).returncode, code, gpus)

    def test_serialised_products_fail(self):
        done = compile_with("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async "
                            "instructions are serialized due to a call")
        self.assertEqual(done.returncode, 1)
        self.assertIn("C7510", done.stderr)

    def test_errors_of_the_compiler_stay(self):
        done = compile_with("kernel.cu(1): error: expected a declaration", code=2)
        self.assertEqual(done.returncode, 2)
        self.assertIn("expected a declaration", done.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
