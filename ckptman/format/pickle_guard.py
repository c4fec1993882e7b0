"""Whether a pickle can be read at all without harm, seen from its instructions alone: nothing is built, nothing is run.

Which classes and functions a pickle asks for is for a restricted unpickler to refuse. This is about what such an
unpickler would do willingly: take a gigabyte because four bytes say so, follow tuples within tuples until the stack of
the process is used up or for the rest of its life (looking up a key hashes them all), encode a text by a codec that
takes minutes, or set attributes on a class.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

from ckptman.errors import CorruptError

MAX_DEPTH = 100
"""Tuples in tuples. torch's own checkpoints have three or four."""
MAX_MARKS = 1000
FREE = 1_000_000
"""Steps that any pickle may take, besides some for each of its bytes."""
_STEPS_PER_BYTE = 16

_FIXED = {
    **dict.fromkeys(pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.EMPTY_TUPLE, 0),
    **{code[0]: size for code, size in ((pickle.BININT, 4), (pickle.BININT1, 1), (pickle.BININT2, 2))},
    pickle.BINFLOAT[0]: 8,
}
"""Instructions that put a value on the stack, and the bytes that follow them."""
_EMPTY = set(pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.EMPTY_SET)
_COUNTED = {
    code[0]: size
    for code, size in (
        (pickle.SHORT_BINUNICODE, 1),
        (pickle.BINUNICODE, 4),
        (pickle.BINUNICODE8, 8),
        (pickle.SHORT_BINBYTES, 1),
        (pickle.BINBYTES, 4),
        (pickle.BINBYTES8, 8),
        (pickle.BYTEARRAY8, 8),
        (pickle.SHORT_BINSTRING, 1),
        (pickle.BINSTRING, 4),
        (pickle.LONG1, 1),
        (pickle.LONG4, 4),
    )
}
"""The same, with a count of so many bytes ahead of what follows."""
_BYTES_CODES = set(pickle.SHORT_BINBYTES + pickle.BINBYTES + pickle.BINBYTES8)
_LATIN = {b"latin1", b"latin-1"}
"""How picklers name the one encoding by which they write bytes as a text. Others can take minutes for a small one."""
_ENCODERS = {b"encode", b"bytearray"}
_LINES = {code[0] for code in (pickle.INT, pickle.LONG, pickle.FLOAT, pickle.STRING, pickle.UNICODE)}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
_CALLS = {pickle.REDUCE[0]: 2, pickle.NEWOBJ[0]: 2, pickle.NEWOBJ_EX[0]: 3}
_PUTS = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
_GETS = {pickle.BINGET[0]: 1, pickle.LONG_BINGET[0]: 4}


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
        data, stack = self._data, self._stack
        others = self._others()
        while True:
            code = data[self._at]
            self._at += 1
            if code in _FIXED:
                self._skip(_FIXED[code])
                stack.append(_ATOM)
            elif code in _COUNTED:
                size = self._number(_COUNTED[code])
                self._skip(size)
                if code in _BYTES_CODES:
                    stack.append(_BYTES)
                else:
                    stack.append(_LATIN_NAME if size < 8 and data[self._at - size : self._at] in _LATIN else _ATOM)
            elif code in _GETS:
                stack.append(self._memo[self._number(_GETS[code])])
            elif code in _PUTS:
                self._put(self._number(_PUTS[code]))
            elif code in _TUPLES:
                self._tuple(self._take(_TUPLES[code]))
            elif code in _CALLS:
                self._reduce(self._take(_CALLS[code]))
            elif code in _EMPTY:
                stack.append(_Thing())
            elif code in _LINES:
                stack.append(_LATIN_NAME if self._line() in _LATIN else _ATOM)
            elif code == pickle.PROTO[0]:
                self._skip(1)
            elif code == pickle.FRAME[0]:
                size, begin = self._number(8), self._at
                self._skip(size)
                self._at = begin
            elif code == pickle.STOP[0]:
                self._take(1)
                return
            elif code in others:
                others[code]()
            else:
                raise HostilePickle(f"it has the instruction {bytes([code])!r}, which no checkpoint needs")

    def _others(self) -> dict[int, Callable[[], None]]:
        return {
            pickle.MARK[0]: self._mark,
            pickle.MEMOIZE[0]: lambda: self._put(len(self._memo)),
            pickle.TUPLE[0]: lambda: self._tuple(self._take_to_mark()),
            pickle.LIST[0]: lambda: self._call(self._take_to_mark()),
            pickle.DICT[0]: lambda: self._call(self._take_to_mark()),
            pickle.FROZENSET[0]: lambda: self._call(self._take_to_mark()),
            pickle.APPEND[0]: lambda: self._add(self._take(1)),
            pickle.APPENDS[0]: lambda: self._add(self._take_to_mark()),
            pickle.ADDITEMS[0]: lambda: self._add(self._take_to_mark()),
            pickle.SETITEM[0]: lambda: self._add(self._take(2)),
            pickle.SETITEMS[0]: lambda: self._add(self._take_to_mark()),
            pickle.BUILD[0]: self._build,
            pickle.GLOBAL[0]: self._global,
            pickle.STACK_GLOBAL[0]: self._stack_global,
            pickle.BINPERSID[0]: lambda: self._call(self._take(1)),
            pickle.POP[0]: self._pop,
            pickle.POP_MARK[0]: self._pop_mark,
            pickle.PUT[0]: lambda: self._put(int(self._line())),
            pickle.GET[0]: lambda: self._stack.append(self._memo[int(self._line())]),
        }

    # ---- bytes that follow an instruction ----------------------------------------------------------------------

    def _number(self, size: int) -> int:
        data = self._data[self._at : self._at + size]
        self._skip(size)
        return int.from_bytes(data, "little")

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise HostilePickle(f"it claims {size} more bytes than it has")

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise HostilePickle("it ends within a line")
        line, self._at = self._data[self._at : end], end + 1
        return line

    # ---- the stack ---------------------------------------------------------------------------------------------

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

    def _mark(self) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise HostilePickle(f"it is nested more than {MAX_MARKS} deep")
        self._marks.append(len(self._stack))

    def _pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._take(1)

    def _pop_mark(self) -> None:
        self._take_to_mark()

    def _put(self, number: int) -> None:
        # A pickler numbers what it remembers one after the other.
        if not 0 <= number <= self._at:
            raise HostilePickle(f"it wants room to remember {number} objects, and has {len(self._data)} bytes")
        self._memo[number] = self._stack[-1]

    # ---- what is built -----------------------------------------------------------------------------------------

    def _tuple(self, held: list[_Thing]) -> None:
        depth = 1 + max((each.depth for each in held), default=0)
        if depth > MAX_DEPTH:
            raise HostilePickle(f"its tuples are nested more than {MAX_DEPTH} deep")
        kind = ""
        if not held or (len(held) == 2 and held[1] is _LATIN_NAME) or (len(held) == 1 and held[0].kind == "bytes"):
            kind = _ENCODED
        self._stack.append(_Thing(1 + sum(each.parts for each in held), depth, kind))
        self._bound(self._stack[-1].parts)

    def _reduce(self, held: list[_Thing]) -> None:
        encodes = held[0] is _ENCODER
        if encodes and held[1] is not _ATOM and held[1].kind != _ENCODED:  # an atom: the empty tuple
            raise HostilePickle("it encodes a text as no pickler does")
        self._call(held[1:] if encodes else held, "bytes" if encodes else "")

    def _call(self, held: list[_Thing], kind: str = "") -> None:
        """Something is made of what it is given, and may look at all of that, to hash it above all."""
        self._tuple(held)
        self._stack[-1].kind = kind
        self._work(self._stack[-1].parts)

    def _add(self, held: list[_Thing]) -> None:
        target = self._stack[-1]
        if target.kind in _HOLDS_NOTHING:
            raise HostilePickle("it adds something to what holds nothing")
        more = sum(each.parts for each in held)
        target.parts += more
        self._bound(target.parts)
        self._work(more)

    def _build(self) -> None:
        held = self._take(1)
        if self._stack[-1].kind == _GLOBAL:
            raise HostilePickle("it changes a class or a function instead of an object")
        self._add(held)

    def _global(self) -> None:
        self._line()
        self._stack.append(_ENCODER if self._line() in _ENCODERS else _Thing(kind=_GLOBAL))

    def _stack_global(self) -> None:
        self._take(2)
        self._stack.append(_Thing(kind=_GLOBAL))

    def _work(self, steps: int) -> None:
        self._steps += steps
        self._bound(self._steps)

    def _bound(self, steps: int) -> None:
        if steps > FREE + _STEPS_PER_BYTE * self._at:
            raise HostilePickle("it refers to the same objects over and over, without end")
