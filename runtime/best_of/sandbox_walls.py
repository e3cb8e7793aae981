"""Walls around a process that runs unknown code, put up by that process itself: namespaces, another user, limits.

This file is also the first part of a program that runs alone (`sandbox.py`), so it imports nothing but Python's own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

NOBODY = 65534
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _REC, _PRIVATE = 2, 4, 8, 0x4000, 0x40000
_MOUNT_SETATTR = 442  # the number of this system call, on every processor
_PDEATHSIG, _KEEPCAPS, _NO_NEW_PRIVS = 1, 8, 38
_SIGKILL = 9
_CAPABILITIES_V3 = 0x20080522
_READ_ALL = 1 << 2  # CAP_DAC_READ_SEARCH


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def close_off(disk_bytes: int) -> bool:
    """Move this process, and the children that it forks from now on, out of the network and into a file system that
    is read-only but for /tmp, an empty one in memory, which becomes the current folder. /run, where sockets of the
    user's services lie, is empty as well. Where Python itself lies below /tmp, the current folder is taken instead.

    False where the system does not let it; then nothing has changed.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    spaces = _NEWNS | _NEWIPC | _NEWPID | _NEWNET
    if user != 0:
        spaces |= _NEWUSER
    # Tried in a child first: half of it would be worse than nothing.
    trial = os.fork()
    if trial == 0:
        os._exit(0 if _move(libc, spaces, user, group, disk_bytes) else 1)
    if os.waitpid(trial, 0)[1] != 0:
        return False
    return _move(libc, spaces, user, group, disk_bytes)


def _move(libc: Any, spaces: int, user: int, group: int, disk_bytes: int) -> bool:
    if libc.unshare(spaces) != 0:
        return False
    if spaces & _NEWUSER:
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:
            return False
    read_only = _MountAttributes(1 | _NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(read_only))
    flags = ctypes.c_ulong(_NOSUID | _NODEV)
    needed = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path)]
    folder = os.getcwd() if any(path.startswith("/tmp/") for path in needed) else "/tmp"
    space = f"size={disk_bytes},nr_inodes=4096,mode=0777".encode()
    done: bool = (
        libc.mount(None, b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None) == 0
        and libc.syscall(_MOUNT_SETATTR, -100, b"/", 0x8000, ctypes.byref(read_only), size) == 0
        and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, space) == 0
        and (not os.path.isdir("/run") or libc.mount(b"tmpfs", b"/run", b"tmpfs", flags, b"size=4096,mode=0555") == 0)
    )
    if done:
        os.chdir(folder)
    return done


def hide_processes() -> None:
    """In the first child after `close_off`: show only its own processes in /proc.

    Where /proc cannot be mounted it keeps showing the others, which this process can neither signal nor trace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC), None)


def die_with_parent() -> None:
    """Be killed when the parent ends, on Linux. A change of user forgets it, and so does a fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PDEATHSIG, ctypes.c_ulong(_SIGKILL), 0, 0, 0)


def drop_rights() -> None:
    """Become nobody if this is root, give up every capability, and let no program give them back.

    Where nobody cannot read Python's own library (it lies below /root), the right to read all files stays.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    keep = 0
    if os.getuid() == 0 and not _mapped():
        if libc is not None:
            libc.prctl(_KEEPCAPS, ctypes.c_ulong(1), 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY) if hasattr(os, "setresgid") else os.setgid(NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY) if hasattr(os, "setresuid") else os.setuid(NOBODY)
        keep = 0 if os.access(os.__file__, os.R_OK) else _READ_ALL
    if libc is not None:
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
        libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)(keep, keep, 0, 0, 0, 0)))
        libc.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)


def _mapped() -> bool:
    """Whether user 0 here is an ordinary user outside, who has no other name here."""
    try:
        with open("/proc/self/uid_map") as file:
            return file.read().split()[2] == "1"
    except OSError:
        return False


def set_limits(limits: Mapping[str, int]) -> None:
    """Set resource limits by name ("CPU": seconds, "AS": bytes, ...), soft and hard; what is lower already stays.

    macOS takes no limit on memory ("AS").
    """
    import resource

    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None or (name == "AS" and sys.platform == "darwin"):
            continue
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))
