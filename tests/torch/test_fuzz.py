"""Some random calls: see fuzz_cases. test_fuzz_long has more."""

import pytest
from fuzz_cases import CHECKS
from hypothesis import HealthCheck, given, settings


@pytest.mark.parametrize("kind", list(CHECKS))
def test_calls(kind):
    cases, check = CHECKS[kind]
    settings(max_examples=50, derandomize=True, database=None, deadline=None,
             suppress_health_check=list(HealthCheck))(given(cases())(check))()
