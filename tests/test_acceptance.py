"""Acceptance on held-out prompts is what an engine of another make counts, round by round."""

import pytest

from checks import check_acceptance


@pytest.mark.parametrize(("mode", "budget", "expected"), [("chain", None, 3.90), ("tree", 15, 4.44)])
def test_first_sixteen_prompts(make_engine, held_out, mode, budget, expected):
    check_acceptance(make_engine("run.batch=4"), held_out[:16], expected, 256, mode, budget)
