"""Ranks and meshes from the environment of a launcher."""

import pytest

from ckptman.errors import ConfigError
from ckptman.train.launch import Launch, launch_from_environment, mesh_shape

MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def test_no_launcher_is_a_world_of_one():
    assert launch_from_environment({}) == Launch(0, 1, 0, 1, alone=True)
    # in a batch script, outside srun, Slurm's variables describe the job, not this process
    assert launch_from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).alone


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MASTER}
SRUN = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "2", **MASTER}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, (5, 8, 1, 4)),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, (5, 8, 1, 4)),  # one for each task of srun
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, (6, 11, 2, 3)),
    ],
)
def test_torchrun_and_srun(environ, found):
    assert launch_from_environment(environ) == Launch(*found, alone=False)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"},
    ],
)
def test_tasks_of_srun_that_would_each_be_a_world_are_refused(environ):
    with pytest.raises(ConfigError, match="srun started 2 tasks, and this one takes itself for a world of its own"):
        launch_from_environment({**environ, **MASTER, "SLURM_STEP_NUM_TASKS": "2"})
    assert launch_from_environment({**environ, **MASTER, "SLURM_STEP_NUM_TASKS": "1"}).rank == int(environ["RANK"])


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}, "cannot be"),
    ],
)
def test_half_a_launcher_is_refused_rather_than_taken_for_none(environ, message):
    with pytest.raises(ConfigError, match=message):
        launch_from_environment(environ)


@pytest.mark.parametrize(
    ("world_size", "nodes", "shard_ranks", "expected"),
    [
        (1, [1], None, (1, 1)),
        (8, [4, 4], None, (2, 4)),  # shard inside the node, replicate across
        (4, [4], 2, (2, 2)),
        (3, [3], 2, (3, 1)),  # 2 does not divide 3
        (12, [4, 4, 4], 3, (6, 2)),  # 3 would straddle nodes
        (8, [4, 4], 8, (1, 8)),  # whole nodes may be joined
        (8, [4, 4], 6, (2, 4)),
        (2, [2], 16, (1, 2)),
        (7, [4, 3], None, (7, 1)),  # uneven nodes
        (12, [4, 8], None, (3, 4)),
    ],
)
def test_mesh(world_size, nodes, shard_ranks, expected):
    sizes = [size for size in nodes for _ in range(size)]
    assert mesh_shape(world_size, sizes, shard_ranks) == expected
