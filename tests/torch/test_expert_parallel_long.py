"""As test_expert_parallel.py, with many more random routings."""

from test_expert_parallel import bits


def test_bits_of_one_process_many_times(ranks):
    ranks.run(bits, range(100, 1300))
