"""A rank that fails: its error is told before anything waits, and all ranks end within a bound."""

import os
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from ckptman.errors import ConfigError
from ckptman.train.launch import ErrorReport, Launch
from tests.helpers.ranks import start_ranks
from tests.train.test_loop import SHAPE, tokens

__all__ = ["tokens"]

SECONDS = 30.0
"""After the error, until no rank is left: much less than the timeouts, on a machine that does other things."""


def train(tokens, folder, port, hangs):
    """Rank 1 fails in step 3, when rank 0 is in a collective already. `hangs`: the end of the groups does."""
    import torch.distributed as dist

    from ckptman.train import parallel
    from ckptman.train.__main__ import main
    from ckptman.train.report import StepReport

    rank = dist.get_rank()
    dist.barrier()  # one that leaves before the other is connected breaks its connecting
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    sys.stderr = Path(folder, f"stderr-{rank}").open("w", buffering=1)
    add, destroy = StepReport.add, dist.destroy_process_group

    def add_or_fail(self, step, *rest):
        if (rank, step) == (1, 3):
            Path(folder, "failed").write_text(str(time.monotonic()))
            raise ValueError("a loss that cannot be")
        add(self, step, *rest)

    def end(group=None):
        if group is None:
            Path(folder, f"told-{rank}").write_text(Path(folder, f"stderr-{rank}").read_text())
            if hangs:
                threading.Event().wait()
        destroy(group)

    StepReport.add, dist.destroy_process_group = add_or_fail, end
    parallel.ABORT_SECONDS = 0.5 if hangs else SECONDS
    values = SHAPE | {"data.path": tokens, "checkpoint.root": f"{folder}/ck", "data.global_batch": 4}
    Path(folder, f"{rank}.toml").write_text("")
    code = main(["--config", f"{folder}/{rank}.toml", *(f"--set={name}={value}" for name, value in values.items())])
    os._exit(code)


@pytest.mark.parametrize("hangs", [False, True])
def test_an_error_on_one_rank_is_told_and_ends_all(tokens, tmp_path, hangs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with start_ranks(2, train, str(tokens), str(tmp_path), port, hangs) as world:
        codes = world.join()
    assert time.monotonic() - float((tmp_path / "failed").read_text()) < SECONDS
    assert codes[1] == 1
    assert codes[0] in (1, 12), "it lost the other one in a collective of the training, or of ours"
    for rank in (0, 1):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told, "before the groups are ended"
        assert (tmp_path / f"stderr-{rank}").read_text() == told, "and once"
    assert f"rank 1 of 2 on {socket.gethostname()} failed:\nTraceback (most recent call last):\n" in told
    assert "ValueError: a loss that cannot be" in told


def test_an_error_is_told_once_and_what_ckptman_knows_in_one_line(capsys):
    errors = ErrorReport(Launch(4, 8, 0, 4, alone=False))
    known = ConfigError("no such thing")
    with pytest.raises(ConfigError), errors.at_once():
        raise known
    assert capsys.readouterr().err == "error: no such thing\n"
    assert errors.tell(known) == 2
    assert capsys.readouterr().err == ""
    assert errors.tell(ValueError("unknown")) == 1
    assert capsys.readouterr().err.startswith("rank 4 of 8 on ")
    ends = (SystemExit(75), SystemExit("text"), KeyboardInterrupt())  # these are no errors
    assert [errors.tell(each) for each in ends] == [75, 1, 130]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("local_rank", "told"), [(0, True), (3, False), (4, True)])
def test_one_rank_of_a_node_tells_what_all_have(capsys, local_rank, told):
    assert ErrorReport(Launch(8, 16, local_rank, 4, alone=False)).tell(ConfigError("no")) == 2
    assert bool(capsys.readouterr().err) == told
