# SPDX-License-Identifier: Apache-2.0
"""
A daemon's descriptors in the service manager's store, as a file. stores/journal-N.zip is from a daemon that was killed
during a step, with journal version N. For a new version, write a file with: python tests/e2e/stores.py
stores/journal-N.zip
"""

import fcntl
import json
import os
import signal
import sys
import tempfile
import zipfile
from pathlib import Path

from conftest import Build, ROOT
from keeper import KeptDaemon
import kills

N_STEPS = 24
CONFIG = {"world": {"size": 2}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "reduce_bucket_size": 300},
          "limits": {"reattach_timeout": "5s"},  # a present process may have the pid of a former trainer
          "listen": {"admin_users": [str(os.getuid())]}}  # may continue another user's run
BLOCK = 4096
F_ADD_SEALS, F_GET_SEALS = 1033, 1034


def blocks(fd, size):
    """Yields (offset, bytes) of all blocks that are not zero."""
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        for offset in range(at, end, BLOCK):
            data = os.pread(fd, min(BLOCK, size - offset), offset)
            if any(data):
                yield offset, data
        at = end


def save(path, kept):
    """Writes the file. kept: (name, descriptor) of each segment."""
    index = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, fd in kept:
            size = os.fstat(fd).st_size
            found = list(blocks(fd, size))
            index.append({"name": name, "bytes": size, "seals": fcntl.fcntl(fd, F_GET_SEALS),
                          "memfd": os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").removesuffix(" (deleted)"),
                          "at": [offset for offset, _ in found]})
            archive.writestr(name, b"".join(data.ljust(BLOCK, b"\0") for _, data in found))
        archive.writestr("index.json", json.dumps(index, indent=1))


def load(path):
    """Return: the segments of the file, as save() got them."""
    kept = []
    with zipfile.ZipFile(path) as archive:
        for segment in json.loads(archive.read("index.json")):
            fd = os.memfd_create(segment["memfd"], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, segment["bytes"])
            data = archive.read(segment["name"])
            for i, offset in enumerate(segment["at"]):
                os.pwrite(fd, data[i * BLOCK:(i + 1) * BLOCK][:segment["bytes"] - offset], offset)
            fcntl.fcntl(fd, F_ADD_SEALS, segment["seals"])
            kept.append((segment["name"], fd))
    return kept


def write(path):
    build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
    daemon = KeptDaemon(build, tempfile.mkdtemp(), CONFIG, plan=["summed:kill@300"])
    ranks = kills.start(daemon, [[], []], n_steps=N_STEPS)
    assert daemon.popen.wait(60) == -signal.SIGKILL
    for rank in ranks:
        rank.last.kill()
    daemon.store.settle()
    save(path, [k for k in daemon.store.kept if k[0] != "listen"])
    daemon.kill()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
