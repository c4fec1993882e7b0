"""Where the bytes of a checkpoint are and what they are for, so that damage reaches every kind of them."""

from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.storage.format.paths import CHUNKS, INDEX, MANIFEST, METADATA

_WHOLE = {MANIFEST: "manifest", METADATA: ".metadata", INDEX: "index", CHUNKS: "chunk table"}
_BY_PREFIX = {"blocks-": "block digests", "values-": "values of a rank"}


def regions_of(folder):
    """The ranges of each kind of byte. All together they are every byte of every file."""
    found = {}
    state = SavedState.read(folder)
    inside = {}
    for name in state.index.tensors:
        for chunk in state.all_chunks(name):
            size = state.dtype(name).itemsize
            for length in chunk.sizes:
                size *= length
            payload = chunk.payload if chunk.payload >= 0 else chunk.offset
            end = chunk.offset + chunk.bytes
            inside.setdefault(chunk.file, []).extend(
                [
                    (chunk.offset, payload, "container header"),
                    (payload, payload + size, "elements"),
                    (payload + size, end, "container end"),
                ]
            )
    for location in state.index.objects.values():
        each = (location.offset, location.offset + location.bytes, "pickles for other readers")
        inside.setdefault(location.file, []).append(each)
    for path in sorted(folder.iterdir()):
        kind = _WHOLE.get(path.name) or next(
            (_BY_PREFIX[each] for each in _BY_PREFIX if path.name.startswith(each)), ""
        )
        if kind:
            found.setdefault(kind, []).append((path.name, 0, path.stat().st_size))
        elif path.name in inside or path.suffix == ".distcp":
            at = 0
            for low, high, what in sorted(inside.get(path.name, [])):
                found.setdefault("padding", []).append((path.name, at, low))
                found.setdefault(what, []).append((path.name, low, high))
                at = high
            found.setdefault("padding", []).append((path.name, at, path.stat().st_size))
        else:
            raise AssertionError(f"{path.name} is a file that nobody has told the campaign of")
    return {kind: [each for each in ranges if each[1] < each[2]] for kind, ranges in found.items()}


def draw(ranges, dice):
    """A byte of the ranges, each as likely as any other."""
    at = dice.randrange(sum(high - low for _, low, high in ranges))
    for name, low, high in ranges:
        if at < high - low:
            return name, low + at
        at -= high - low
    raise AssertionError("there is no such byte")


def flip(path, at, bit):
    """Change one bit. Doing it again undoes it."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
