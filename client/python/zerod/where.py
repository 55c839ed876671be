# SPDX-License-Identifier: Apache-2.0
"""
Sends the daemon the stacks of this process's threads, when other ranks wait for this rank.

libzerod's watch (client/lib/watch.h) asks a thread that this module starts. If that thread does not get the interpreter
lock, because C code holds it, faulthandler writes the stacks on the watch's own thread: faulthandler handles a signal
that is otherwise unused, and only the watch's thread gets that signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import socket
import sys
import threading
from ctypes import byref, c_void_p
from types import FrameType

from . import _lib
from ._lib import lib

_MAX_FRAMES = 100  # of a thread
_MAX_BYTES = 15 * 1024  # the daemon accepts 16384


def _name(file: str) -> str:
    """Shortens a path, as shorten() in client/lib/watch.c does."""
    for folder in ("site-packages/", "dist-packages/"):
        if folder in file:
            return file.split(folder, 1)[1]
    return os.path.basename(file)


def _lines(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        lines.append(f"  {_name(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines + ["  ..."] * (frame is not None)


def stacks() -> str:
    """The stacks of the other threads: the main thread first; the innermost frame of each thread first."""
    main, own = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != own:
            lines += ["main thread:" if ident == main else f"thread {names.get(ident, 'of no name')}:", *_lines(frame)]
    return "\n".join(lines)


def _answer(asked: socket.socket) -> None:
    """Answers each question, which is a number, with the number and the stacks."""
    while number := asked.recv(8):
        asked.send(number + stacks().encode(errors="replace")[:_MAX_BYTES])


@functools.cache
def _process() -> _lib.Python:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dump, number = os.memfd_create("zerod-stack"), lib.unused_signal()
    if number > 0:
        faulthandler.register(number, file=dump, all_threads=True, chain=False)
    thread = threading.Thread(target=_answer, args=(ours,), name="zerod-where", daemon=True)
    thread.start()
    return _lib.Python(theirs.detach(), dump, number, threading.main_thread().ident or 0, thread.ident or 0)


os.register_at_fork(after_in_child=_process.cache_clear)  # the thread stays with the parent


def watch(handle: c_void_p) -> None:
    """Lets the daemon ask from now on. If that fails, the daemon gets no stacks of this rank; all else works."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        lib.watch(handle, byref(_process()))
