# SPDX-License-Identifier: Apache-2.0
"""A terminal for a program under test, with the functions of a VT100 that zerodrun uses."""

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
import weakref

TOKEN = re.compile(r"\x1b\[(\??\d*(?:;\d+)*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n])", re.S)


class Screen:
    """Lines of text. Lines never scroll away. Colours are markers: <31>error<0>."""

    def __init__(self, width, colors):
        self.width, self.colors = width, colors
        self.rows, self.row, self.column, self.wraps = [[]], 0, 0, True

    def feed(self, text):
        assert "".join(m[0] for m in TOKEN.finditer(text)) == text, repr(text)
        for parameter, command, cr, lf, char in (m.groups() for m in TOKEN.finditer(text)):
            if command:
                self.obey(parameter, command)
            elif cr:
                self.column = 0
            elif lf:
                self.row += 1
                self.rows += [[]] if self.row == len(self.rows) else []
            else:
                self.put(char)

    def put(self, char):
        if self.column >= self.width:
            if self.wraps:
                self.feed("\r\n")
            else:
                self.column = self.width - 1
        row = self.rows[self.row]
        row += [" "] * (self.column + 1 - len(row))
        row[self.column] = char
        self.column += 1

    def obey(self, parameter, command):
        row = self.rows[self.row]
        if command == "A":
            assert self.row >= int(parameter)
            self.row -= int(parameter)
        elif command == "B":
            self.row += int(parameter)
            assert self.row < len(self.rows)
        elif command == "K":
            del row[self.column:]
        elif command == "J":
            del row[self.column:]
            del self.rows[self.row + 1:]
        elif command == "m":
            if self.colors:
                row.append(f"<{parameter}>")
                self.column = len(row)
        else:
            assert (parameter, command) in (("?7", "l"), ("?7", "h"))
            self.wraps = command == "h"

    def lines(self):
        return ["".join(row).rstrip() for row in self.rows if row]


class Terminal:
    """A terminal that is the program's standard output and error. With colors, no text may be longer than a row."""

    def __init__(self, args, env, height=24, width=80, colors=False):
        self.screen, self.patience = Screen(1000 if colors else width, colors), 60
        self.fd, fd = os.openpty()
        weakref.finalize(self, os.close, self.fd)
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))
        self.process = subprocess.Popen(args, env={"TERM": "xterm", **env}, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd)
        os.close(fd)
        weakref.finalize(self, self.process.kill)

    def read(self):
        """Reads once. Return: False at the end."""
        if not select.select([self.fd], [], [], self.patience)[0]:
            raise AssertionError(f"nothing comes any more after {self.screen.lines()}")
        try:
            text = os.read(self.fd, 65536).decode()
        except OSError:  # EIO: no process has the terminal open
            return False
        self.screen.feed(text)
        return True

    def wait_for(self, lines):
        deadline = time.monotonic() + self.patience
        while self.screen.lines() != lines:
            assert self.read() and time.monotonic() < deadline, (self.screen.lines(), lines)

    def end(self):
        """Waits for the program's end. Return: the final contents of the terminal."""
        while self.read():
            pass
        assert self.process.wait(self.patience) == 0
        return self.screen.lines()
