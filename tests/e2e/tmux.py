# SPDX-License-Identifier: Apache-2.0
"""A terminal for full-screen programs: tmux, with its own server and without any user's configuration."""

import shutil
import subprocess
import tempfile
import time
import weakref

import pytest
from conftest import environment

PATIENCE = 60


class Tmux:
    """
    A shell in a folder, in a terminal of that size. type() enters a command, text() returns the terminal's contents.

        terminal = Tmux(tmp_path, 80, 24)
        terminal.type("zerodctl top")
        terminal.wait_for("3 of 3 ranks")
        terminal.press("q")
    """

    def __init__(self, folder, width, height, env=None):
        if not shutil.which("tmux"):
            pytest.fail("there is no tmux: scripts/test installs it")
        self.folder = tempfile.TemporaryDirectory(prefix="tmux-")  # a socket's path must be short
        self.socket = f"{self.folder.name}/tmux"
        env = environment({"LC_ALL": "C.UTF-8", "PS1": "$ ", "HOME": folder} | (env or {}))
        # -u: tmux uses UTF-8, whatever the program's locale is.
        subprocess.run(["tmux", "-u", "-S", self.socket, "-f", "/dev/null", "new-session", "-d", "-c", folder,
                        "-x", str(width), "-y", str(height), "sh"], env={k: v for k, v in env.items() if k != "TMUX"}, check=True)
        weakref.finalize(self, subprocess.run, ["tmux", "-S", self.socket, "kill-server"], capture_output=True)

    def tmux(self, *args):
        return subprocess.run(["tmux", "-S", self.socket, *map(str, args)], capture_output=True, text=True, check=True).stdout

    def ask(self, variable):
        """Return: the value of a tmux variable: alternate_on, cursor_flag, ..."""
        return self.tmux("display-message", "-p", f"#{{{variable}}}").strip()

    def type(self, text):
        self.tmux("send-keys", "-l", text)
        self.press("Enter")

    def press(self, *keys):
        self.tmux("send-keys", *keys)

    def resize(self, width, height):
        self.tmux("resize-window", "-x", width, "-y", height)

    def text(self, colors=False):
        return self.tmux("capture-pane", "-p", *(["-e"] if colors else []))

    def lines(self):
        return self.text().splitlines()

    def wait_for(self, what, timeout=PATIENCE):
        """Waits for a text, or until the function `what` of the terminal's contents is true. Return: the contents."""
        is_there = what if callable(what) else lambda text: what in text
        deadline = time.monotonic() + timeout
        while not is_there(text := self.text()):
            assert time.monotonic() < deadline, f"waited in vain for {what!r}; the terminal shows\n{text}"
            time.sleep(0.05)
        return text
