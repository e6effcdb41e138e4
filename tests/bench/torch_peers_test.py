"""How bench/peers lays rows out for DeepGEMM and what it calls, with stand-ins for torch and it."""
import pathlib
import sys
import types
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/peers"))
sys.modules["torch"] = torch = mock.MagicMock()
sys.modules["deep_gemm"] = deep_gemm = types.ModuleType("deep_gemm")
import torch_grouped_gemm as peers  # noqa: E402


class DeepGemm(unittest.TestCase):
    def setUp(self):
        for name in list(vars(deep_gemm)):
            if not name.startswith("__"):
                delattr(deep_gemm, name)

    def test_every_expert_is_padded_and_its_rows_keep_their_order(self):
        places, owners = peers.padded_rows([3, 0, 4, 5], 4)
        self.assertEqual(places, [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12])
        self.assertEqual(owners, [0] * 3 + [-1] + [2] * 4 + [3] * 5 + [-1] * 3)
        self.assertEqual(peers.padded_counts([3, 0, 4, 5], 4), [4, 0, 4, 8])

    def test_it_says_what_it_wants_rows_padded_to(self):
        self.assertEqual(peers.deepgemm_alignment(), 128)
        deep_gemm.get_mk_alignment_for_contiguous_layout = lambda: 64
        self.assertEqual(peers.deepgemm_alignment(), 64)
        deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout = lambda: 32
        deep_gemm.set_mk_alignment_for_contiguous_layout = mock.Mock()
        self.assertEqual(peers.deepgemm_alignment(), 32)
        deep_gemm.set_mk_alignment_for_contiguous_layout.assert_called_once_with(32)

    def call(self, words):
        problem = peers.Problem(words)
        case = types.SimpleNamespace(problem=problem, counts=[3, 5], live=8, lhs=mock.MagicMock(),
                                     rhs=mock.MagicMock(), out=mock.MagicMock())
        return peers.deepgemm_call(case), case

    def test_each_pass_calls_its_product(self):
        for which, name in (("fprop", "m_grouped_bf16_gemm_nt_contiguous"),
                            ("dgrad", "m_grouped_bf16_gemm_nn_contiguous")):
            product = mock.Mock()
            setattr(deep_gemm, name, product)
            call, case = self.call(f"grouped_gemm {which} R=8 N=16 K=16 E=2 format=bf16")
            got = call()
            lhs, weight, out, owners = product.call_args.args
            self.assertIs(weight, case.rhs)
            self.assertIs(out, got)

    def test_weight_gradients_are_added_to_fp32_with_counts_of_the_host(self):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous = product = mock.Mock()
        words = "grouped_gemm wgrad R=8 N=16 K=16 E=2 format=bf16"
        self.assertIsNone(self.call(words)[0])
        call, _ = self.call(words + " out=f32 accumulate=yes")
        got = call()
        lhs, rhs, out, sizes, on_device, old = product.call_args.args
        self.assertEqual(sizes, [128, 128])
        self.assertIs(out, got)
        self.assertIs(old, got)


class OtherBuilds(unittest.TestCase):
    def contestants(self, equal):
        """Of two builds, whose bits are `equal` or not."""
        torch.equal = mock.Mock(return_value=equal)
        problem = peers.Problem("grouped_gemm fprop R=8 N=16 K=16 E=2 format=bf16")
        case = types.SimpleNamespace(problem=problem, counts=[3, 5], live=8, lhs=mock.MagicMock(),
                                     rhs=mock.MagicMock(), out=mock.MagicMock(),
                                     live_part=lambda out: out)
        left_out = {}
        with mock.patch.multiple(peers, cadre_call=lambda gemm, case: lambda: case.out,
                                 torch_call=lambda case: None, deepgemm_call=lambda case: None,
                                 difference=lambda case, call, want: 0.0):
            calls = peers.contestants_of({"cadre": object(), "before": object()}, [case], left_out)
        return calls, left_out

    def test_a_build_with_the_same_bits_is_timed(self):
        calls, left_out = self.contestants(equal=True)
        self.assertEqual(list(calls), ["cadre", "before"])
        self.assertEqual(left_out, {})

    def test_a_build_with_other_bits_is_left_out_with_the_reason(self):
        calls, left_out = self.contestants(equal=False)
        self.assertEqual(list(calls), ["cadre"])
        self.assertEqual(left_out, {"before": "has other bits than cadre"})


if __name__ == "__main__":
    unittest.main()
