# SPDX-License-Identifier: Apache-2.0
"""
python -m zerod: the program zerodctl, even if zerodctl is not on PATH.

    python -m zerod explain log.txt     what an error of DDP or DeepSpeed means; needs no daemon
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def zerodctl() -> str | None:
    """The zerodctl of this Python's environment, or the one on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "zerodctl"
    return str(beside) if beside.exists() else shutil.which("zerodctl")


def main() -> None:
    program = zerodctl()
    if program is None:
        sys.exit(
            "python -m zerod: there is no zerodctl in this environment, nor on PATH\n"
            "  fix            install zerod's wheel, or run zerodctl by its path"
        )
    os.execv(program, ["zerodctl", *sys.argv[1:]])


main()
