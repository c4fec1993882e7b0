"""How large a checkpoint is: by the practitioners' rule, and from the shapes of its tensors, file by file.

The files follow what `saving.write_plan` and `state.file_layout` do, on any mesh; tests save
and compare. Data files and the digests of their blocks are exact to the byte. What describes them is text, whose
numbers differ in length: to 1 % of itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptman.policies.parameters import check_positive

RULE_FACTOR = 5
"""Size of a checkpoint = parameters x 5 x bytes per element: the practitioners' rule (a 7B model at 16 bit: 70 GB)."""
RULE_SOURCE = "the rule of thumb of teams on Leonardo, LUMI and SuperPOD, 2024: 7B at 16 bit is 70 GB"
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
MOMENTS = 2
"""AdamW keeps two for each parameter, of its dtype."""
STEP_BYTES = 4
"""And counts its steps for each, in a float32 of its own."""

PAGE_BYTES = 4096
LARGE_BYTES = 1024 * 1024
"""Payloads of so much begin on a page, and tensors of so much are cut, so that replicas can share them."""
SMALL_ALIGN_BYTES = 64
HEAD_BYTES, TAIL_BYTES, LONG_TAIL_BYTES = 704, 873, 925
"""Of the archive that torch.save makes of a tensor, around its payload; the last from 4 GiB on."""
VALUE_BYTES = 1261
"""Of the archive that torch.save makes of a number or a short text."""
RANDOM_BYTES, RANDOM_TEXT_BYTES = 22701, 21560
"""The state of Python's, NumPy's and torch's random number generators: as an archive, and as text."""
BLOCK_BYTES, DIGEST_BYTES = 128 * 1024, 16
_DTYPES = {8: "float64", 4: "float32", 2: "bfloat16", 1: "uint8"}
_INDEX_BYTES, _OTHER_BYTES, _METADATA_BYTES = 60, 20, 900
_MANIFEST_BYTES, _MANIFEST_RANK_BYTES = 700, 240
"""What these files have besides: once, or for each value or rank."""
MOST_SHARDS = 64
"""Of more shards the first is laid out and stands for all: they differ by a few rows."""

ADAMW_VALUES = (
    *(("lr", 20), ("betas", 28), ("eps", 5), ("weight_decay", 4), ("amsgrad", 5), ("maximize", 5), ("foreach", 4)),
    *(("capturable", 5), ("differentiable", 5), ("fused", 4), ("decoupled_weight_decay", 4)),
)
"""What AdamW keeps for each parameter besides tensors, and how long that is as JSON."""
SCHEDULED_VALUES = (*ADAMW_VALUES, ("initial_lr", 6))
"""The same where the learning rate has a scheduler."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the state by its flat name. `sharded`: each rank of a shard group has some of its rows."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int = 4
    sharded: bool = True
    parameter: bool = True
    """It is trained, so the optimizer has a state for it; else it is frozen, or a buffer."""
    tied: bool = False
    """It is one of those before it by another name."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.item_bytes


def rule_bytes(parameters: float, item_bytes: int) -> int:
    """Return the practitioners' rule. Raises IntervalError for no parameters."""
    check_positive("plan", "parameters", parameters)
    return round(parameters * RULE_FACTOR * item_bytes)


def state_bytes(parameters: float, item_bytes: int, moments: int = MOMENTS, moment_bytes: int | None = None) -> int:
    """Return the bytes of parameters and optimizer moments, where nothing is known but their number."""
    check_positive("plan", "parameters", parameters)
    return round(parameters * (item_bytes + moments * (item_bytes if moment_bytes is None else moment_bytes)))


def with_optimizer(tensors: Iterable[SavedTensor], moments: int = MOMENTS) -> list[SavedTensor]:
    """Return the tensors of the state `{"model": ..., "optimizer": AdamW}`, sorted by name as they are written.

    `tensors` are those of the model by their names in it. A moment has the dtype and the shape of its parameter.
    """
    found = []
    for each in tensors:
        found.append(replace(each, name=f"model.{each.name}"))
        if not each.parameter or not moments:
            continue
        own = f"optimizer.state.{each.name}"
        names = ("exp_avg", "exp_avg_sq")[:moments] + tuple(f"moment_{number}" for number in range(2, moments))
        found += [SavedTensor(f"{own}.{name}", each.shape, each.item_bytes, each.sharded) for name in names]
        found.append(SavedTensor(f"{own}.step", (), STEP_BYTES, sharded=False))
    return sorted(found, key=lambda each: each.name)


def parameter_count(tensors: Sequence[SavedTensor]) -> int:
    """Elements that are trained."""
    return sum(each.elements for each in tensors if each.parameter)


def frozen(tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Parameters that are not trained: they are sharded, but have neither gradients nor moments."""
    return [each for each in tensors if each.sharded and not each.parameter and not each.tied]


@dataclass(frozen=True)
class SavedValues:
    """The plain values of a state: `each` those that the optimizer keeps for a parameter, with the length of their
    JSON; `others` the flat names of the rest. `random`: there is an `RNGState`, which each rank saves for itself."""

    each: tuple[tuple[str, int], ...] = ADAMW_VALUES
    others: tuple[str, ...] = ()
    random: bool = True


@dataclass(frozen=True)
class Size:
    """Bytes of a checkpoint. `payload`: the elements of its tensors; `data`: the data files, which hold them; `digests`
    and `texts`: what describes those. `largest`: the largest data file. `chunks`: pieces of tensors."""

    payload: int
    data: int
    digests: int
    texts: int
    largest: int
    chunks: int

    @property
    def total(self) -> int:
        return self.data + self.digests + self.texts


def checkpoint_size(tensors: Sequence[SavedTensor], values: SavedValues, replicas: int = 1, shards: int = 1) -> Size:
    """Return what a save of `tensors` (see `with_optimizer`) writes on `replicas` x `shards` ranks."""
    ranks = replicas * shards
    divided = _divide(tensors, replicas, shards)
    named = [f"optimizer.param_groups.{name}.{key}" for name in _with_state(tensors) for key, _ in values.each]
    plain = [*named, *values.others]
    first = _file_bytes([*divided.pieces[0], *divided.alone], len(plain), values.random)
    files = [(_file_bytes(each, 0, values.random), divided.times) for each in divided.pieces]
    files[0] = (files[0][0], divided.times - 1)
    files.append((first, 1))
    texts = 8 * sum(divided.chunks[each.name] * (4 + 2 * len(each.shape)) for each in tensors)
    texts += _index_bytes(tensors, divided.chunks, values, first, ranks)
    texts += _metadata_bytes(tensors, divided.chunks, plain, ranks if values.random else 0)
    texts += _MANIFEST_BYTES + ranks * _MANIFEST_RANK_BYTES + (ranks * RANDOM_TEXT_BYTES if values.random else 0)
    return Size(
        payload=sum(each.bytes for each in tensors),
        data=sum(size * count for size, count in files),
        digests=sum(_digests_bytes(size) * count for size, count in files),
        texts=texts,
        largest=max(size for size, count in files if count),
        chunks=sum(divided.chunks.values()),
    )


@dataclass(frozen=True)
class _Divided:
    """Who writes what: for each rank the bytes of its pieces, and how many of each tensor there are. `alone`: bytes of
    pieces that only rank 0 has. Where there are too many shards, a rank stands for `times` in a row of the mesh."""

    pieces: list[list[int]]
    alone: list[int]
    chunks: Counter[str]
    times: int


def _divide(tensors: Sequence[SavedTensor], replicas: int, shards: int) -> _Divided:
    """As `saving.write_plan.divide`: holders of the same rows share them evenly, by bytes. Replicas: the outer axis."""
    times = shards if shards > MOST_SHARDS else 1
    columns = shards // times
    found = _Divided([[] for _ in range(replicas * columns)], [], Counter(), times)
    cut: list[SavedTensor] = []
    by_all: list[tuple[SavedTensor, int]] = []
    for each in tensors:
        rows = each.shape[0] if each.shape else 1
        if each.sharded and each.shape and each.elements and shards > 1:
            cut.append(each)
        elif each.parameter and each.elements and times == 1:
            by_all.append((each, rows))
        else:
            found.alone.append(each.bytes)  # buffers may differ from rank to rank: all of one come from the lowest
            found.chunks[each.name] += 1
    for rank, name, size in _share(by_all, len(found.pieces)):
        found.pieces[rank].append(size)
        found.chunks[name] += 1
    for column in range(columns):
        line = [(each, _rows_of(each.shape[0], shards, column)) for each in cut]
        for replica, name, size in _share([(each, rows) for each, rows in line if rows], replicas):
            found.pieces[replica * columns + column].append(size)
            found.chunks[name] += times
    return found


def _rows_of(rows: int, shards: int, number: int) -> int:
    """As torch.chunk cuts: all shards but the last ones are as large as can be."""
    most = -(-rows // shards)
    return max(0, min(most, rows - most * number))


def _share(line: Sequence[tuple[SavedTensor, int]], holders: int) -> Iterator[tuple[int, str, int]]:
    """Holder, name and bytes of each piece of boxes that are laid end to end, in the order of their names."""
    sizes = [each.bytes // each.shape[0] * rows if each.shape else each.bytes for each, rows in line]
    total, start = sum(sizes), 0
    for (each, rows), size in zip(line, sizes):
        first, last = start * holders // total, min((start + size) * holders // total, holders - 1)
        if holders == 1:
            yield 0, each.name, size
        elif size < LARGE_BYTES or not each.shape:
            middle = (2 * start + size) // 2
            edges = (number for number in range(first, last + 1) if total * (number + 1) // holders > middle)
            yield next(edges, last), each.name, size
        else:
            for number in range(first, last + 1):
                edges_of = (total * number // holders, total * (number + 1) // holders)
                low, high = (min(max(round((edge - start) * rows / size), 0), rows) for edge in edges_of)
                if low < high:
                    yield number, each.name, (high - low) * (size // rows)
        start += size


def _file_bytes(pieces: Sequence[int], values: int, random: bool) -> int:
    """Return the bytes of a data file: large payloads on pages, then small ones, then from a page on what is
    pickled."""
    end = 0
    for size in sorted(pieces, key=lambda size: size < LARGE_BYTES):
        payload = _up(end + HEAD_BYTES, PAGE_BYTES if size >= LARGE_BYTES else SMALL_ALIGN_BYTES)
        tail = TAIL_BYTES if size < 2**32 else LONG_TAIL_BYTES
        end = payload + size + tail - size % SMALL_ALIGN_BYTES
    end = _up(end, PAGE_BYTES) + values * _up(VALUE_BYTES, SMALL_ALIGN_BYTES)
    return _up(end + (RANDOM_BYTES if random else 0), PAGE_BYTES)


def _digests_bytes(size: int) -> int:
    return -(-size // BLOCK_BYTES) * DIGEST_BYTES


def _index_bytes(
    tensors: Sequence[SavedTensor], chunks: Counter[str], values: SavedValues, file_bytes: int, ranks: int
) -> int:
    """`index.json`: what it says of each file, tensor and plain value, with the numbers of a typical one."""
    total, start = _INDEX_BYTES + ranks * len('"__000_0.distcp",'), 0
    for each in tensors:
        state, _, key = each.name.partition(".")
        shape = ",".join(map(str, each.shape))
        total += len(f'"{each.name}":{{"dtype":"{_DTYPES.get(each.item_bytes, "float32")}","shape":[{shape}],"start":')
        total += len(f'{start},"count":{chunks[each.name]},"axis":0}},')
        total += len(f'{{"state":"{state}","key":"{key}","whole":false,"value":{{"~":"tensor","v":"{each.name}"}}}},')
        start += chunks[each.name] * (4 + 2 * len(each.shape))
    place = len(f'"":{{"file":"__0_0.distcp","offset":{file_bytes},"bytes":{VALUE_BYTES}}},')
    unit = len('{"state":"","key":"","whole":false,"value":},')
    of_parameter = len("optimizer.param_groups..") + len("optimizerparam_groups..") + place + unit
    for name in _with_state(tensors):
        total += sum(2 * (len(name) + len(key)) + length + of_parameter for key, length in values.each)
    total += sum(2 * len(name) + place + unit + _OTHER_BYTES for name in values.others)
    return total + (ranks * (place + len("rng.rank-00000.generators")) if values.random else 0)


def _metadata_bytes(tensors: Sequence[SavedTensor], chunks: Counter[str], plain: Sequence[str], random: int) -> int:
    """`.metadata`: the instructions of a pickle. Each name is in it three times, once in two parts."""
    total = _METADATA_BYTES
    for each in tensors:
        size = 5 + sum(map(_integer_bytes, each.shape))
        own = (17 + sum(map(_integer_bytes, each.shape))) + 35
        total += 3 * len(each.name) + 37 + 2 * size + chunks[each.name] * own
    total += sum(3 * len(name) + 65 for name in plain)
    return total + random * (3 * len("rng.rank-00000.generators") + 65)


def _integer_bytes(number: int) -> int:
    return 2 if number < 2**8 else 3 if number < 2**16 else 5


def _with_state(tensors: Sequence[SavedTensor]) -> list[str]:
    """Return the parameters that the optimizer has a state for."""
    head, tail = "optimizer.state.", ".step"
    names = (each.name for each in tensors)
    return [name[len(head) : -len(tail)] for name in names if name.startswith(head) and name.endswith(tail)]


def _up(number: int, align: int) -> int:
    return -(-number // align) * align
