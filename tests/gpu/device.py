"""The device of a scenario, real or pretended, and a small training on it whose every tensor is known."""

import time
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import nn

import ckptman
from ckptman.storage.format.paths import step_folder
from tests.engine.dcp.test_values import differing
from tests.helpers.fake_device import FakeDevice

WAIT = 20.0
"""Seconds after which a scenario gives up on another thread."""
BUSY = 0.4
"""Seconds for which a device is kept busy: what does not wait for it is done long before."""
Tensors = dict[str, torch.Tensor]


class Cuda:
    """The first GPU, by the names that the pretended device has."""

    Stream = torch.cuda.Stream
    stream = staticmethod(torch.cuda.stream)
    current_stream = staticmethod(torch.cuda.current_stream)
    synchronize = staticmethod(torch.cuda.synchronize)

    def tensor(self, values):
        """Return a tensor on the device with these values, put there on the current stream. The host does not wait."""
        return values.pin_memory().to("cuda", non_blocking=True)

    def values(self, tensor):
        """Return what a tensor holds once everything is done."""
        torch.cuda.synchronize()
        return tensor.detach().cpu()

    @contextmanager
    def capture(self):
        """Capture what is done inside into a graph, in the mode that forbids the most: of all threads."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            yield graph


Device = Cuda | FakeDevice


def busy(device, seconds=BUSY):
    """Keep the current stream busy: what is submitted after this begins that much later."""
    if isinstance(device, FakeDevice):
        device.current_stream().submit(partial(time.sleep, seconds))
    else:
        torch.cuda._sleep(int(seconds * _cycles_per_second()))


@cache
def _cycles_per_second():
    """The highest of some, once the clock of the device has come up."""
    torch.cuda._sleep(1_000_000_000)
    found, cycles = [], 50_000_000
    for _ in range(3):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        torch.cuda._sleep(cycles)
        ended.record()
        ended.synchronize()
        found.append(1000 * cycles / begun.elapsed_time(ended))
    return max(found)


class Net(nn.Module):
    """Two parts that are trained, one that is not, and a buffer that each forward pass changes."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.frozen = nn.Linear(24, 1031), nn.Linear(1031, 24), nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.register_buffer("passes", torch.zeros(3))

    def forward(self, x):
        self.passes.add_(1)
        return self.frozen(self.second(self.first(x)))


class Run:
    """A training of `Net` by two optimizers. After one step it has all its state. Without a device it is on the CPU."""

    def __init__(self, device=None, seed=0, *, hosted=True):
        self.device, self.net = device, Net(seed)
        if device is not None:
            put_on(device, self.net)
        self.first = torch.optim.AdamW(self.net.first.parameters(), lr=0.01)
        self.second = torch.optim.SGD(self.net.second.parameters(), lr=0.01, momentum=0.9)
        self.state = {"net": self.net, "first": self.first, "second": self.second}
        if hosted:
            self.state["hosted"] = {"position": torch.arange(1000)}
        self.train_step(0)

    def train_step(self, number):
        """One step, on data that depends on the number alone."""
        self.backward(number)
        self.first.step()
        self.second.step()
        if "hosted" in self.state:
            self.state["hosted"]["position"].add_(1)

    def backward(self, number):
        """Leave gradients in place of those of before. Of a pretended device autograd would ask the real runtime."""
        if isinstance(self.device, FakeDevice):
            self.net.passes.add_(1)
            for parameter in (*self.net.first.parameters(), *self.net.second.parameters()):
                parameter.grad = parameter.detach() * 0.5 + number
            return
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(number))
        self.net.zero_grad()
        self.net(x if self.device is None else self.device.tensor(x)).square().mean().backward()

    def tensors(self):
        """All that is saved, by name: the live tensors."""
        found = dict(self.net.state_dict())
        for name in ("first", "second"):
            for number, entries in self.state[name].state_dict()["state"].items():
                found |= {f"{name}.{number}.{key}": each for key, each in entries.items()}
        return found | {f"hosted.{name}": each for name, each in self.state.get("hosted", {}).items()}

    def copies(self):
        """Copies of all of it, made on the device as the next thing it does: the host waits for nothing."""
        return {name: each.detach().clone() for name, each in self.tensors().items()}


def put_on(device, module):
    """Move the parameters and buffers of a module to the device."""
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            moved = nn.Parameter(device.tensor(parameter.detach()), requires_grad=parameter.requires_grad)
            each.register_parameter(name, moved)
        for name, buffer in list(each.named_buffers(recurse=False)):
            each.register_buffer(name, device.tensor(buffer))


def open_run(root, state, **options):
    """A Checkpointer that stops for nothing."""
    return ckptman.Checkpointer(root, state, deadline=None, watchdog=None, **options)


def values_of(device, tensors):
    """What tensors hold once everything is done, in host memory."""
    return {
        name: device.values(each) if each.device.type == "cuda" else each.detach().clone()
        for name, each in tensors.items()
    }


def check_saved(root, device, kept, *, hosted=True):
    """Check that each checkpoint holds, bit for bit, the copies that were made at its step."""
    for step, copies in kept.items():
        fresh = Run(seed=1, hosted=hosted)
        ckptman.load(fresh.state, root / step_folder(step))
        expected = values_of(device, copies)
        assert fresh.tensors().keys() == expected.keys()
        assert differing(fresh.tensors(), expected) == [], f"step {step}"


def saved(root, step, like):
    """What the checkpoint of a step holds of the entry "x", read on the host. `like`: their dtypes and shapes."""
    found = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in like.items()}
    ckptman.load({"x": found}, root / step_folder(step))
    return found
