"""The golden archive."""

import tarfile
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).with_name("format-1.tar.xz")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The archive, unpacked."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder
