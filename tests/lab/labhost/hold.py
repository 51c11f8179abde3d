# SPDX-License-Identifier: GPL-2.0-or-later
"""Holds a program at the point where it would kill itself, and lets it go on instead.

A failpoint of the daemon (plugin/failpoint.h) is a SIGKILL that it sends to itself. Under this the
kernel asks the test first (seccomp's user notification): the daemon stands still at exactly that
point while the test does what it wants to the rest of the host, and then goes on as if the
failpoint were not there.

usage: hold.py FD PROGRAM [ARGUMENT...]      sends the listener over the socket FD, then is PROGRAM
"""
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys

SYS_SECCOMP, SYS_TGKILL, ARCH_X86_64 = 317, 234, 0xC000003E
SET_MODE_FILTER, NEW_LISTENER = 1, 8
RET_USER_NOTIF, RET_ALLOW = 0x7FC00000, 0x7FFF0000
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101


class Hold:
    """The test's side: give `fd` and `prefix` to the program's start, then wait() and go()."""

    def __init__(self):
        self._ours, self._theirs = socket.socketpair()
        self.fd = self._theirs.fileno()
        self.prefix = [sys.executable, os.path.abspath(__file__), str(self.fd)]
        self._listener = self._id = None

    def wait(self, seconds=30):
        """Returns when the program is at its failpoint."""
        if self._listener is None:
            self._ours.settimeout(seconds)
            _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
            self._listener = descriptors[0]
        if not select.select([self._listener], [], [], seconds)[0]:
            raise TimeoutError("the failpoint was not reached")
        request = bytearray(80)
        fcntl.ioctl(self._listener, NOTIF_RECV, request)
        self._id = struct.unpack_from("=Q", request)[0]

    def go(self):
        """It goes on; the signal is not sent."""
        fcntl.ioctl(self._listener, NOTIF_SEND, bytearray(struct.pack("=QqiI", self._id, 0, 0, 0)))

    def close(self):
        for one in (self._ours, self._theirs):
            one.close()
        if self._listener is not None:
            os.close(self._listener)
            self._listener = None


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def main():
    def load(offset):
        return struct.pack("=HBBI", 0x20, 0, 0, offset)

    def unless(value, otherwise):
        return struct.pack("=HBBI", 0x15, 0, otherwise, value)

    def answer(value):
        return struct.pack("=HBBI", 0x06, 0, 0, value)

    code = (load(4) + unless(ARCH_X86_64, 5) + load(0) + unless(SYS_TGKILL, 3) + load(32) + unless(9, 1) +
            answer(RET_USER_NOTIF) + answer(RET_ALLOW))
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(code) // 8, code)
    listener = libc.syscall(SYS_SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        socket.send_fds(channel, [b"x"], [listener])
    os.close(listener)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
