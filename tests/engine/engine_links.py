# SPDX-License-Identifier: Apache-2.0
"""Checks that zerod-engine-nccl finds its libraries by itself. It starts in an empty environment, contains the CUDA
runtime, and looks for NCCL in the folder that was given at build time.

    engine_links.py ENGINE FOLDER_OF_LIBNCCL

If the folder is empty, NCCL is the system's, and the engine names no folder. The check needs no GPU and no driver.
"""

import re
import subprocess
import sys


def main(engine, nccl_folder):
    dynamic = subprocess.run(["readelf", "--dynamic", "--wide", engine], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    folders = [f for path in re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic) for f in path.split(":") if f]
    started = subprocess.run([engine], env={}, capture_output=True, text=True)
    print(f"{engine}: needs {needed}, looks in {folders}; {started.returncode}: {started.stderr}", end="")
    assert "libnccl.so.2" in needed
    assert not [name for name in needed if name.startswith(("libcuda.", "libcudart."))]
    assert folders == ([nccl_folder] if nccl_folder else [])
    # A loader error would have exit status 127.
    assert (started.returncode, started.stderr) == (2, "zerod-engine-nccl is started by zerod, not by hand\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
