"""Whether a pickle can be read at all without harm, seen from its instructions alone: nothing is built, nothing is run.

Which classes and functions a pickle asks for is for a restricted unpickler to refuse. This is about what such an
unpickler would do willingly: take a gigabyte because four bytes say so, follow tuples within tuples until the stack of
the process is used up or for the rest of its life (looking up a key hashes them all), encode a text by a codec that
takes minutes, or set attributes on a class.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from ckptman.errors import CorruptError

MAX_DEPTH = 100
"""Tuples in tuples. torch's own checkpoints have three or four."""
MAX_MARKS = 1000
FREE = 1_000_000
"""Steps that any pickle may take, besides some for each of its bytes."""
_STEPS_PER_BYTE = 16
_FRAME_HEAD_BYTES = 9
_LATIN = {"latin1", "latin-1"}
"""How picklers name the one encoding by which they write bytes as a text. Others can take minutes for a small one."""
_ENCODERS = {"encode", "bytearray"}


class HostilePickle(ValueError):
    """A pickle that no pickler has made."""


class NotAllowed(CorruptError):
    """A pickle asks for something that is not allowed, `asked`: what is wrong need not be its bytes."""

    def __init__(self, text: str, asked: str = "") -> None:
        super().__init__(text)
        self.asked = asked


def check_pickle(data: bytes) -> None:
    """Go through the instructions of a pickle. Raises: HostilePickle, with what it would do."""
    try:
        _Reader(data).run()
    except HostilePickle:
        raise
    except (IndexError, KeyError, ValueError):
        raise HostilePickle("its instructions end too early, or use what is not there") from None


class _Thing:
    """Something on the stack: of how many parts it is made, each counted as often as it is met, and how deep its tuples
    are. What `kind` it is, where that counts."""

    __slots__ = ("depth", "kind", "parts")

    def __init__(self, parts: int = 1, depth: int = 0, kind: str = "") -> None:
        self.parts, self.depth, self.kind = parts, depth, kind


_ATOM, _LATIN_NAME, _BYTES = _Thing(kind="atom"), _Thing(kind="latin"), _Thing(kind="bytes")
_HOLDS_NOTHING = {"atom", "latin", "bytes"}
_GLOBAL = "global"
"""A class or a function that was asked for by its name."""
_ENCODER = _Thing(parts=2**62, kind=_GLOBAL)
"""What encodes a text. It has more parts than anything may: nothing that would call it can be given it."""
_ENCODED = "encoded"
"""A tuple that a pickler hands to an encoder: a text and the name of that encoding, or bytes, or nothing."""


class _Reader:
    """Follows what the instructions do to the stack and to the memo, without values."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[_Thing] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Thing] = {}
        self._steps = 0

    def run(self) -> None:
        """Raises: HostilePickle, IndexError, KeyError, ValueError."""
        put = self._stack.append
        for opcode, argument, at in pickletools.genops(self._data):
            name, self._at = opcode.name, at or 0
            if name in _VALUES:
                put(_VALUES[name])
            elif name in _TEXTS:
                put(_LATIN_NAME if argument in _LATIN else _ATOM)
            elif name in _MAKES:
                make, count = _MAKES[name]
                make(self, self._take_to_mark() if count is None else self._take(count))
            elif name in _OTHERS:
                _OTHERS[name](self, argument)
            else:
                raise HostilePickle(f"it has the instruction {name}, which no checkpoint needs")

    # ---- the stack and the memo --------------------------------------------------------------------------------

    def _take(self, count: int) -> list[_Thing]:
        if len(self._stack) - count < (self._marks[-1] if self._marks else 0):
            raise IndexError
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _take_to_mark(self) -> list[_Thing]:
        at = self._marks.pop()
        taken = self._stack[at:]
        del self._stack[at:]
        return taken

    def mark(self, _: object) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise HostilePickle(f"it is nested more than {MAX_MARKS} deep")
        self._marks.append(len(self._stack))

    def pop(self, _: object) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._take(1)

    def put(self, number: int | None) -> None:
        number = len(self._memo) if number is None else number
        # A pickler numbers what it remembers one after the other.
        if not 0 <= number <= self._at + 1:
            raise HostilePickle(f"it wants room to remember {number} objects, and has {len(self._data)} bytes")
        self._memo[number] = self._stack[-1]

    def get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def frame(self, size: int) -> None:
        if size > len(self._data) - self._at - _FRAME_HEAD_BYTES:
            raise HostilePickle(f"it claims {size} more bytes than it has")

    # ---- what is built -----------------------------------------------------------------------------------------

    def new(self, _: object) -> None:
        self._stack.append(_Thing())

    def tuple(self, held: list[_Thing]) -> None:
        depth = 1 + max((each.depth for each in held), default=0)
        if depth > MAX_DEPTH:
            raise HostilePickle(f"its tuples are nested more than {MAX_DEPTH} deep")
        kind = ""
        if not held or (len(held) == 2 and held[1] is _LATIN_NAME) or (len(held) == 1 and held[0].kind == "bytes"):
            kind = _ENCODED
        self._stack.append(_Thing(1 + sum([each.parts for each in held]), depth, kind))
        self._bound(self._stack[-1].parts)

    def reduce(self, held: list[_Thing]) -> None:
        encodes = held[0] is _ENCODER
        if encodes and held[1] is not _ATOM and held[1].kind != _ENCODED:  # an atom: the empty tuple
            raise HostilePickle("it encodes a text as no pickler does")
        self.call(held[1:] if encodes else held, "bytes" if encodes else "")

    def call(self, held: list[_Thing], kind: str = "") -> None:
        """Something is made of what it is given, and may look at all of that, to hash it above all."""
        self.tuple(held)
        self._stack[-1].kind = kind
        self._work(self._stack[-1].parts)

    def add(self, held: list[_Thing]) -> None:
        target = self._stack[-1]
        if target.kind in _HOLDS_NOTHING:
            raise HostilePickle("it adds something to what holds nothing")
        more = sum([each.parts for each in held])
        target.parts += more
        self._bound(target.parts)
        self._work(more)

    def build(self, held: list[_Thing]) -> None:
        if self._stack[-1].kind == _GLOBAL:
            raise HostilePickle("it changes a class or a function instead of an object")
        self.add(held)

    def ask(self, names: str) -> None:
        self._stack.append(_ENCODER if names.rpartition(" ")[2] in _ENCODERS else _Thing(kind=_GLOBAL))

    def ask_by_stack(self, _: object) -> None:
        self._stack.append(_Thing(kind=_GLOBAL))

    def nothing(self, _: object) -> None:
        pass

    def _work(self, steps: int) -> None:
        self._steps += steps
        self._bound(self._steps)

    def _bound(self, steps: int) -> None:
        if steps > FREE + _STEPS_PER_BYTE * (self._at + 1):
            raise HostilePickle("it refers to the same objects over and over, without end")


_VALUES = {
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "BYTEARRAY8"), _ATOM),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"), _ATOM),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _BYTES),
}
"""Instructions that put a value on the stack."""
_TEXTS = {
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_MAKES: dict[str, tuple[Callable[[_Reader, list[_Thing]], None], int | None]] = {
    **{name: (_Reader.tuple, count) for name, count in (("TUPLE", None), ("TUPLE1", 1), ("TUPLE2", 2), ("TUPLE3", 3))},
    **dict.fromkeys(("LIST", "DICT", "FROZENSET"), (_Reader.call, None)),
    "BINPERSID": (_Reader.call, 1),
    **{name: (_Reader.reduce, count) for name, count in (("REDUCE", 2), ("NEWOBJ", 2), ("NEWOBJ_EX", 3))},
    **{name: (_Reader.add, count) for name, count in (("APPEND", 1), ("APPENDS", None), ("ADDITEMS", None))},
    **{name: (_Reader.add, count) for name, count in (("SETITEM", 2), ("SETITEMS", None))},
    "BUILD": (_Reader.build, 1),
    "POP_MARK": (_Reader.nothing, None),
    "STACK_GLOBAL": (_Reader.ask_by_stack, 2),
    "STOP": (_Reader.nothing, 1),
}
"""Instructions that take so many things from the stack, or all above the last mark (None)."""
_OTHERS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _Reader.new),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Reader.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Reader.get),
    "MARK": _Reader.mark,
    "POP": _Reader.pop,
    "GLOBAL": _Reader.ask,
    "FRAME": _Reader.frame,
    "PROTO": _Reader.nothing,
}
