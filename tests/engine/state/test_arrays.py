"""Arrays of NumPy: large ones are saved as tensors are, and come back as what they were."""

import numpy as np
import pytest
import torch

import ckptman
from ckptman.storage.format.paths import step_folder

ARRAYS = {
    "floats": np.linspace(0, 1, 5000),
    "bytes": np.arange(9000).astype(np.uint8),
    "wide": np.arange(2000, dtype=np.uint64) << np.uint64(40),
    "complex": np.full(1000, 1 + 2j),
    "transposed": np.arange(6000.0).reshape(60, 100).T,
    "backwards": np.arange(6000)[::-1],
    "fixed": np.broadcast_to(np.arange(1000.0), (3, 1000)),
    "other bytes": np.arange(3000, dtype=">f8"),
    "small": np.arange(3, dtype=np.int16),
    "empty": np.empty((0, 4)),
}


class Replay:
    """A buffer of steps."""

    def __init__(self, seed):
        draw = np.random.default_rng(seed)
        self.seen, self.rows = draw.random((3000, 4)), [(draw.integers(0, 9, 4000), seed)]

    def state_dict(self):
        return {"seen": self.seen, "rows": self.rows}

    def load_state_dict(self, state):
        self.seen, self.rows = state["seen"], state["rows"]


def alike(one, other):
    assert type(one) is type(other) is np.ndarray
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back(tmp_path, name):
    with ckptman.Checkpointer(tmp_path, {"held": {"array": ARRAYS[name]}}, deadline=None) as checkpointer:
        checkpointer.save(1)
    state = {"held": {"array": np.zeros(3)}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.restore()
    alike(state["held"]["array"], ARRAYS[name])
    alike(ckptman.read(tmp_path / step_folder(1))["held"]["array"], ARRAYS[name])
    loaded = {"held": {"array": np.zeros(3)}}
    ckptman.load(loaded, tmp_path / step_folder(1))
    alike(loaded["held"]["array"], ARRAYS[name])


def test_a_replay_buffer_takes_the_bytes_that_it_has_and_is_filled_where_it_is(tmp_path):
    saved, fresh = Replay(1), Replay(2)
    shared, bare = np.zeros((3000, 4)), {"array": saved.seen}
    with ckptman.Checkpointer(tmp_path, {"replay": saved, "bare": bare}, deadline=None) as checkpointer:
        checkpointer.save(1)
    folder = tmp_path / step_folder(1)
    taken = sum(each.stat().st_size for each in folder.iterdir())
    assert taken < 1.2 * (2 * saved.seen.nbytes + saved.rows[0][0].nbytes)
    state = {"replay": fresh, "bare": {"array": shared}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.restore()
    alike(fresh.seen, saved.seen)
    alike(fresh.rows[0][0], saved.rows[0][0])
    assert fresh.rows[0][1] == 1
    alike(shared, saved.seen)


def test_damage_in_an_array_is_found(tmp_path):
    with ckptman.Checkpointer(tmp_path, {"held": {"array": ARRAYS["floats"]}}, deadline=None) as checkpointer:
        checkpointer.save(1)
    (data,) = (tmp_path / step_folder(1)).glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.find(np.float64(0.5).tobytes()[-2:])] ^= 1
    data.write_bytes(content)
    with pytest.raises(ckptman.CorruptError):
        ckptman.read(tmp_path / step_folder(1))


def test_an_array_beside_a_tensor_of_its_memory(tmp_path):
    array = np.zeros((100, 100))
    state = {"array": {"it": array}, "tensor": {"it": torch.from_numpy(array)}}
    array += 3
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.save(1)
    array -= 3
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.restore()
    assert (array == 3).all()
    assert (state["tensor"]["it"] == 3).all()
