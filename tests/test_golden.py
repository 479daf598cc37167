"""The shipped pair reproduces Hugging Face's ids and logits in fp32, whatever the mode, budget and batch."""

import pytest

from checks import check_ids, check_last_logits

MODES = [("plain", None), ("chain", None), ("tree", 1), ("tree", 3), ("tree", 15), ("tree", 63)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("mode", "budget"), MODES)
def test_every_id_is_hugging_faces(make_engine, golden, mode, budget, batch):
    check_ids(make_engine(f"run.batch={batch}"), golden, mode, budget)


def test_last_logits_are_hugging_faces(make_engine, golden):
    check_last_logits(make_engine(), golden)
