# SPDX-License-Identifier: Apache-2.0
"""Checks what each kernel needs of a GPU's processor: registers, stack, shared memory, and how many blocks fit on it.

    device_resources.py ARCH[,ARCH...] OBJECT...

Reads nvcc's machine code, like device_code.py. A spilled register needs stack, so a kernel without stack spills none.
The stack of a kernel with its own array is exactly that array.
"""

import re
import struct
import sys
from pathlib import Path

from device_code import ELF, E_FLAGS, codes

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adagrad", "muon", "momentum")  # enum optimizer, Muon's first pass
DTYPES = ("f32", "bf16", "f16")  # in the order of enum dtype
MOMENTS = {0: "f32", 1: "bf16", 16: "8 bits"}  # of enum dtype
MASTER24 = "4"  # of kernels/cuda/update_job.h
THREADS = 128  # BLOCK_THREADS of kernels/cuda/block.h

# Limits of registers, bytes of stack and of shared memory, on every generation. Another version of the compiler may
# need a few more registers. The limits protect the number of blocks, which would drop by one beyond them.
BOUNDS = {
    "clear_kernel": (32, 0, 0),
    "words_kernel": (32, 0, 0),
    "to_f32_kernel": (40, 0, 0),
    "from_f32_kernel": (40, 0, 0),
    "position_kernel": (48, 0, 4096),
    "norm_kernel": (40, 0, 1024),
    "normalize_kernel": (48, 0, 1024),
    "update_kernel<adamw, f32>": (64, 0, 0),
    "update_kernel<adam, f32>": (64, 0, 0),
    "update_kernel<sgd, f32>": (48, 0, 0),
    "update_kernel<lion, f32>": (48, 0, 0),
    "update_kernel<adagrad, f32>": (56, 0, 0),
    # bf16 moments need half the registers while they wait.
    "update_kernel<adamw, bf16>": (48, 0, 0),
    "update_kernel<adam, bf16>": (64, 0, 0),
    "update_kernel<sgd, bf16>": (40, 0, 0),
    "update_kernel<lion, bf16>": (40, 0, 0),
    "update_kernel<adagrad, bf16>": (40, 0, 0),
    # A job of 160 bytes is in shared memory. Seven blocks fit, because a group is read ahead.
    "update8_kernel<adamw>": (72, 0, 160),
    "update8_kernel<adam>": (72, 0, 160),
    "update8_kernel<sgd>": (64, 0, 160),
    "update8_kernel<lion>": (56, 0, 160),
    "update8_kernel<adagrad>": (64, 0, 160),
    # Both kernels of Muon read two arrays and write one or two.
    "update_kernel<muon, f32>": (40, 0, 0),
    "update_kernel<muon, bf16>": (40, 0, 0),
    "update_kernel<momentum, f32>": (40, 0, 0),
    "update_kernel<momentum, bf16>": (40, 0, 0),
    "update8_kernel<muon>": (48, 0, 160),
    "update8_kernel<momentum>": (56, 0, 160),
    "undo_kernel<muon, f32>": (72, 0, 160),
    "undo_kernel<muon, bf16>": (72, 0, 160),
    "undo_kernel<muon, 8 bits>": (64, 0, 160),
    "undo_kernel<momentum, f32>": (72, 0, 160),
    "undo_kernel<momentum, bf16>": (72, 0, 160),
    "undo_kernel<momentum, 8 bits>": (72, 0, 160),
    # Six blocks fit, because each has two groups in flight.
    "undo_kernel<adamw, f32>": (80, 0, 160),
    "undo_kernel<adam, f32>": (80, 0, 160),
    "undo_kernel<sgd, f32>": (80, 0, 160),
    "undo_kernel<lion, f32>": (80, 0, 160),
    "undo_kernel<adagrad, f32>": (72, 0, 160),
    "undo_kernel<adamw, bf16>": (80, 0, 160),
    "undo_kernel<adam, bf16>": (80, 0, 160),
    "undo_kernel<sgd, bf16>": (80, 0, 160),
    "undo_kernel<lion, bf16>": (72, 0, 160),
    "undo_kernel<adagrad, bf16>": (72, 0, 160),
    "undo_kernel<adamw, 8 bits>": (80, 0, 160),
    "undo_kernel<adam, 8 bits>": (80, 0, 160),
    "undo_kernel<sgd, 8 bits>": (80, 0, 160),
    "undo_kernel<lion, 8 bits>": (72, 0, 160),
    "undo_kernel<adagrad, 8 bits>": (80, 0, 160),
    # With 24-bit master weights: rounding needs registers, but waiting values need fewer.
    "update_kernel<adamw, f32, 24>": (64, 0, 0),
    "update_kernel<adamw, bf16, 24>": (56, 0, 0),
    "update_kernel<adam, f32, 24>": (56, 0, 0),
    "update_kernel<adam, bf16, 24>": (56, 0, 0),
    "update_kernel<sgd, f32, 24>": (48, 0, 0),
    "update_kernel<sgd, bf16, 24>": (40, 0, 0),
    "update_kernel<lion, f32, 24>": (40, 0, 0),
    "update_kernel<lion, bf16, 24>": (40, 0, 0),
    "update_kernel<adagrad, f32, 24>": (56, 0, 0),
    "update_kernel<adagrad, bf16, 24>": (48, 0, 0),
    "update_kernel<muon, f32, 24>": (40, 0, 0),
    "update_kernel<muon, bf16, 24>": (40, 0, 0),
    "update8_kernel<adamw, 24>": (72, 0, 160),
    "update8_kernel<adam, 24>": (72, 0, 160),
    "update8_kernel<sgd, 24>": (72, 0, 160),
    "update8_kernel<lion, 24>": (56, 0, 160),
    "update8_kernel<adagrad, 24>": (72, 0, 160),
    "update8_kernel<muon, 24>": (48, 0, 160),
    "undo_kernel<adamw, f32, 24>": (80, 0, 160),
    "undo_kernel<adamw, bf16, 24>": (72, 0, 160),
    "undo_kernel<adamw, 8 bits, 24>": (80, 0, 160),
    "undo_kernel<adam, f32, 24>": (80, 0, 160),
    "undo_kernel<adam, bf16, 24>": (72, 0, 160),
    "undo_kernel<adam, 8 bits, 24>": (80, 0, 160),
    "undo_kernel<sgd, f32, 24>": (80, 0, 160),
    "undo_kernel<sgd, bf16, 24>": (80, 0, 160),
    "undo_kernel<sgd, 8 bits, 24>": (80, 0, 160),
    "undo_kernel<lion, f32, 24>": (80, 0, 160),
    "undo_kernel<lion, bf16, 24>": (72, 0, 160),
    "undo_kernel<lion, 8 bits, 24>": (64, 0, 160),
    "undo_kernel<adagrad, f32, 24>": (80, 0, 160),
    "undo_kernel<adagrad, bf16, 24>": (72, 0, 160),
    "undo_kernel<adagrad, 8 bits, 24>": (72, 0, 160),
    "undo_kernel<muon, f32, 24>": (72, 0, 160),
    "undo_kernel<muon, bf16, 24>": (80, 0, 160),
    "undo_kernel<muon, 8 bits, 24>": (64, 0, 160),
    # The waiting sums of any tree: DEVICE_TREE_DEPTH times 16 bytes of a rank's elements, in fp32.
    "reduce_kernel<f32, 0>": (128, 256, 10832),
    "reduce_kernel<bf16, 0>": (128, 512, 10832),
    "reduce_kernel<f16, 0>": (128, 512, 10832),
}
for dtype in DTYPES:
    for n, registers in ((1, 56), (2, 72), (4, 96), (8, 168)):
        BOUNDS[f"reduce_kernel<{dtype}, {n}>"] = (registers, 0, 10832)
BOUNDS["reduce_kernel<f16, 4>"] = (128, 0, 10832)
# nvcc 13.0 spills a few registers here; without spills there would be one block less.
SPILLED = {(120, "reduce_kernel<f32, 8>"): (168, 16, 10832), (120, "reduce_kernel<f16, 8>"): (168, 64, 10832),
           (100, "undo_kernel<adamw, f32>"): (80, 8, 160), (120, "undo_kernel<adamw, f32>"): (80, 24, 160),
           (100, "undo_kernel<adam, f32>"): (80, 8, 160), (80, "undo_kernel<sgd, f32>"): (80, 24, 160),
           (90, "undo_kernel<sgd, f32>"): (80, 16, 160), (90, "undo_kernel<sgd, bf16>"): (80, 8, 160),
           (120, "undo_kernel<adamw, f32, 24>"): (80, 8, 160), (100, "update8_kernel<adamw, 24>"): (72, 8, 160),
           (120, "update8_kernel<adamw, 24>"): (72, 24, 160)}

# Of one processor: registers, shared memory (from 8.0 on a block needs 1 KiB more than it asks for), threads, blocks.
PROCESSORS = {
    80: (65536, 164 << 10, 2048, 32),
    90: (65536, 228 << 10, 2048, 32),
    100: (65536, 228 << 10, 2048, 32),
    120: (65536, 100 << 10, 1536, 24),
}
REGISTER_UNIT = 8  # each thread's registers are rounded up to this
SHARED_RESERVED = 1024

# Sections .nv.info: format and number of an attribute, its size, then (symbol, value).
SIZED_VALUE = 4
REGISTERS, FRAME = 0x2F, 0x11


def plain_name(symbol):
    name = re.match(r"_Z(\d+)", symbol)
    at = name.end() + int(name[1])
    update = re.match(r"IL9optimizer(\d)E(?:L5dtype(\d+)E)?Lj(\d)EE", symbol[at:])
    if update:
        moments = f", {MOMENTS[int(update[2])]}" if update[2] else ""
        masters = ", 24" if update[3] == MASTER24 else ""
        return symbol[name.end():at] + f"<{OPTIMIZERS[int(update[1])]}{moments}{masters}>"
    of = re.match(r"IL5dtype(\d)ELj(\d+)EE", symbol[at:])
    return symbol[name.end():at] + (f"<{DTYPES[int(of[1])]}, {of[2]}>" if of else "")


def sections_of(elf):
    """Return: (name, contents, bytes) of each section."""
    offset, = struct.unpack_from("<Q", elf, 40)
    each, n, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * each) for i in range(n)]
    names = elf[headers[names_at][4]:][:headers[names_at][5]]
    for name, _, _, _, begin, n_bytes in headers:
        yield names[name:names.index(b"\0", name)].decode(), elf[begin:begin + n_bytes], n_bytes


def attributes_of(info):
    """Yields (number, symbol, value) of the attributes in this format."""
    at = 0
    while at < len(info):
        kind, number, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != SIZED_VALUE:
            continue
        if number in (REGISTERS, FRAME):
            yield number, *struct.unpack_from("<II", info, at)
        at += size


def kernels_of(elf):
    """Return: name: (registers, bytes of stack, bytes of shared memory) of the kernels in a piece of machine code."""
    sections = {name: (contents, n_bytes) for name, contents, n_bytes in sections_of(elf)}
    names, symbols = sections[".strtab"][0], sections[".symtab"][0]
    found = {}
    for number, symbol, value in attributes_of(sections[".nv.info"][0]):
        at, = struct.unpack_from("<I", symbols, symbol * 24)
        found.setdefault(names[at:names.index(b"\0", at)].decode(), {})[number] = value
    # Other symbols are the compiler's own functions, such as division. Their callers' registers include theirs.
    return {plain_name(symbol): (of[REGISTERS], of[FRAME], shared_of(sections, symbol))
            for symbol, of in found.items() if f".text.{symbol}" in sections}


def shared_of(sections, symbol):
    n_bytes = sections.get(f".nv.shared.{symbol}", (b"", 0))[1]
    return n_bytes - SHARED_RESERVED if n_bytes > 0 and ".nv.shared.reserved.0" in sections else n_bytes


def blocks_of(arch, registers, shared):
    """Return: how many blocks of a kernel fit on a processor."""
    all_registers, all_shared, threads, blocks = PROCESSORS[arch]
    each = -(-registers // REGISTER_UNIT) * REGISTER_UNIT * THREADS
    return min(all_registers // each, all_shared // (shared + SHARED_RESERVED), threads // THREADS, blocks)


def main(archs, *objects):
    seen = {arch: set() for arch in map(int, archs.split(","))}
    wrong = []
    for path in map(Path, objects):
        for elf in (code for kind, code in codes(path.read_bytes()) if kind == ELF):
            arch = struct.unpack_from("<I", elf, E_FLAGS)[0] >> 8 & 0xff
            for name, taken in kernels_of(elf).items():
                seen[arch].add(name)
                n = blocks_of(arch, taken[0], taken[2])
                share = n * THREADS / PROCESSORS[arch][2]
                print(f"sm_{arch} {name:24}{taken[0]:4} registers, stack {taken[1]:3}, shared {taken[2]:5}, "
                      f"{n:2} blocks on a processor: {share:.0%}")
                bounds = SPILLED.get((arch, name)) or BOUNDS.get(name)
                if not bounds or any(is_ > most for is_, most in zip(taken, bounds)):
                    wrong.append(f"sm_{arch} {name} takes {taken}, and may take {bounds}")
    for arch, names in seen.items():
        wrong += [f"sm_{arch} {name} is not there" for name in sorted(BOUNDS.keys() - names)]
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
