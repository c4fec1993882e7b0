"""Small file systems of our own: really full, with a real quota, really read-only. Only where this user may mount."""

import subprocess
from contextlib import contextmanager


class NoMount(Exception):
    """This machine lets this user mount nothing of that kind."""


@contextmanager
def tmpfs(folder, options):
    """A file system in memory. `options`: such as `size=2m`."""
    folder.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "-l", str(folder))


@contextmanager
def quota(folder, image, size):
    """A folder in which no user but root may have more than `size` bytes: by tmpfs, or by btrfs, whichever can."""
    try:
        with tmpfs(folder, f"size={4 * size},mode=0777,usrquota,usrquota_block_hardlimit={size}") as mount:
            yield mount
            return
    except NoMount:
        pass
    with _loop(folder, image, 128 * 1024 * 1024, "mkfs.btrfs", "defaults") as mount:
        _run("btrfs", "quota", "enable", str(mount))
        _run("btrfs", "subvolume", "create", str(mount / "limited"))
        _run("btrfs", "qgroup", "limit", str(size), str(mount / "limited"))
        (mount / "limited").chmod(0o777)
        yield mount / "limited"


@contextmanager
def read_only(mount):
    """Remount a file system read-only, and back."""
    _run("mount", "-o", "remount,ro", str(mount))
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(mount))


@contextmanager
def ext4(folder, image, options):
    """An ext4 of 16 MiB in a file, and the name of its device."""
    with _loop(folder, image, 16 * 1024 * 1024, "mkfs.ext4", options):
        device = _run("findmnt", "-n", "-o", "SOURCE", str(folder)).strip()
        yield folder, device.rpartition("/")[2]


@contextmanager
def _loop(folder, image, size, mkfs, options):
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(size)
    _run(mkfs, "-q", str(image))
    folder.mkdir(exist_ok=True)
    _run("mount", "-o", f"loop,{options}", str(image), str(folder))
    try:
        yield folder
    finally:
        _run("umount", "-l", str(folder))


def _run(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoMount(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NoMount(f"{' '.join(command[:4])}: {done.stderr.strip()}")
    return done.stdout
