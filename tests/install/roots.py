# SPDX-License-Identifier: Apache-2.0
"""
Clean root folders made of a distribution's packages, without anything of zerod.

    root = Root(tmp_path / "root", "trixie", ["python3-venv"])
    root.give(wheel)                               # into the root's /tmp
    assert "0.2.0" in root.run("zerod --version")

Commands run as root in a chroot, in private mount and process namespaces, with the machine's network. Root.missing()
returns the reason if that is impossible.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

ENTER = """
set -eu
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot "$1" env -i HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -euc "cd /tmp; $2"
"""


def mirror():
    """Return: the address from which this machine gets its Debian packages."""
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    text = sources.read_text() if sources.exists() else Path("/etc/apt/sources.list").read_text()
    return re.search(r"^(?:URIs:|deb)\s+(?:\[[^]]*\]\s+)?(\S+)", text, re.MULTILINE)[1]


class Root:
    @staticmethod
    def missing():
        if os.geteuid() != 0:
            return "entering another root needs root"
        return None if shutil.which("mmdebstrap") else "there is no mmdebstrap"

    def __init__(self, folder, suite, packages):
        self.folder = folder
        made = subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", suite,
                               folder, mirror()], stdin=subprocess.DEVNULL, capture_output=True, text=True)  # fmt: skip
        assert made.returncode == 0, made.stderr
        shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")

    def give(self, *paths):
        for path in paths:
            shutil.copy(path, self.folder / "tmp")

    def run(self, command, status=0, timeout=300):
        """Runs a command in the root's /tmp. It must exit with that status. Return: its standard output and error."""
        result = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh",
                                 self.folder, command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=timeout)  # fmt: skip
        assert result.returncode == status, f"{command}\n{result.stdout}"
        return result.stdout
