"""Acceptance on held-out prompts is what independent implementations of drafter and heap count."""

import pytest

from kimi_fx.bench.acceptance import pool

# tokens a verify step on the first 16 prompts, a complete engine of another make
EXPECTED = {("chain", None): 3.90, ("tree", 15): 4.44}


@pytest.mark.parametrize("how", EXPECTED)
def test_first_sixteen_prompts(make_engine, held_out, how):
    mode, budget = how
    engine = make_engine("run.batch=4")
    results = engine.generate(held_out[:16], max_tokens=256, temperature=0, ignore_eos=True, mode=mode, budget=budget)
    assert pool(results)["acceptance"] == pytest.approx(EXPECTED[how], rel=0.03)
