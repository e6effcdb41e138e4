"""The C interface of the bench room: `c_api_test.py LIBRARY`, on the CPU."""
import ctypes
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import cadre_c  # noqa: E402

LIBRARY = ""
SIZES = {"R": 5, "N": 3, "K": 4, "E": 2}
OFFSETS = [0, 2, 5]


def floats(values):
    return (ctypes.c_float * len(values))(*values)


def address(array):
    return ctypes.addressof(array)


def numbers(count, seed):
    return [((i * 7 + seed * 13) % 11) - 5 for i in range(count)]


class CApi(unittest.TestCase):
    def run_gemm(self, which, lhs, rhs, out, extra=""):
        problem = (f"grouped_gemm {which} " + " ".join(f"{k}={v}" for k, v in SIZES.items()) +
                   " format=f32 out=f32" + extra)
        gemm = cadre_c.Gemm(cadre_c.Library(LIBRARY), problem, "cpu")
        self.assertTrue(gemm.name.startswith("cpu_"))
        scratch = ctypes.create_string_buffer(gemm.workspace_bytes + 256)
        aligned = (ctypes.addressof(scratch) + 255) // 256 * 256
        offsets = (ctypes.c_int32 * 3)(*OFFSETS)
        lhs, rhs, out = floats(lhs), floats(rhs), floats(out)
        gemm.run(cadre_c.Args(address(lhs), address(rhs), address(offsets), address(out), aligned))
        return list(out)

    def test_every_pass(self):
        r, n, k, e = SIZES.values()
        x, dy, w = numbers(r * k, 1), numbers(r * n, 2), numbers(e * n * k, 3)
        old = numbers(e * n * k, 4)
        owner = [0 if i < OFFSETS[1] else 1 for i in range(r)]
        y = [sum(x[i * k + c] * w[(owner[i] * n + j) * k + c] for c in range(k))
             for i in range(r) for j in range(n)]
        dx = [sum(dy[i * n + j] * w[(owner[i] * n + j) * k + c] for j in range(n))
              for i in range(r) for c in range(k)]
        dw = [sum(dy[i * n + j] * x[i * k + c] for i in range(r) if owner[i] == o)
              for o in range(e) for j in range(n) for c in range(k)]
        self.assertEqual(self.run_gemm("fprop", x, w, [0] * len(y)), y)
        self.assertEqual(self.run_gemm("dgrad", dy, w, [0] * len(dx)), dx)
        self.assertEqual(self.run_gemm("wgrad", dy, x, old), dw)
        self.assertEqual(self.run_gemm("wgrad", dy, x, old, " accumulate=yes"),
                         [a + b for a, b in zip(dw, old)])

    def check_codes(self, x_scales, w_scales, words, scale_of):
        """`scale_of(row, expert)` is the factor that the scales say."""
        r, n, k, e = 5, 3, 4, 2
        codes = {0: 0, 1: 0x38, 2: 0x40, -1: 0xb8, -2: 0xc0}  # of e4m3
        x, w = ([v % 5 - 2 for v in numbers(count, 1)] for count in (r * k, e * n * k))
        problem = f"grouped_gemm fprop R={r} N={n} K={k} E={e} out=f32 {words}"
        gemm = cadre_c.Gemm(cadre_c.Library(LIBRARY), problem, "cpu", "cpu_reference")
        self.assertEqual(gemm.name, "cpu_reference")
        stored = [(ctypes.c_uint8 * len(v))(*(codes[i] for i in v)) for v in (x, w)]
        scales, out = [floats(x_scales), floats(w_scales)], floats([0] * (r * n))
        offsets = (ctypes.c_int32 * 3)(*OFFSETS)
        gemm.run(cadre_c.Args(address(stored[0]), address(stored[1]), address(offsets),
                              address(out), None, address(scales[0]), address(scales[1])))
        owner = [0 if i < OFFSETS[1] else 1 for i in range(r)]
        self.assertEqual(list(out), [
            scale_of(i, owner[i]) * sum(
                x[i * k + c] * w[(owner[i] * n + j) * k + c] for c in range(k))
            for i in range(r) for j in range(n)])

    def test_codes_come_with_their_scales(self):
        rows, experts = [0.5, 1, 2, 4, 8, 0, 0, 0], [1, 0.25]  # of rows: a column of eight
        self.check_codes(rows, experts, "format=fp8_block lhs_scales_major=column",
                         lambda row, expert: rows[row] * experts[expert])
        batch = [0.5, 4]
        self.check_codes(batch, experts, "format=fp8_tensor",
                         lambda row, expert: batch[expert] * experts[expert])

    def test_errors_are_told(self):
        library = cadre_c.Library(LIBRARY)
        for problem, device, says in (
                ("grouped_gemm fprop R=many", "cpu", "R is 'many'"),
                ("grouped_gemm fprop R=8 N=8 K=8 E=2", "tpu", "name is 'tpu'"),
                (f"grouped_gemm fprop R=8 N={2**63 - 1} K=2 E=2", "cpu", "must be at most 2\\^44"),
                (f"grouped_gemm wgrad R={2**31} N=8 K=8 E=2", "cpu", "must be below 2\\^31"),
                ("grouped_gemm fprop R=8 N=8 K=8 E=2 alpha=yes", "cpu",
                 "must be packed, with scales of blocks or of experts but not both, without "),
                ("grouped_gemm fprop R=8 N=8 K=32 E=2 format=nvfp4", "cpu",
                 "of blocks or of experts but not both"),
                ("grouped_gemm fprop R=8 N=8 K=8 E=2 rhs_major=column", "cpu",
                 "plain operands row-major")):
            with self.assertRaisesRegex(RuntimeError, says):
                cadre_c.Gemm(library, problem, device)
        gemm = cadre_c.Gemm(library, "grouped_gemm fprop R=8 N=8 K=8 E=2", "cpu")
        with self.assertRaises(RuntimeError):
            gemm.run(cadre_c.Args())

    def test_null_is_an_error(self):
        library = cadre_c.Library(LIBRARY)
        self.assertIsNone(library.c.cadre_gemm_plan(None, b"cpu", None))
        self.assertRegex(str(library.error()), "problem or device is null")
        self.assertEqual(library.c.cadre_gemm_run(None, None, None), 1)
        self.assertRegex(str(library.error()), "plan or arguments are null")
        self.assertEqual(library.c.cadre_gemm_name(None), b"")
        self.assertEqual(library.c.cadre_gemm_workspace_bytes(None), 0)
        library.c.cadre_gemm_free(None)


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    unittest.main()
