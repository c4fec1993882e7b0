"""Reading the pickles of plain DCP and torchtitan without running what is in them.

Only the classes of torch's own checkpoint metadata are allowed: anything else in the pickle is refused by name, so no
byte of a foreign checkpoint can run code (pytorch#189308).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import threading
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptman._torch_compat import MEMORY_FORMAT_ENCODING, MemoryFormatEncoding, StorageInfo, get_layout
from ckptman.errors import CorruptError
from ckptman.storage.format.manifest import is_plain_name
from ckptman.storage.format.pickle_guard import HostilePickle, NotAllowed, check_pickle
from ckptman.storage.format.torch_zip import data_at, records
from ckptman.storage.io.safe_open import read_regular

MAX_PATH = 100
"""Names from the top of a state down to a value. Plain DCP itself can go no deeper than Python's own limit."""
_REMEDY = (
    "nothing of it was run. Restore another checkpoint; or, if you trust whoever wrote this one, load it by torch and "
    "save it again by ckptman"
)
_MOST_BYTES = 2**40


class _MemoryFormat:
    """A member of torch's enumeration of memory formats, as far as it is compared: the real one is for all to share,
    and a pickle can change what it is given."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryFormatEncoding) and other.value == self.value


class _TensorProperties(TensorProperties):
    """The properties of a tensor as any torch wrote them: 2.15 added strides, of which older ones know nothing."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[: len(fields(TensorProperties))])


def _text_of_path(*parts: str) -> str:
    """Return where it was saved: kept as a text, never opened."""
    return str(PurePosixPath(*parts))


_CHANGEABLE = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, StorageInfo),
)
"""The classes whose objects have attributes that a pickle may set: those of nothing else that it can make."""
_UNTIL_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in _CHANGEABLE},
    (TensorProperties.__module__, TensorProperties.__name__): _TensorProperties,
    MEMORY_FORMAT_ENCODING: _MemoryFormat,
    # Until torch 2.2 those of ShardedTensor were used, which are alike.
    (_UNTIL_2_2, "TensorProperties"): TensorProperties,
    (_UNTIL_2_2, "MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch.serialization", "_get_layout"): get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,  # the same to all who read it, and nothing can be put on it
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{
        (module, name): _text_of_path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "Path")
    },
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _ALLOWED.get((module, name))
        if known is None and module == "torch":
            known = vars(torch).get(name)  # not getattr: that imports what torch leaves for later
            known = known if isinstance(known, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint's metadata")
        return known


def read_foreign_metadata(path: Path) -> Metadata:
    """Read the `.metadata` of a checkpoint that ckptman did not write. Every name, number and path in it is checked,
    and every file that it names lies in its folder.

    Raises: CorruptError, OSError.
    """
    _check_links(path.parent, [path.name])
    data = read_regular(path, _MOST_BYTES, follow=True)
    try:
        check_pickle(data)
        metadata = _Restricted(io.BytesIO(data)).load()
    except Exception as error:
        why = (
            f"{error}"
            if isinstance(error, (HostilePickle, pickle.UnpicklingError))
            else f"{type(error).__name__}: {error}"
        )
        raise CorruptError(f"{path} was refused: {why}; {_REMEDY}") from error
    try:
        flaw = flaw_of_metadata(metadata)
    except (AttributeError, TypeError, ValueError) as error:
        flaw = str(error)
    if flaw is not None:
        raise CorruptError(f"{path} is not the metadata of a torch distributed checkpoint: {flaw}; {_REMEDY}")
    _check_links(path.parent, {info.relative_path for info in metadata.storage_data.values()})
    return cast(Metadata, metadata)


def _check_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse a name that leads out of the folder by a link. Raises: CorruptError."""
    home = os.path.realpath(folder)
    for name in names:
        there = os.path.realpath(os.path.join(home, name))
        if not Path(there).is_relative_to(home):
            raise CorruptError(
                f"{folder / name} is a link to {there[:200]!r}, outside of the checkpoint folder: links out of it are "
                f"not followed. If they are meant, copy the checkpoint with what they point to (cp -rL), and name the "
                f"folder of the copy"
            )


def load_plain(data: io.BytesIO, what: str) -> Any:
    """Unpickle a value by torch's restricted unpickler.

    Raises: CorruptError, naming `what` was refused; MemoryError.
    """
    try:
        pickled = _pickle_in(data)
        check_pickle(pickled)
        with _stand_ins(), _checked_sparse(pickled):
            value = torch.load(data, map_location="cpu", weights_only=True)
        return _settled(value) if b"numpy" in pickled or b"BytesIO" in pickled else value
    except MemoryError:
        raise
    except Exception as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked:
            raise NotAllowed(
                f"{what} was refused: it asks for {asked[1]}, which is no plain value; nothing of it was run. If you "
                f"trust whoever wrote it, allow that by torch.serialization.add_safe_globals; or leave the value out",
                asked[1],
            ) from error
        raise CorruptError(f"{what} was refused: {_reason(error)}; {_REMEDY}") from error


@contextlib.contextmanager
def _checked_sparse(pickled: bytes) -> Iterator[None]:
    """Have torch check sparse tensors: it writes where their indices say. From 2.14 on it says that this takes time."""
    with torch.sparse.check_sparse_tensor_invariants(), contextlib.ExitStack() as stack:  # type: ignore[no-untyped-call]
        if b"sparse" in pickled:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        yield


def _pickle_in(data: io.BytesIO) -> bytes:
    """Return the pickle in a file of torch.save, a zip archive as torch writes them. Raises: ValueError and others.

    Nothing in it is compressed, so that it takes no more memory than it has bytes, and every name is there once: torch
    and Python's zipfile see the same.
    """
    memory = data.getbuffer()
    infos = records(data)
    names = [info.orig_filename.lower() for info in infos]
    if len({*names}) < len(names) or {name.partition("/")[0] for name in names} != {names[0].partition("/")[0]}:
        raise HostilePickle("its archive has names that torch.save does not write")
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > len(memory) for info in infos):
        raise HostilePickle("its archive is compressed, or claims more than there is: torch.save writes neither")
    found = [info for info in infos if info.orig_filename.partition("/")[2] == "data.pkl"]
    if len(found) != 1 or found[0].extra:
        raise HostilePickle("its archive holds no data.pkl as torch.save writes it")
    start = data_at(data, found[0])
    data.seek(0)
    return bytes(memory[start : start + found[0].file_size])


# ---- values of numpy ---------------------------------------------------------------------------------------------
#
# numpy believes what a pickle says of a dtype: fields of Python objects in raw bytes are pointers that it follows. So
# nothing of numpy's own is handed to a pickle, but the following, of which arrays are made when all of it is known.

_UNITS = frozenset(b"generic Y M W D h m s ms us ns ps fs as".split())


@dataclass
class _Dtype:
    """Stands for a dtype of numbers, texts or times, which is `made`. None of Python objects, none with fields."""

    code: str
    align: bool = False
    copy: bool = False
    made: Any = field(init=False)

    def __post_init__(self) -> None:
        if not re.fullmatch("[biufcSUmM][0-9]{1,9}", self.code):
            raise HostilePickle(f"it holds {self.code[:20]!r} of numpy, which is no number, text or time")
        self.made = np.dtype(self.code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, order, base, names, fields, _size, _alignment, flags, *more = state
        # 8: a new array has to be filled with zeros, which is so of every text.
        if base is not None or names is not None or fields is not None or flags not in (0, 8) or order not in "<>|=":
            raise HostilePickle("it holds a dtype of numpy with parts")
        text = order + self.code
        if self.code[0] in "mM":
            ((_metadata, (unit, count, divisor, _event)),) = more
            if unit not in _UNITS or type(count) is not int or divisor != 1:
                raise HostilePickle("it holds a unit of time that numpy does not have")
            text += "" if unit == b"generic" else f"[{count}{unit.decode()}]"
        self.made = np.dtype(text)


@dataclass
class _Array:
    """Stands for an array, which is `made`."""

    made: Any = field(init=False)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, by_columns, data = state
        if type(dtype) is not _Dtype or type(data) is not bytes:
            raise HostilePickle("it holds an array of Python objects")
        saved = np.frombuffer(data, dtype.made).reshape(shape, order="F" if by_columns else "C")
        self.made = saved.astype(dtype.made.newbyteorder("="), order="K")  # as numpy itself does, and always a copy


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if kind is not _Array or shape != (0,) or code != b"b":
        raise HostilePickle("it makes an array as numpy does not")
    return _Array()


def _scalar(dtype: object, data: object) -> Any:
    if type(dtype) is not _Dtype or type(data) is not bytes or len(data) != dtype.made.itemsize:
        raise HostilePickle("it holds a number of numpy that is none")
    return np.frombuffer(data, dtype.made)[0] if data else dtype.made.type()


def _no_bytes() -> bytes:
    return b""


# ---- values of the standard library ------------------------------------------------------------------------------


class _Stream:
    """Stands for an `io.BytesIO`, which is `made`: bytes and a place in them, and nothing that was put on it."""

    __hash__ = None  # type: ignore[assignment]
    made: io.BytesIO

    def __new__(cls) -> _Stream:
        stream = super().__new__(cls)
        stream.made = io.BytesIO()
        return stream

    def __setstate__(self, state: object) -> None:
        data, place, more = state if type(state) is tuple and len(state) == 3 else (None, None, None)
        if type(data) is not bytes or type(place) is not int or not 0 <= place < 2**63 or more:
            raise HostilePickle("it holds an io.BytesIO as Python does not write it")
        self.made = io.BytesIO(data)
        self.made.seek(place)


# ------------------------------------------------------------------------------------------------------------------

_STAND_INS: tuple[tuple[Any, str], ...] = (
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_no_bytes, "builtins.bytes"),
    (frozenset, "builtins.frozenset"),
    (_Stream, "_io.BytesIO"),
)
_MADE = (_Array, _Dtype, _Stream)
_NAMES = {name for _, name in _STAND_INS}
_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Put stand-ins into torch's list of what is safe, which is one for the process, in place of what there is of numpy
    and `io`: others may have put the real ones there."""
    with _ONE_AT_A_TIME:
        theirs = [each for each in torch.serialization.get_safe_globals() if _has_stand_in(each)]
        _replace(theirs, _STAND_INS)
        try:
            yield
        finally:
            _replace(_STAND_INS, theirs)


def _replace(old: Iterable[Any], new: Iterable[Any]) -> None:
    kept = [each for each in torch.serialization.get_safe_globals() if each not in old]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*kept, *new])


def _has_stand_in(entry: Any) -> bool:
    thing, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
    return name in _NAMES or f"{getattr(thing, '__module__', '')}.".startswith("numpy.")


def _settled(value: Any) -> Any:
    """Return a value with what stands for arrays, dtypes and streams replaced by them, wherever it is."""
    top = [value]
    todo: list[Any] = [top]
    seen: dict[int, tuple[Any, Any]] = {}  # what was met, which thereby stays where it is, and what is in its place

    def settle(each: Any) -> Any:
        if type(each) in _MADE:
            return each.made
        holds = each if type(each) in (list, dict, OrderedDict, Counter) else getattr(each, "__dict__", None)
        if type(each) is not tuple and not isinstance(holds, (list, dict)):
            return each
        if id(each) not in seen:
            if type(each) is tuple:
                seen[id(each)] = each, tuple(settle(part) for part in each)
            else:
                seen[id(each)] = each, each
                todo.append(holds)
        return seen[id(each)][1]

    while todo:
        here = todo.pop()
        # dict.items: a pickle can put an attribute of that name on an OrderedDict.
        for key, each in list(enumerate(here)) if isinstance(here, list) else list(dict.items(here)):
            if (settled := settle(each)) is not each:
                here[key] = settled
    return top[0]


# ------------------------------------------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    """Return why a value was refused, without torch's advice to load it unrestricted."""
    text = str(error)
    if f"Unsupported operand {pickle.LONG4[0]}" in text:
        return "it holds a whole number of more than 255 bytes, which torch's weights_only does not read"
    told = re.search(r"WeightsUnpickler error:\s*(.+)", text)
    lines = (told[1] if told else text).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def transforms_in(metadata: Metadata) -> dict[tuple[str, int, int], str]:
    """Return file, offset and bytes of the containers that DCP's stream extensions changed, and by which extension."""
    found = {}
    for info in metadata.storage_data.values():
        if names := getattr(info, "transform_descriptors", None):
            where = (str(info.relative_path), info.offset, info.length)
            found[where] = ", ".join(map(str, names if isinstance(names, (list, tuple)) else [names]))[:100]
    return found


def flaw_of_metadata(metadata: object) -> str | None:
    """Return what is wrong with an unpickled description, or None. Raises: AttributeError, TypeError."""
    if not isinstance(metadata, Metadata):
        return "it describes something else"
    described, places, paths = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data
    if type(described) is not dict or type(places) is not dict or type(paths) not in (dict, type(None)):
        return "a part of it is no table"
    for name, each in described.items():
        if not isinstance(name, str) or not isinstance(each, (TensorStorageMetadata, BytesStorageMetadata)):
            return f"{str(name)[:100]!r} is described as nothing that can be saved"
        if isinstance(each, TensorStorageMetadata) and not _is_tensor(each):
            return f"{name[:100]!r} is described as no tensor can be"
    for index, info in places.items():
        if not _is_place(index, info):
            return "a chunk lies where none can be"
        if not all(is_plain_name(part) for part in info.relative_path.split("/")):
            return f"it points to {info.relative_path[:100]!r}, which is outside the checkpoint folder"
    for name, path in (paths or {}).items():
        if not isinstance(path, tuple) or not path or not all(isinstance(part, (str, int)) for part in path):
            return f"it does not say where in the state {str(name)[:100]!r} is"
        if len(path) > MAX_PATH:
            return f"{str(name)[:100]!r} is nested more than {MAX_PATH} deep"
    return None


def _is_tensor(described: TensorStorageMetadata) -> bool:
    return (
        isinstance(described.properties.dtype, torch.dtype)
        and _are_numbers(described.size)
        and isinstance(described.chunks, list)
        and all(
            _are_numbers(chunk.offsets) and _are_numbers(chunk.sizes) and len(chunk.offsets) == len(chunk.sizes)
            for chunk in described.chunks
        )
    )


def _is_place(index: object, info: object) -> bool:
    return (
        isinstance(index, MetadataIndex)
        and isinstance(index.fqn, str)
        and (index.offset is None or _are_numbers(index.offset))
        and isinstance(info, StorageInfo)
        and type(info.relative_path) is str
        and _are_numbers((info.offset, info.length))
    )


def _are_numbers(numbers: object) -> bool:
    """Return whether they fit the chunk table; whether they are right the table sees, which knows the files."""
    return isinstance(numbers, (tuple, list)) and all(
        type(each) is int and -(2**63) <= each < 2**63 for each in numbers
    )
