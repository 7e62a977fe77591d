"""Isolates this process from the machine, then runs the program that it was given (Linux).

Started as a script of its own with nothing but the standard library, so that it starts fast and
holds nothing of its parent. Invariant: the program runs only if every step before it succeeded;
else the reason is written to the status descriptor.

The program is process 1 of its own process namespace, as a user without any capability, in
namespaces of its own for users, mounts, processes, network, IPC and host name. Its root is a new
file system in memory that holds Python and the system's libraries, read-only, and one writable
directory, /work, of limited size. When the parent ends, the kernel ends this process, and with it
the program and everything that the program has started.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

NOBODY = 65534
PROGRAM = "/program.py"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_NEW_NAMESPACES = sum(
    (
        *(0x10000000, 0x00020000, 0x20000000),  # users, mounts, processes
        *(0x40000000, 0x08000000, 0x04000000),  # network, IPC, host name
    )
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_ATTR_READ_ONLY, _ATTR_NOSUID = 1, 2


def main(settings: dict[str, Any]) -> int:
    """Isolate, start the program and return its exit code; 128 + N where signal N ended it."""
    end_with(settings["parent"])
    with open(settings["program"], "rb") as file:
        program = file.read()
    stdin = os.open(settings["stdin"], os.O_RDONLY)
    status = settings["status"]
    os.set_inheritable(status, False)  # the program does not get it
    try:
        enter_namespaces()
        build_root(settings, program)
        drop_root(settings["parent"])
    except OSError as error:
        os.write(status, str(error).encode())
        return 1
    alive, ours = os.pipe()
    child = os.fork()
    if child == 0:
        become_program(settings, stdin, status, alive, ours)
    os.close(status)
    _, ended = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(ended)
    return 128 - code if code < 0 else code


def end_with(parent: int) -> None:
    """Let the kernel kill this process when process `parent` ends; exit if it has already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def enter_namespaces() -> None:
    """Leave every shared namespace. OSError: the kernel denies it."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        # stays root until its root is built, since Python may lie where only root may look
        os.setgroups([])
        with _map_of_root() as unshared:
            _call("unshare", _LIBC.unshare(_NEW_NAMESPACES))
            unshared.write(b"1")
    else:
        _call("unshare", _LIBC.unshare(_NEW_NAMESPACES))
        # the same ids inside: whoever is not user 0 there loses all capabilities with the program
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    # a namespace inside this one would give its capabilities back
    _write("/proc/sys/user/max_user_namespaces", "0")


@contextmanager
def _map_of_root() -> Iterator[BinaryIO]:
    """Let a second process, which stays outside, give the new namespace root and nobody.

    Yields what to write to once there is one; the map is there when this ends.
    """
    inside, (unshared, to_outside) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(to_outside)
            if os.read(unshared, 1):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{inside}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1")
                os._exit(0)
        finally:
            os._exit(1)
    os.close(unshared)
    with os.fdopen(to_outside, "wb", buffering=0) as pipe:
        yield pipe
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError(errno.EPERM, f"uid_map: {os.strerror(errno.EPERM)}")


def drop_root(parent: int) -> None:
    """Drop the rights of root, whose number of processes the kernel does not limit."""
    if os.geteuid() == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        end_with(parent)  # which is lost with the user id


def build_root(settings: dict[str, Any], program: bytes) -> None:
    """Move into a file system that holds no more than Python and a directory to work in.

    OSError: the kernel denies it.
    """
    root = settings["root"]
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in settings["read_only"]:
        _show(path, root)
    for path in _DEVICES:
        _show(path, root)
    with open(root + PROGRAM, "wb") as file:
        file.write(program)
    os.mkdir(f"{root}/work")
    _make_read_only(root)
    root_user = os.geteuid() == 0
    user, group = (NOBODY, NOBODY) if root_user else (os.geteuid(), os.getegid())
    options = f"size={settings['file_bytes']},nr_inodes=1024,mode=700,uid={user},gid={group}"
    _mount("tmpfs", f"{root}/work", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(root)
    _call("pivot_root", _LIBC.pivot_root(b".", b"."))
    _call("umount2", _LIBC.umount2(b".", _MNT_DETACH))
    os.chdir("/work")


def become_program(
    settings: dict[str, Any], stdin: int, status: int, alive: int, ours: int
) -> NoReturn:
    """Limit this process, which is the first of its namespace, and execute the program."""
    try:
        os.close(ours)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:  # closed: the parent ended before that
            os._exit(1)
        os.dup2(stdin, 0)
        cpu_s = settings["cpu_s"]
        limits = {
            resource.RLIMIT_AS: settings["memory_bytes"],
            resource.RLIMIT_FSIZE: settings["file_bytes"],
            resource.RLIMIT_NPROC: settings["processes"] + 1,  # with the one that waits for it
            resource.RLIMIT_NOFILE: 32,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        for limit, most in limits.items():
            resource.setrlimit(limit, (most, most))
        # SIGXCPU first, SIGKILL a second later, since process 1 may ignore the former
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        _call("prctl", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        python = settings["python"]
        os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", PROGRAM], {})
    except OSError as error:
        os.write(status, str(error).encode())
    os._exit(1)


def _show(path: str, root: str) -> None:
    """Let a file or directory be seen under the new root; a symbolic link is copied."""
    target = root + path
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        with open(target, "wb"):
            pass
    _mount(path, target, None, _MS_BIND | _MS_REC)


def _make_read_only(root: str) -> None:
    """Make every mount below `root` read-only, those of other file systems too."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY | _ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = root.encode()
    result = _LIBC.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        _AT_FDCWD,
        path,
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        size,
    )
    _call("mount_setattr (Linux 5.12)", result)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    result = _LIBC.mount(*words, ctypes.c_ulong(flags), data.encode())
    _call(f"mount {target.removesuffix('/')}", result)


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _call(name: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
