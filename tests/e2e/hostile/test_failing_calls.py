# SPDX-License-Identifier: Apache-2.0
"""
System calls of the daemon fail, one at a time, while a job trains. This file tests a few numbers of each call;
scripts/soak calls tests numbers 1 to 200.
"""

import os

import pytest

import failing_calls
from kills import References

SOME = [("memfd_create", "ENOMEM", 4), ("memfd_create", "EMFILE", 6), ("mmap", "ENOMEM", 5), ("fallocate", "ENOSPC", 3),
        ("fallocate", "ENOMEM", 7), ("ftruncate", "ENOMEM", 6), ("openat", "EMFILE", 24), ("openat", "ENOMEM", 13),
        ("epoll_ctl", "ENOMEM", 6), ("epoll_ctl", "ENOSPC", 9), ("recvmmsg", "ENOMEM", 8), ("sendmsg", "ENOMEM", 9),
        ("sendmsg", "ENOBUFS", 11), ("accept4", "EMFILE", 2), ("pidfd_open", "EMFILE", 2)]


@pytest.fixture(scope="module")
def references(build, tmp_path_factory):
    if build.sanitize:
        pytest.skip("strace and the leak sanitizer exclude one another")
    if os.geteuid() != 0:
        pytest.skip("only root may trace whatever the kernel's ptrace_scope")
    return References(build, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("call, errno, n", SOME)
def test_call_that_fails(build, references, tmp_path, call, errno, n):
    failing_calls.one_run(build, references, tmp_path / "run", call, errno, n, patience=60)
