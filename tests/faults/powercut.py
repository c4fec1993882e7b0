"""What a power cut leaves: a model of a file system that loses what was not flushed.

POSIX promises no more than this: the bytes of a file are safe once it was fsynced, the names in a folder once the
folder was. So while something runs in a world (a folder that holds a checkpoint root), `Flushes` remembers at each
fsync what that file or folder held then. After the crash `survive` builds a world out of it.
"""

import json
import os
import shutil
import stat
import threading
from contextlib import contextmanager
from pathlib import Path

LOSSES = ("nothing", "everything", "bytes", "some")
"""What is lost of the unflushed: nothing (a kill), everything, bytes but no names (delayed allocation), any part."""


class Flushes:
    """What is durable, kept in a folder of its own, so that it outlives the process that is killed.

    An inode number names a file or folder. Each is held open, so that its number is given to no other. With a new
    `memory` all that is in the world is durable; with that of a process that was killed, what that one has flushed.
    """

    def __init__(self, world, memory):
        self._memory = memory
        self._held = []
        is_new = not memory.exists()
        memory.mkdir(exist_ok=True)
        for folder, _, names in os.walk(world):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                fd = os.open(path, os.O_RDONLY)
                self.flushed(fd) if is_new else self._held.append(os.dup(fd))
                os.close(fd)
        if not is_new:
            self._set_aside({os.fstat(fd).st_ino for fd in self._held})

    def _set_aside(self, named):
        """The numbers of what was removed may be given to others now: what is known of it gets negative ones."""
        known = [path for path in self._memory.iterdir() if path.suffix in (".names", ".bytes")]
        gone = {int(path.stem) for path in known} - named
        for path in known:
            if path.suffix == ".names":
                names = json.loads(path.read_text())
                path.write_text(json.dumps({name: -each if each in gone else each for name, each in names.items()}))
            if int(path.stem) in gone:
                path.rename(path.with_name(f"-{path.name}"))

    def flushed(self, fd):
        """An fsync of an open file or folder has come to its end, unless another thread kills the process meanwhile."""
        found = os.fstat(fd)
        self._held.append(os.dup(fd))
        path = f"/proc/self/fd/{fd}"
        part = self._memory / f"{found.st_ino}-{threading.get_ident()}.part"
        if stat.S_ISDIR(found.st_mode):
            self._note_folders(path)
            part.write_text(json.dumps(_names(path)))
            part.replace(self._memory / f"{found.st_ino}.names")
        else:
            shutil.copyfile(path, part)
            part.replace(self._memory / f"{found.st_ino}.bytes")

    def _note_folders(self, path):
        """With its name it is durable that something is a folder, if only an empty one."""
        for each in os.scandir(path):
            names = self._memory / f"{each.inode()}.names"
            if each.is_dir(follow_symlinks=False) and not names.exists():
                self._held.append(os.open(each.path, os.O_RDONLY))
                names.write_text("{}")

    def close(self):
        """Let go of everything that is held."""
        while self._held:
            os.close(self._held.pop())


@contextmanager
def watched(flushes):
    """Inside, an fsync waits for no disk, and is remembered."""
    real = os.fsync
    os.fsync = flushes.flushed
    try:
        yield
    finally:
        os.fsync = real
        flushes.close()


def survive(world, memory, target, loss, dice):
    """Build what is left of a world in the new folder `target`, and return it."""
    places = {world.stat().st_ino: world}
    for folder, folders, files in os.walk(world):
        for name in (*folders, *files):
            path = Path(folder, name)
            places[path.lstat().st_ino] = path
    _Rest(places, memory, loss, dice).folder(world.stat().st_ino, target)
    return target


class _Rest:
    """What is left. `places`: where each inode is that has a name now."""

    def __init__(self, places, memory, loss, dice):
        self._places, self._memory, self._loss, self._dice = places, memory, loss, dice

    def folder(self, inode, target):
        target.mkdir()
        for name, each in self._names_of(inode).items():
            now = self._places.get(each)
            if (now is not None and now.is_dir()) or (self._memory / f"{each}.names").exists():
                self.folder(each, target / name)
            else:
                self._file(each, now, target / name)

    def _names_of(self, inode):
        now, memory = self._places.get(inode), self._memory / f"{inode}.names"
        flushed = json.loads(memory.read_text()) if memory.exists() else {}
        if now is None or self._loss == "everything" or (self._loss == "some" and self._dice.random() < 0.5):
            return flushed
        return _names(now)

    def _file(self, inode, now, target):
        memory = self._memory / f"{inode}.bytes"
        keeps = self._loss == "nothing" or (self._loss == "some" and self._dice.random() < 0.5)
        if now is not None and keeps:
            shutil.copyfile(now, target)
        elif memory.exists():
            shutil.copyfile(memory, target)
        else:  # of some the size is known already, and not one byte
            size = now.stat().st_size if now is not None and self._dice.random() < 0.5 else 0
            target.write_bytes(bytes(size))


def _names(folder):
    return {each.name: each.inode() for each in os.scandir(folder)}
