# SPDX-License-Identifier: Apache-2.0
"""
The declarations of tests/sim/include are those of CUDA and NCCL. Where the real headers are installed, a compiler
compares each prototype, number and field with them.
"""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
VERSIONS = re.compile(r"CUDA_VERSION|CUDART_VERSION|NCCL_(MAJOR|MINOR|PATCH|VERSION_CODE)")


def folder_of(header, *candidates):
    for candidate in candidates:
        if candidate and (Path(candidate) / header).is_file():
            return Path(candidate)
    pytest.skip(f"{header} is not installed")


def cuda():
    home = os.environ.get("CUDA_HOME")
    return folder_of("cuda_runtime_api.h", home and f"{home}/include", "/usr/local/cuda/include", "/usr/include")


def nccl():
    home = os.environ.get("NCCL_HOME")
    packages = sysconfig.get_path("purelib")
    return folder_of("nccl.h", home and f"{home}/include", "/usr/include", f"{packages}/nvidia/nccl/include",
                     HERE.parents[1] / "build/nccl/include")  # scripts/test --part cuda leaves one there


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def constants(text):
    """Return: names and values of enumerators, and of macros that are numbers."""
    found = re.findall(r"^\s+(\w+) = (0x[0-9a-fA-F]+|\d+),", text, flags=re.M)
    found += re.findall(r"^#define (\w+) (0x[0-9a-fA-F]+|\d+)$", text, flags=re.M)
    return [(name, value) for name, value in found if not VERSIONS.fullmatch(name)]


def versioned(text):
    """Return: (name, versioned name in the library) of these functions."""
    return re.findall(r"^#define (cu\w+) (cu\w+)$", text, flags=re.M)


def prototypes(text):
    return re.findall(r"^(?:const )?\w+ \*?(?:CUDAAPI )?\w+\([^;{]*\);", text, flags=re.M)


def structs(text):
    """Return: the fields of each struct with a typedef, by its name. Fields of a struct inside it are inner.field."""
    result = {}
    for body, name in re.findall(r"^typedef struct(?: \w+)? \{\n(.*?)^\} (\w+);", text, flags=re.M | re.S):
        fields = []
        for inner, inner_name in re.findall(r"struct \{(.*?)\} (\w+);", body, flags=re.S):
            fields += [f"{inner_name}.{f}" for f in re.findall(r"(\w+)(?:\[\w+\])?;", inner)]
        fields += re.findall(r"(\w+)(?:\[\w+\])?;", re.sub(r"struct \{.*?\}", "", body, flags=re.S))
        result[name] = fields
    return result


def facts(header, sizes):
    """Return: C text that compiles only if all declarations agree. sizes: whether whole structs have the same size."""
    text = without_comments((HERE / "include" / header).read_text())
    lines = [f'_Static_assert({name} == {value}, "{name}");' for name, value in constants(text)]
    lines += prototypes(text)
    lines += ["#define TEXT_OF(name) #name", "#define NAME_OF(name) TEXT_OF(name)"]
    for name, real in versioned(text):
        lines.append(f'_Static_assert(__builtin_strcmp(NAME_OF({name}), "{real}") == 0, "{name}");')
    for name, fields in structs(text).items():
        ours = sim_layout(header, name, fields)
        lines += [f'_Static_assert(offsetof({name}, {f}) == {at}, "{name}.{f}");' for f, at in zip(fields, ours[1:])]
        if sizes:
            lines.append(f'_Static_assert(sizeof({name}) == {ours[0]}, "{name}");')
    return lines


def sim_layout(header, name, fields):
    """
    Return: size, then offsets, in our header. They are read from a compiler error, which has a number in a type's name.
    """
    result = []
    for value in [f"sizeof({name})", *(f"offsetof({name}, {f})" for f in fields)]:
        source = f"#include <stddef.h>\n#include <{header}>\nint *layout(char (*at)[{value} + 1]) {{ return at; }}\n"
        out = subprocess.run(
            ["cc", "-xc", "-fsyntax-only", "-Werror", "-fno-diagnostics-show-caret", f"-I{HERE}/include", "-"],
            input=source, capture_output=True, text=True,
        ).stderr
        result.append(int(re.search(r"char ?\(\*\) ?\[(\d+)\]", out)[1]) - 1)
    return result


def compile_against(source, *folders):
    return subprocess.run(
        ["cc", "-xc", "-std=gnu17", "-fsyntax-only", "-w", *(f"-isystem{f}" for f in folders), "-"],
        input=source, capture_output=True, text=True,
    )


def check(header, lines, *folders):
    source = "\n".join(["#include <stddef.h>", f"#include <{header}>", *lines]) + "\n"
    assert (made := compile_against(source, *folders)).returncode == 0, made.stderr


def check_nothing_missed(text, n_structs):
    assert len(constants(text)) + len(VERSIONS.findall(text)) >= text.count(" = ") > 0
    assert len(prototypes(text)) == text.count(");") > 0
    assert len(structs(text)) == n_structs
    assert len(versioned(text)) == len(re.findall(r"^#define cu\w+ [a-zA-Z]", text, flags=re.M))


@pytest.mark.parametrize("header, n_structs", [("cuda_runtime_api.h", 0), ("cuda.h", 4)])
def test_cuda(header, n_structs):
    check_nothing_missed(without_comments((HERE / "include" / header).read_text()), n_structs)
    check(header, facts(header, sizes=True), cuda())


def test_nccl():
    check_nothing_missed(without_comments((HERE / "include/nccl.h").read_text()), 2)
    # A later NCCL has additional fields at the end of its configuration.
    check("nccl.h", facts("nccl.h", sizes=False), nccl(), cuda())


@pytest.mark.parametrize("line", [
    "cudaError_t cudaMalloc(void **devPtr, int size);",
    '_Static_assert(cudaErrorNotReady == 601, "cudaErrorNotReady");',
])
def test_a_difference_is_seen(line):
    made = compile_against(f"#include <cuda_runtime_api.h>\n{line}\n", cuda())
    assert made.returncode != 0
