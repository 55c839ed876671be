# SPDX-License-Identifier: Apache-2.0
"""
How meson uses a given CUDA and NCCL, tested with imitated folders, and with an nvcc that answers questions and compiles
nothing.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from tiers import full

ROOT = Path(os.environ.get("ZEROD_SOURCE_ROOT", Path(__file__).resolve().parents[2]))
SMALL = ["-Dtests=disabled", "-Dsystemd=disabled", "-Dexporter=disabled", "-Dgloo=disabled"]
OLD_ARCHS, NEW_ARCHS = ["50", "80", "86", "89", "90"], ["75", "80", "86", "90", "100", "103", "110", "120", "121"]


@pytest.fixture
def tmp_path(tmp_path):
    """A folder in the source tree, where an environment with CUDA's wheels may be. git ignores it as a build folder."""
    with tempfile.TemporaryDirectory(prefix="build-gpu-", dir=ROOT) as folder:
        yield Path(folder)


@pytest.fixture
def toolkit(tmp_path):
    """toolkit(version, archs) -> the meson option with its path."""

    def make(version, archs):
        folder = tmp_path / "cuda"
        for name in "bin", "include", "lib64":
            (folder / name).mkdir(parents=True)
        nvcc = folder / "bin" / "nvcc"
        listed = "\\n".join(f"compute_{arch}" for arch in archs)
        nvcc.write_text("#!/bin/sh\ncase $1 in\n"
                        f"--version) echo 'Cuda compilation tools, release {version}, V{version}.99' ;;\n"
                        f"--list-gpu-arch) printf '{listed}\\n' ;;\n*) exit 1 ;;\nesac\n")
        nvcc.chmod(0o755)
        (folder / "lib64" / "libcudart_static.a").write_bytes(b"!<arch>\n")
        return f"-Dtoolkit={folder}"

    return make


@pytest.fixture
def nccl(tmp_path):
    """A folder like the one of NCCL's wheel: the library's name contains a number."""
    folder = tmp_path / "nccl"
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include" / "nccl.h").touch()
    subprocess.run(["cc", "-shared", "-Wl,-soname,libnccl.so.2", "-o", folder / "lib/libnccl.so.2", "-x", "c", "/dev/null"],
                   check=True)
    return folder


def configure(tmp_path, *options):
    result = subprocess.run(["meson", "setup", tmp_path / "build", ROOT, *SMALL, *options], capture_output=True, text=True,
                            timeout=120)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize("version", ["12.4", *full("11.8")])
def test_cuda_too_old(tmp_path, toolkit, version):
    option = toolkit(version, OLD_ARCHS)
    status, text = configure(tmp_path, option, "-Dcuda=enabled")
    assert status != 0
    assert f"ERROR: Problem encountered: CUDA is {version} (" in text and "zerod's engine for GPUs needs 12.5 or later" in text
    assert "-Dtoolkit=FOLDER" in text and "-Dcuda=disabled" in text
    status, text = configure(tmp_path, option, "-Dnccl=enabled")
    assert status != 0 and "ERROR: Problem encountered: zerod-engine-nccl needs nvcc of CUDA 12.5 or later" in text


def test_cuda_too_old_and_not_asked_for(tmp_path, toolkit):
    status, text = configure(tmp_path, toolkit("12.4", OLD_ARCHS))
    assert status == 0, text
    assert "WARNING: CUDA is 12.4" in text and "kernels for GPUs: none" in text


@pytest.mark.parametrize("version, known, expected", [("12.5", OLD_ARCHS, "sm_80, sm_90 engines"),
                                                      *full(("13.0", NEW_ARCHS, "sm_80, sm_90, sm_100, sm_120 engines"))])
def test_archs(tmp_path, toolkit, nccl, version, known, expected):
    """
    Generations that nvcc does not support are left out. NCCL is linked by its path, where it is found at run time.
    """
    status, text = configure(tmp_path, toolkit(version, known), f"-Dnccl_dir={nccl}")
    assert status == 0, text
    assert f"kernels for GPUs: {expected}" in text and "nccl (GPUs)" in text
    commands = (tmp_path / "build" / "build.ninja").read_text()
    link = next(part for part in commands.split("\nbuild ") if part.startswith("daemon/zerod-engine-nccl:"))
    assert f"{nccl}/lib/libnccl.so.2" in link and f"-Wl,-rpath,{nccl}/lib" in link
    assert f"-isystem{nccl}/include" in commands.replace("-isystem ", "-isystem")


@pytest.mark.parametrize("option, expected", [("-Dcuda=auto", "sm_80"), ("-Dcuda=enabled", "sm_80, sm_90, sm_100, sm_120")])
def test_archs_without_nccl(tmp_path, toolkit, option, expected):
    """Without NCCL no program has the kernels, so they are compiled for one generation only, as a check."""
    status, text = configure(tmp_path, toolkit("13.0", NEW_ARCHS), "-Dnccl=disabled", option)
    assert status == 0, text
    assert f"kernels for GPUs: {expected} engines" in text


@pytest.mark.parametrize("file", ["lib/libnccl.so.2", *full("include/nccl.h")])
def test_not_a_folder_of_nccl(tmp_path, toolkit, nccl, file):
    (nccl / file).unlink()
    status, text = configure(tmp_path, toolkit("13.0", NEW_ARCHS), f"-Dnccl_dir={nccl}")
    assert status != 0
    assert f"ERROR: Problem encountered: nccl_dir: there is no {file} in {nccl}. Name the folder that has it; of the wheel" in text
