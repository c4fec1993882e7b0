"""Distributed file systems on this machine: real servers, and two nodes that mount them at one and the same path.

    with MooseFS(folder) as there:
        there.nodes[0].ckptman("list", there.path / "root")

Servers and nodes live in namespaces of their own: what they mount and listen on is seen by nobody else. All that they
store lies on one image of limited size. A process that waits for the end of this one then kills them all, whatever
happened, and removes the folder; the kernel takes their mounts away with them.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.helpers import forkserver

ADDRESS = "10.99.0.1"
"""Of the servers, in a network of their own. Neither MooseFS nor GlusterFS serves from 127.0.0.1."""
DISK_BYTES = 4 * 1024**3
START_SECONDS = 60.0
PR_SET_CHILD_SUBREAPER = 36
_REPOSITORY = Path(__file__).parents[2]
_INIT = """
import signal, socket, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans leave no zombies
if sys.argv[1:]:
    socket.sethostname(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


class Refused(Exception):
    """This machine lets this user make no namespaces or mounts."""


class Home:
    """Namespaces of their own for some processes; `pid` is that of their init."""

    def __init__(self, pid, network=None):
        self.pid = pid
        self._enter = ["nsenter", f"--net=/proc/{network or pid}/ns/net", "-t", str(pid), "-m", "-u", "-p", "--"]

    def run(self, *command, ends=True, timeout=60.0, text=None):
        """Run a program in there, and return what it prints. A daemon may keep what it prints to open.

        Raises: RuntimeError where its exit code is not 0, unless it may fail (`ends=False`).
        """
        printed = os.memfd_create("printed")
        try:
            done = subprocess.run(
                [*self._enter, *map(str, command)],
                env={**os.environ, "PATH": search_path()},
                stdout=printed,
                stderr=printed,
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                text=True,
                timeout=timeout,
            )
            said = os.pread(printed, 1_000_000, 0).decode(errors="replace")
        finally:
            os.close(printed)
        if done.returncode and ends:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{said}")
        return said

    def processes(self, *words):
        """What runs in there, with these words in its command line."""
        space, found = _process_space(self.pid), []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if process.pid != self.pid and _process_space(process.pid) == space and all(w in line for w in words):
                    found.append(process)
        return found

    def kill(self, *words):
        """Kill these processes, and wait until they are gone."""
        found = self.processes(*words)
        assert found, f"nothing runs with {words}"
        for process in found:
            process.kill()
        psutil.wait_procs(found, START_SECONDS)

    def seen(self, path):
        """The path by which this process gets at what is there at `path`."""
        return Path(f"/proc/{self.pid}/root{path}")

    def freeze(self):
        """Stop all that runs in there."""
        for process in self.processes():
            process.suspend()

    def thaw(self):
        for process in self.processes():
            process.resume()


class Node(Home):
    """A host: its own mounts, name and process ids."""

    def __init__(self, pid, network, path, client, daemon):
        super().__init__(pid, network)
        self._path, self._client, self._daemon = path, client, daemon
        self.program = ("-m", "tests.filesystems.node", str(pid))
        """What follows `python`, before what follows it on the node: for `forkserver` and `World`."""

    def mount(self):
        self.run(*self._client, self._path)

    def unmount(self):
        """Take the mount away, busy or not."""
        self.run("umount", "-l", self._path)

    def mount_again(self):
        """Mount what is away or dead. Returns what was written below the mount point meanwhile, which is removed."""
        self.run("umount", "-l", self._path, ends=False)
        below = [each.name for each in self._path.iterdir()]
        for name in below:
            shutil.rmtree(self._path / name)
        self.mount()
        return below

    def is_mounted(self):
        """Whether the mount is there, and answers."""
        try:
            return self.seen(self._path).stat().st_dev != self._path.stat().st_dev
        except OSError:
            return False

    def kill_client(self):
        """Kill what serves the mount, which stays and answers nothing."""
        self.kill(self._daemon, str(self._path))

    def python(self, *arguments, **options):
        """`python ARGUMENTS...` on this node, to its end."""
        return forkserver.run(*self.program, *arguments, capture_output=True, text=True, **options)

    def ckptman(self, *arguments):
        return self.python("-m", "ckptman", *map(str, arguments))


class Cluster:
    """A file system in a folder: a context manager. `path`: where both `nodes` have it mounted."""

    programs: tuple[str, ...] = ()
    packages = ""
    daemon = ""
    """The program that serves a mount."""
    may_go: tuple[int, ...] = ()
    """The servers that can be killed one after the other, so that nothing is lost."""

    def __init__(self, folder):
        self.folder, self.path, self.disk = folder, folder / "shared", folder / "disk"

    def __enter__(self):
        for name in ("shared", "disk", "log"):
            (self.folder / name).mkdir()
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, self.folder],
            cwd=_REPOSITORY,
            env={"PATH": search_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            homes = self._keeper.stdout.readline().split()
            if len(homes) != 3:
                raise Refused(" ".join(homes) or "no namespaces")
            self.servers = Home(homes[0])
            self.nodes = [Node(pid, homes[0], self.path, self.client(), self.daemon) for pid in homes[1:]]
            self.servers.run("ip", "link", "set", "lo", "up")
            self.servers.run("ip", "addr", "add", f"{ADDRESS}/24", "dev", "lo")
            image = self.folder / "image"
            with image.open("wb") as file:
                file.truncate(DISK_BYTES)
            self.servers.run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1", image)
            self.servers.run("mount", "-o", "loop", image, self.disk)
            self.serve()
            for node in self.nodes:
                node.mount()
            self.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()

    @classmethod
    def missing(cls):
        """The programs that are not installed here."""
        needed = ("unshare", "nsenter", "ip", "mkfs.ext4", *cls.programs)
        return [each for each in needed if shutil.which(each, path=search_path()) is None]

    def wait(self, done, what):
        """Wait until `done`. Raises: TimeoutError, with the last words of the servers."""
        deadline = time.monotonic() + START_SECONDS
        while not done():
            if time.monotonic() > deadline:
                words = [f"--- {each.name}\n{each.read_text(errors='replace')[-1500:]}" for each in self.logs()]
                raise TimeoutError("\n".join([f"{what} after {START_SECONDS:.0f} s", *words]))
            time.sleep(0.05)

    def is_awaited(self):
        """Whether something on a node waits for an answer of the file system."""
        spaces = [_process_space(node.pid) for node in self.nodes]
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if _process_space(process.pid) in spaces and _waits_for_mount(process.pid):
                    return True
        return False

    def logs(self):
        return sorted(each for each in (self.folder / "log").rglob("*") if each.is_file())

    def client(self):
        """The command that mounts it, but for the path."""
        raise NotImplementedError

    def serve(self):
        """Start the servers."""
        raise NotImplementedError

    def ready(self):
        """Wait until what was mounted is as it should be."""


class Gluster(Cluster):
    """GlusterFS, with a copy of each file on each of two servers (bricks)."""

    programs = ("glusterd", "glusterfsd", "gluster", "mount.glusterfs")
    packages = "glusterfs-server glusterfs-client"
    daemon = "glusterfs"
    may_go = (1, 2)

    def client(self):
        return "mount", "-t", "glusterfs", "-o", f"log-file={self.folder}/log/client", f"{ADDRESS}:/v1"

    def serve(self):
        self.servers.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        state = self.folder / "state"
        state.mkdir()
        for hidden, by in (("/var/lib/glusterd", state), ("/var/log/glusterfs", self.folder / "log")):
            self.servers.run("mount", "--bind", by, hidden)
        self.servers.run("glusterd", "--pid-file", "/run/glusterd.pid")
        self.wait(lambda: "No volumes" in self._tell("list", ends=False), "glusterd does not answer")
        bricks = [f"{ADDRESS}:{self.disk}/brick{number}" for number in (1, 2)]
        self._tell("create", "v1", "replica", "2", *bricks, "force")
        self._tell("start", "v1")

    def kill_server(self, number):
        self.servers.kill("glusterfsd", f"--brick-name {self.disk}/brick{number} ")

    def start_servers(self):
        """Start those that were killed, and wait until both have the same."""
        self._tell("start", "v1", "force")
        self.wait(self._is_healed, "the bricks are not healed")

    def _is_healed(self):
        return self._tell("heal", "v1", "info", "summary", ends=False).count("Total Number of entries: 0") == 2

    def _tell(self, *words, ends=True):
        return self.servers.run("gluster", "--mode=script", "volume", *words, ends=ends)


class MooseFS(Cluster):
    """MooseFS, with a copy of each file on each of two servers (chunkservers), and one master."""

    programs = ("mfsmaster", "mfschunkserver", "mfsmount")
    packages = "moosefs-master moosefs-chunkserver moosefs-client"
    daemon = "mfsmount"
    may_go = (2,)  # what was written meanwhile is copied to it minutes later

    def client(self):
        return "mfsmount", "-H", ADDRESS

    def serve(self):
        shutil.copy("/var/lib/mfs/metadata.mfs.empty", self._folder("meta") / "metadata.mfs")
        (self.folder / "topology.cfg").write_text("")
        (self.folder / "exports.cfg").write_text("10.0.0.0/8 / rw,alldirs,maproot=0\n10.0.0.0/8 . rw\n")
        self._configure(
            "master",
            DATA_PATH=self.folder / "meta",
            EXPORTS_FILENAME=self.folder / "exports.cfg",
            TOPOLOGY_FILENAME=self.folder / "topology.cfg",
        )
        for number in (1, 2):
            self.servers.run("mkdir", self.disk / f"chunks{number}")
            (self.folder / f"chunks{number}.cfg").write_text(f"{self.disk}/chunks{number}\n")
            self._configure(
                f"server{number}",
                DATA_PATH=self._folder(f"data{number}"),
                HDD_CONF_FILENAME=self.folder / f"chunks{number}.cfg",
                HDD_LEAVE_SPACE_DEFAULT="64MiB",
                MASTER_HOST=ADDRESS,
                MASTER_RECONNECTION_DELAY=1,
                CSSERV_LISTEN_PORT=9420 + 10 * number,
            )
        self.start_master()
        for number in (1, 2):
            self._start("mfschunkserver", f"server{number}")

    def ready(self):
        first = self.nodes[0]
        # Goal: the number of copies. Deleted files would fill the disk for a day.
        first.run("mfssetgoal", "-r", "2", self.path)
        first.run("mfssettrashtime", "-r", "0", self.path)
        self.wait(self._has_two_copies, "no two copies of a file")

    def kill_server(self, number):
        self.servers.kill("mfschunkserver", f"server{number}.cfg")

    def start_servers(self):
        for number in (1, 2):
            if not self.servers.processes("mfschunkserver", f"server{number}.cfg"):
                self._start("mfschunkserver", f"server{number}")
        self.wait(self._has_two_copies, "no two copies of a file")

    def kill_master(self):
        self.servers.kill("mfsmaster")

    def start_master(self):
        self._start("mfsmaster", "master", "-a")

    def _start(self, program, name, *options):
        self.servers.run(program, "-c", self.folder / f"{name}.cfg", *options, "start")

    def _has_two_copies(self):
        probe = self.path / "probe"
        self.nodes[0].run("sh", "-c", f"rm -f {probe}; echo x > {probe}", ends=False, timeout=START_SECONDS)
        return "copy 2" in self.nodes[0].run("mfsfileinfo", probe, ends=False)

    def _folder(self, name):
        (self.folder / name).mkdir()
        return self.folder / name

    def _configure(self, name, **settings):
        settings = {"WORKING_USER": "root", "WORKING_GROUP": "root", "LOCK_MEMORY": 0, **settings}
        (self.folder / f"{name}.cfg").write_text("".join(f"{key} = {each}\n" for key, each in settings.items()))


FSID = "11111111-2222-3333-4444-555555555555"
_CEPH = """
[global]
fsid = {fsid}
mon_host = {address}
public_addr = {address}
cluster_addr = {address}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
run_dir = {folder}/run
log_file = {folder}/log/$name.log
admin_socket =
mon_data = {folder}/mon
osd_data = {folder}/osd
mds_data = {folder}/mds
mgr_data = {folder}/mgr
osd_objectstore = memstore
memstore_device_bytes = {bytes}
mds_tick_interval = 0.1
"""


class CephFS(Cluster):
    """CephFS, with a monitor, a manager, a metadata server, and one server of objects, which keeps them in memory.

    A client that looks at what another one has just written waits until the metadata server has written its journal.
    That is after each of its ticks: 5 s as it comes, and less here, or 300 reads beside a run would take half an hour.
    """

    programs = ("ceph-mon", "ceph-mgr", "ceph-mds", "ceph-osd", "ceph-fuse", "ceph", "monmaptool")
    packages = "ceph-mon ceph-mgr ceph-mds ceph-osd ceph-fuse ceph-common"
    daemon = "ceph-fuse"

    def client(self):
        return "ceph-fuse", "-c", self._conf, "--id", "admin"

    @property
    def _conf(self):
        return self.folder / "ceph.conf"

    def serve(self):
        for name in ("run", "mon", "osd", "mds", "mgr"):
            (self.folder / name).mkdir()
        self._conf.write_text(_CEPH.format(fsid=FSID, address=ADDRESS, folder=self.folder, bytes=3 * 1024**3))
        monmap = self.folder / "monmap"
        self.servers.run("monmaptool", "--create", "--add", "a", ADDRESS, "--fsid", FSID, "--clobber", monmap)
        self._start("mon", "a", "--mkfs", "--monmap", monmap)
        self._start("mon", "a")
        self._start("mgr", "x")
        self._tell(f"osd create {FSID} 0", "osd crush add osd.0 1.0 host=here root=default")
        self._start("osd", "0", "--mkfs", "--osd-uuid", FSID)
        self._start("osd", "0")
        self._tell("osd pool create data 8", "osd pool create metadata 8", "fs new shared metadata data")
        self.start_master()

    def ready(self):
        self.wait(lambda: os.statvfs(self.nodes[0].seen(self.path)).f_bavail, "no room is reported")

    def kill_master(self):
        """The metadata server: what it knows is in the journal."""
        self.servers.kill("ceph-mds")

    def start_master(self):
        self._start("mds", "a")
        self.wait(lambda: "up:active" in self._tell("mds stat"), "no metadata server is active")

    def _start(self, kind, name, *options):
        def is_done():
            try:
                self.servers.run(f"ceph-{kind}", "-c", self._conf, "-i", name, *options)
            except RuntimeError as error:
                if not self._is_denied(str(error)):
                    raise
                return False
            return True

        self.wait(is_done, f"ceph-{kind} does not start")

    def _tell(self, *lines):
        """Give commands to the monitor, in one start of `ceph`, which takes a second. Returns what it prints."""
        said = [""]

        def is_done():
            said[0] = self.servers.run("ceph", "-c", self._conf, ends=False, text="\n".join([*lines, ""]))
            return not self._is_denied(said[0])

        self.wait(is_done, "the monitor does not answer")
        if "Error E" in said[0]:
            raise RuntimeError(said[0])
        return said[0]

    def _is_denied(self, said):
        """Whether a monitor that has only begun refused what everybody may do. What it was asked can be repeated."""
        return "EPERM" in said or "Operation not permitted" in said


CLUSTERS = {"gluster": Gluster, "moosefs": MooseFS, "ceph": CephFS}


def search_path():
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _process_space(pid):
    return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 not a path, a label


def _waits_for_mount(pid):
    return any("fuse" in (each / "stack").read_text() for each in Path(f"/proc/{pid}/task").iterdir())


def _keep(folder):
    """Make the namespaces, print the ids of their inits, and end them when nobody wants them any more."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    make = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    running, pids = [], []
    for more, name in ((["--net"], "servers"), ([], "node1"), ([], "node2")):
        command = [*make, *more, sys.executable, "-IS", "-c", _INIT, name]
        one = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append(one)
        if said := one.stdout.readline().strip():
            print(said, flush=True)
            break
        pids.append(psutil.Process(one.pid).children()[0].pid)
    else:
        print(*pids, flush=True)
    sys.stdin.read()
    for one in running:
        one.kill()
    with suppress(ChildProcessError):
        while True:
            os.wait()  # an init ends when all are gone that run in its namespace
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _keep(Path(sys.argv[1]))
