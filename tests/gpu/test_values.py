"""What is saved on a device and comes back to it: every dtype, from the page cache and from disk, and generators."""

import os
import subprocess
import sys

import pytest
import torch

import ckptman
from ckptman.storage.format.paths import data_name, step_folder
from tests.engine.dcp.test_values import blank, differing, noise
from tests.gpu.device import open_run, values_of
from tests.helpers.checkpoints import flip_byte

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def any_tensors():
    """Any bits, of every dtype; a scalar, no elements, and a large one."""
    found = {str(dtype).removeprefix("torch."): noise(dtype, 331, 17) for dtype in (*FLOATS, *FP8, *INTEGERS)}
    return found | {
        "scalar": noise(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "large": noise(torch.float32, 1031, 701),
    }


def test_every_dtype_comes_back_bit_by_bit(tmp_path, device):
    """Random bits of 16 dtypes (floats, fp8, complex, integers, bool), a scalar, a tensor without elements, one that is
    transposed and one with gaps are saved from the device, and are loaded onto it into other ones: the same bits."""
    tensors = {name: device.tensor(each) for name, each in any_tensors().items()}
    tensors["transposed"] = device.tensor(noise(torch.float32, 300, 200)).T
    tensors["gaps"] = device.tensor(noise(torch.float32, 300, 200))[:, ::2]
    expected = values_of(device, tensors)
    with open_run(tmp_path, {"x": tensors}) as checkpointer:
        checkpointer.save(1)
        for each in tensors.values():
            each.zero_()
    loaded = {name: device.tensor(blank(each)) for name, each in expected.items()}
    ckptman.load({"x": loaded}, tmp_path / step_folder(1))
    assert differing(values_of(device, loaded), expected) == []


def test_a_load_from_the_page_cache(tmp_path, device):
    """A checkpoint that is in the page cache is restored onto the device by `restore` of another Checkpointer, into
    memory that is contiguous and into memory that is transposed: the same bits."""
    expected = any_tensors()
    ckptman.save({"x": expected}, tmp_path / step_folder(3))
    for path in (tmp_path / step_folder(3)).iterdir():
        path.read_bytes()
    tensors = {name: device.tensor(blank(each)) for name, each in expected.items()}
    tensors["large"] = device.tensor(blank(expected["large"].T.contiguous())).T
    with open_run(tmp_path, {"x": tensors}) as checkpointer:
        assert checkpointer.restore() == 3
    assert differing(values_of(device, tensors), expected) == []


def test_a_cold_load_with_a_flipped_byte(tmp_path, device):
    """Of two checkpoints that are not in the page cache, one byte of the newer one is another. Loading that one raises
    a CorruptError that names the file; `restore` warns, and fills the device with the bits of the older one."""
    tensors = {name: device.tensor(each) for name, each in any_tensors().items()}
    expected = values_of(device, tensors)
    with open_run(tmp_path, {"x": tensors}) as checkpointer:
        checkpointer.save(1)
        tensors["large"].zero_()
        checkpointer.save(2)
    flip_byte(tmp_path / step_folder(2) / data_name(0))
    for step in (1, 2):
        drop_from_cache(tmp_path / step_folder(step))
    with pytest.raises(ckptman.CorruptError, match=data_name(0)):
        ckptman.load({"x": tensors}, tmp_path / step_folder(2))
    with open_run(tmp_path, {"x": tensors}) as checkpointer, pytest.warns(RuntimeWarning, match=step_folder(2)):
        assert checkpointer.restore() == 1
    assert differing(values_of(device, tensors), expected) == []


def drop_from_cache(folder):
    """Have files read from disk by the next reader, as far as the file system can."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_generators_go_on_where_they_were(tmp_path, cuda):
    """The generators of the device and of the CPU draw, after a restore, what they drew after the save."""

    def draw():
        return [*torch.rand(5, device="cuda").tolist(), *torch.rand(5).tolist()]

    torch.cuda.manual_seed(3)
    draw()
    with open_run(tmp_path, {"rng": ckptman.RNGState(), "x": torch.ones(3)}) as checkpointer:
        checkpointer.save(1)
        expected = draw()
    assert draw() != expected
    with open_run(tmp_path, {"rng": ckptman.RNGState(), "x": torch.ones(3)}) as checkpointer:
        checkpointer.restore()
        assert draw() == expected


ON_THE_CPU = """
import sys
import torch
import ckptman

assert torch.cuda.is_available()
model = torch.nn.Linear(3, 3)
state = {"model": model, "rng": ckptman.RNGState()}
for _ in range(2):
    with ckptman.Checkpointer(sys.argv[1], state, deadline=None) as checkpointer:
        start = checkpointer.restore()
        checkpointer.step(start + 1)
        checkpointer.save(start + 1)
assert start == 1, start
assert not torch.cuda.is_initialized()
assert not torch._C._cuda_hasPrimaryContext(0)
"""


def test_a_run_on_the_cpu_makes_no_context_on_a_gpu(tmp_path, cuda):
    """A process whose tensors are all on the CPU, with `RNGState`, saves, restores and saves again where there is a
    GPU: it has no CUDA context in the end, which would take half a GB of the GPU."""
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_CPU, tmp_path / "run"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
