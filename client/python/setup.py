# SPDX-License-Identifier: Apache-2.0
"""Builds libzerod from the tree that this folder is part of, and puts it beside the package."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if not (ROOT / "meson.build").exists():
            sys.exit("zerod's Python package is built inside zerod's source tree: pip install ./client/python")
        with tempfile.TemporaryDirectory() as build:
            subprocess.run(["meson", "setup", build, str(ROOT), "--buildtype=release"], check=True)
            subprocess.run(["meson", "compile", "-C", build, "zerod:shared_library"], check=True)
            library = (Path(build) / "client" / "libzerod.so").resolve()
            shutil.copy(library, Path(self.build_lib) / "zerod" / "libzerod.so")


class Platform(Distribution):
    """The library is of a platform, but of no version of Python."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=Platform, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": Wheel})
