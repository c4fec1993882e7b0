"""Ways to change a state between two saves, and whether a checkpoint is what the state was.

A save takes over from the one before what has not changed, so each way in which something can change is here by name.
"""

import copy
import io
import json

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.utils import parametrize

import ckptman
from ckptman.engine.state.snapshot import snapshot


class Net(nn.Module):
    """Square and other weights, buffers of both kinds, and two names for one parameter."""

    def __init__(self):
        super().__init__()
        self.square, self.wide = nn.Linear(6, 6), nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(6))
        self.register_buffer("cache", torch.ones(6), persistent=False)

    def forward(self, x):
        x = self.norm(self.square(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.wide(x).sum() + self.head(x).sum()


def make_state(seed=0):
    """A module, two optimizers that have stepped, and plain values."""
    torch.manual_seed(seed)
    net = Net()
    first = torch.optim.AdamW([{"params": net.layers.parameters()}, {"params": net.square.parameters(), "lr": 0.1}])
    second = torch.optim.SGD([*net.wide.parameters(), *net.norm.parameters()], lr=0.01, momentum=0.9)
    state = {"net": net, "first": first, "second": second, "plain": {"epoch": 1, "seen": [1, 2]}}
    train(state)
    return state


def train(state):
    """One step of all."""
    net = state["net"]
    net.zero_grad()
    net(torch.randn(4, 6)).backward()
    for each in ("first", "second"):
        if each in state:
            state[each].step()


def _parameter(state):
    return state["net"].square.weight


def _set_data(change):
    def swap(state):
        parameter = _parameter(state)
        parameter.data = change(parameter.data)

    return swap


def _set(name, value, group=0):
    def change(state):
        state["first"].param_groups[group][name] = value

    return change


def _in_place(state):
    with torch.no_grad():
        for each in state["net"].parameters():
            each.add_(1)


def _replaced(state):
    net, old = state["net"], _parameter(state)
    net.square.weight = nn.Parameter(torch.randn(6, 6))
    _rename(state["first"], old, net.square.weight)


def _rename(optimizer, old, new):
    for group in optimizer.param_groups:
        group["params"] = [new if each is old else each for each in group["params"]]
    if old in optimizer.state:
        held = optimizer.state.pop(old)
        optimizer.state[new] = {name: torch.randn_like(new) if each.dim() else each for name, each in held.items()}


def _at_its_address(state):
    """A parameter is freed, and another takes its memory."""
    net, optimizer = state["net"], state["first"]
    shape, address = _parameter(state).shape, _parameter(state).data_ptr()
    held = optimizer.state.pop(_parameter(state))
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each is not _parameter(state)]
    net.square.weight = None
    for _ in range(50):
        made = torch.randn(shape)
        if made.data_ptr() == address:
            break
    net.square.weight = nn.Parameter(made)
    optimizer.param_groups[1]["params"].append(net.square.weight)
    optimizer.state[net.square.weight] = held


def _grown(state):
    _replaced(state)
    old = _parameter(state)
    state["net"].square.weight = nn.Parameter(torch.randn(9, 6))
    _rename(state["first"], old, _parameter(state))


def _swapped_children(state):
    layers = state["net"].layers
    layers[0], layers[2] = layers[2], layers[0]


def _moved_parameter(state):
    """From the end of one module to the begin of the next."""
    layers = state["net"].layers
    layers[1].other = layers[0].weight
    del layers[0].weight


def _rewrapped(state):
    net = state["net"]
    net.square = nn.Sequential(net.square)


def _own_state_dict(state):
    net = state["net"]
    real = net.mask

    def own(*args, **options):
        found = type(net).state_dict(net, *args, **options)
        found["mask"] = real + 41
        return found

    net.state_dict = own


def _hooked(state):
    def change(module, found, prefix, _):
        found[f"{prefix}mask"] = torch.full((6,), 42.0)

    state["net"].register_state_dict_post_hook(change)


class WithExtra(Net):
    def get_extra_state(self):
        return {"extra": 7}

    def set_extra_state(self, state):
        pass


def _other_class(state):
    state["net"].__class__ = WithExtra


def _group_added(state):
    state["first"].add_param_group({"params": [state["net"].embedding.weight], "lr": 0.5})


def _group_shrinks(state):
    group = state["first"].param_groups[0]
    gone = group["params"].pop()
    state["first"].state.pop(gone)


def _moved_between_groups(state):
    one, other = state["first"].param_groups
    other["params"].append(one["params"].pop())


def _state_of(state):
    return state["first"].state[state["net"].layers[0].weight]


def _loaded(assign):
    def load(state):
        other = Net()
        state["net"].load_state_dict(other.state_dict(), assign=assign)

    return load


def _optimizer_loaded(state):
    found = copy.deepcopy(state["first"].state_dict())
    for each in found["state"].values():
        each["exp_avg"] += 1
    state["first"].load_state_dict(found)


def _untied(state):
    net = state["net"]
    net.head.weight = nn.Parameter(net.embedding.weight.detach().clone())


def _other_optimizer(state):
    net = state["net"]
    state["second"] = torch.optim.SGD([*net.wide.parameters(), *net.norm.parameters()], lr=0.01, momentum=0.9)


def _reordered(state):
    first = state.pop("first")
    state["first"] = first


def _optimizer_hooked(state):
    def change(optimizer, found):
        return {**found, "besides": 5}

    state["first"].register_state_dict_post_hook(change)


def _step_as_number(state):
    for each in state["first"].state.values():
        each["step"] = int(each["step"]) + 3


def _as_list(state):
    group = state["first"].param_groups[0]
    group["betas"] = list(group["betas"])


def _appended(state):
    group = state["first"].param_groups[0]
    if isinstance(group["betas"], list):
        group["betas"][0] = 0.123
    else:
        group["betas"] = (0.123, 0.9)


def _lr_tensor(state):
    state["first"].param_groups[0]["lr"] = torch.tensor(0.25)


def _lr_filled(state):
    group = state["first"].param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(0.75)
    else:
        group["lr"] = 0.75


CHANGES = {
    "values, in place": _in_place,
    "a step": train,
    "a parameter is replaced": _replaced,
    "a parameter is freed, another has its address": _at_its_address,
    "a parameter has another shape": _grown,
    "data is swapped": _set_data(lambda data: data.clone() + 1),
    "data is transposed where it is": _set_data(lambda data: data.t() if data.shape[0] == data.shape[1] else data),
    "data is of another dtype": _set_data(lambda data: data.double()),
    "data is of another dtype of its size": _set_data(lambda data: data.view(torch.float32).clone()),
    "a buffer is registered": lambda state: state["net"].register_buffer("more", torch.full((3,), 5.0)),
    "a buffer is replaced": lambda state: setattr(state["net"], "mask", torch.full((6,), 9.0)),
    "a buffer is not saved any more": lambda state: state["net"].register_buffer(
        "mask", state["net"].mask, persistent=False
    ),
    "a buffer is saved from now on": lambda state: state["net"].register_buffer("cache", state["net"].cache),
    "a bias is gone": lambda state: setattr(state["net"].norm, "bias", None) if "second" not in state else None,
    "children change places": _swapped_children,
    "a parameter moves to the next module": _moved_parameter,
    "a module is wrapped again": _rewrapped,
    "a module is added": lambda state: state["net"].add_module("extra", nn.Linear(2, 2)),
    "a module is parametrized": lambda state: parametrize.register_parametrization(
        state["net"].head, "weight", nn.Identity()
    ),
    "a module has its own state_dict": _own_state_dict,
    "a module has a hook": _hooked,
    "a module is of another class": _other_class,
    "a module is loaded": _loaded(assign=False),
    "a module is loaded, by assignment": _loaded(assign=True),
    "two names are two parameters": _untied,
    "a group is added": _group_added,
    "a group has a parameter less": _group_shrinks,
    "a parameter is of another group": _moved_between_groups,
    "a learning rate": _set("lr", 0.3),
    "a learning rate, an integer": _set("lr", 1),
    "a learning rate, the same as a float": _set("lr", 1.0),
    "zero": _set("weight_decay", 0.0),
    "minus zero": _set("weight_decay", -0.0),
    "nan": _set("eps", float("nan")),
    "betas": _set("betas", (0.5, 0.6)),
    "betas in a list": _as_list,
    "betas in a list, in place": _appended,
    "a learning rate in a tensor": _lr_tensor,
    "a learning rate in a tensor, in place": _lr_filled,
    "a setting is added": _set("note", "warm"),
    "a setting is true": _set("maximize", True, 1),
    "state is replaced": lambda state: _state_of(state).update(exp_avg=torch.full((6, 6), 3.0)),
    "state is added": lambda state: _state_of(state).update(ema=torch.full((6, 6), 4.0)),
    "state is a number": _step_as_number,
    "state is gone": lambda state: state["first"].state.clear(),
    "an optimizer is loaded": _optimizer_loaded,
    "an optimizer has a hook": _optimizer_hooked,
    "an optimizer is another one": _other_optimizer,
    "a plain value": lambda state: state["plain"].update(epoch=state["plain"]["epoch"] + 1),
    "a plain value of another type": lambda state: state["plain"].update(epoch=1.5),
    "an entry is added": lambda state: state.update(more={"a": 1, "t": torch.ones(3)}),
    "an entry is gone": lambda state: state.pop("second", None),
    "entries change places": _reordered,
}
"""What happens between two saves, or during one, by name. Each takes the state, and changes it."""


class Expected:
    """A state as it is now, as a walk through all of it finds it."""

    def __init__(self, state):
        shot = snapshot(state, 0)
        self.tensors = {name: each.detach().clone() for name, each in shot.tensors.items()}
        self.objects = copy.deepcopy(shot.objects)
        self.units = [json.loads(each.text) for each in shot.units]
        self.paths, self.tied = dict(shot.paths), [list(each) for each in shot.tied]

    def differences(self, folder):
        """How a checkpoint differs from it, in words."""
        found = []
        index = json.loads((folder / "index.json").read_text())
        if [repr(each) for each in index["units"]] != [repr(each) for each in self.units]:
            found.append("plain values")
        if sorted(index.get("tied", [])) != sorted(self.tied):
            found.append("tied names")
        if index["tensors"].keys() != self.tensors.keys():
            found.append(f"names: {index['tensors'].keys() ^ self.tensors.keys()}")
            return found
        loaded = {name: torch.full_like(each, 77) for name, each in self.tensors.items()}
        ckptman.load(dict(loaded), folder)
        found += [name for name, each in self.tensors.items() if bits(each) != bits(loaded[name])]
        metadata = FileSystemReader(folder).read_metadata()
        if metadata.planner_data != self.paths:
            found.append("paths of .metadata")
        if metadata.state_dict_metadata.keys() != self.tensors.keys() | self.objects.keys():
            found.append("names of .metadata")
        for name, value in self.objects.items():
            at = index["objects"][name]
            with (folder / at["file"]).open("rb") as file:
                file.seek(at["offset"])
                pickled = torch.load(io.BytesIO(file.read(at["bytes"])), weights_only=False)
            if repr(pickled) != repr(value):
                found.append(f"the pickle of {name}")
        return found


def bits(tensor):
    """Dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
