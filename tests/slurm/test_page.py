"""The page about chains is run from top to bottom, on a real Slurm."""

import pytest

from tests.docs.test_docs import SLURM_PAGE, run_page


@pytest.mark.timeout(600)
def test_everything_on_the_page_runs_as_it_says(lab, tmp_path):
    run_page(SLURM_PAGE, tmp_path)
