"""The page about chains is run from top to bottom, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_docs import SLURM_PAGE, run_page
from tests.slurm.cluster import Cluster


@pytest.mark.timeout(120)
def test_everything_on_the_page_runs_as_it_says(lab: Cluster, tmp_path: Path) -> None:
    run_page(SLURM_PAGE, tmp_path)
