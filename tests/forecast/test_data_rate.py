"""Whether a loader keeps up: with how many workers, and in which words."""

import pytest

from ckptman.forecast.data_rate import Need, judge


@pytest.mark.parametrize(
    ("need", "rates", "verdict", "workers", "num_workers", "text"),
    [
        (Need(10), [(0, 5), (1, 9), (2, 13), (4, 26)], "enough", 2, 2, "2 workers give 13 batches/s."),
        (Need(2.5, 1, 8), [(4, 12), (16, 60)], "enough", 16, 2, "num_workers=2 in each of the 8 ranks"),
        (Need(5, 4), [(1, 12), (2, 22)], "tight", 2, 2, "needs 20 batches/s (5 steps/s x 4 batches)"),
        (Need(10), [(0, 1), (1, 2), (2, 4)], "starves", 2, 2, "about 6 workers would do"),
        (Need(1), [(0, 1.2), (1, 0.9)], "starves", 1, 1, "but 1 worker gives 0.9 batches/s"),
        (Need(100), [(1, 2), (2, 4)], "starves", 2, 2, "60 workers would do if each gave as much, more than there"),
        # Without workers a step waits for its batch: faster than the need is not enough.
        (Need(1), [(0, 100)], "enough", 0, 0, "1 % of each step"),
        (Need(1), [(0, 5)], "tight", 0, 0, "20 % of each step"),
        (Need(1), [(0, 1.2)], "starves", 0, 0, "83 % of each step"),
        (Need(1, 1, 4), [(0, 50)], "enough", 0, 0, "2 % of each step"),
        # More ranks than CPUs share them.
        (Need(1, 1, 80), [(0, 50)], "tight", 0, 0, "x 80 ranks), 20 % of each step"),
        (Need(1), [(0, 2), (1, 1.1)], "tight", 1, 1, "1 worker gives 1.1 batches/s"),
    ],
)
def test_judgements(need, rates, verdict, workers, num_workers, text):
    found = judge(need, rates, cpus=8)
    assert (found.verdict, found.workers, found.num_workers) == (verdict, workers, num_workers), found
    assert text in found.text
