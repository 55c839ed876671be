# SPDX-License-Identifier: Apache-2.0
"""Checks nvcc's output for the kernels: it has machine code for each generation and the portable form, and no
instruction that would give other bits than the CPU's.

    device_code.py ARCH[,ARCH...] OBJECT...

Objects are compiled with --no-compress, so that machine code lies in them as ELF files and the portable form (PTX) as
text. So this program needs none of CUDA's tools, which not every installation has.
"""

import re
import struct
import sys
from pathlib import Path

CONTAINER = b"\x50\xed\x55\xba"  # then u16 version, u16 bytes of this header, u64 bytes behind it
PTX, ELF = 1, 2
EM_CUDA = 190
E_MACHINE, E_FLAGS = 18, 48

# Fused or approximate arithmetic, flushed subnormals. Integer multiply-add (mad.lo.s32) is none of them.
FORBIDDEN = re.compile(r"\b(?:fma\.|mad\.(?:rn|rz|rm|rp|f)|\S*\.approx|\S*\.ftz|(?:div|sqrt|rcp)\.full)\S*")


def codes(data):
    """(kind, contents) of everything in the containers of an object."""
    at = data.find(CONTAINER)
    while at >= 0:
        header, size = struct.unpack_from("<6xHQ", data, at)
        code, end = at + header, at + header + size
        while code < end:
            kind, code_header, code_size = struct.unpack_from("<HxxIQ", data, code)
            yield kind, data[code + code_header:code + code_header + code_size]
            code += code_header + code_size
        at = data.find(CONTAINER, end)


def look_at(path):
    """(generations of machine code, generations of PTX, forbidden instructions) of an object."""
    machine, portable, forbidden = [], [], []
    for kind, code in codes(path.read_bytes()):
        if kind == ELF:
            assert code.startswith(b"\x7fELF") and struct.unpack_from("<H", code, E_MACHINE)[0] == EM_CUDA, path
            machine.append(str(struct.unpack_from("<I", code, E_FLAGS)[0] >> 8 & 0xff))
        elif kind == PTX:
            text = code.decode("ascii")
            portable += re.findall(r"^\.target sm_(\d+)", text, re.MULTILINE)
            forbidden += FORBIDDEN.findall(text)
    return sorted(machine), portable, forbidden


def main(archs, *objects):
    archs = archs.split(",")
    expected = (sorted(archs), [archs[-1]], [])
    assert objects
    failed = False
    for path in map(Path, objects):
        found = look_at(path)
        print(f"{path.name}: machine code for {found[0]}, PTX for {found[1]}, forbidden: {sorted(set(found[2]))}")
        failed |= found != expected
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
