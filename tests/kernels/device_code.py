# SPDX-License-Identifier: Apache-2.0
"""Checks nvcc's output for the kernels. It must have machine code for each generation and the portable form, and no
instruction that gives other bits than the CPU.

    device_code.py ARCH[,ARCH...] OBJECT...

Objects are compiled with --no-compress, so that they contain machine code as ELF files and the portable form (PTX) as
text. So this program needs none of CUDA's tools, which some installations lack.
"""

import re
import struct
import sys
from pathlib import Path

CONTAINER = b"\x50\xed\x55\xba"  # then u16 version, u16 bytes of this header, u64 bytes of contents
PTX, ELF = 1, 2
EM_CUDA = 190
E_MACHINE, E_FLAGS = 18, 48

# Fused or approximate arithmetic, flushed subnormals. Integer multiply-add (mad.lo.s32) is allowed.
FORBIDDEN = re.compile(r"\b(?:fma\.|mad\.(?:rn|rz|rm|rp|f)|\S*\.approx|\S*\.ftz|(?:div|sqrt|rcp)\.full)\S*")


def codes(data):
    """Yields (kind, contents) of everything in an object's containers."""
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
    """Return: (generations of machine code, generations of PTX, forbidden instructions) of an object."""
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
