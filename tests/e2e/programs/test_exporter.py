# SPDX-License-Identifier: Apache-2.0
"""zerod-exporter: its answers. Neither daemons nor clients that misbehave keep other clients from being served."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import ROOT, environment, wait_for
from test_metrics import PROMTOOL, samples
from test_zerodctl import daemon, example, parts

pytestmark = pytest.mark.quick

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
FOREIGN_UID = 12345


class Exporter:
    def __init__(self, build, folder, *options, preload=None):
        self.err_path = folder / "exporter.err"
        with open(self.err_path, "wb") as err:
            self.popen = subprocess.Popen(
                [program(build), "--listen", "127.0.0.1:0", "--sockets", f"{folder}/*.sock", *options],
                stderr=err, env=environment({"LD_PRELOAD": preload} if preload else None))
        self.port = int(wait_for("the exporter does not listen",
                                 lambda: re.search(r"listening on http://127.0.0.1:(\d+)/metrics\n", self.err()))[1])

    def err(self):
        return self.err_path.read_text()

    def said(self):
        """Return: standard error without the line with the address."""
        return self.err().splitlines()[1:]

    def request(self, url="/metrics", method="GET", **headers):
        """(status, headers, body)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, url, headers=headers)
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, response.headers, body

    def up(self):
        """{name of a socket's file: zerod_up}"""
        status, _, text = self.request(Accept=OPENMETRICS)
        assert status == 200
        return {os.path.basename(s.labels["socket"]): s.value for f in families(text) for s in f.samples if s.name == "zerod_up"}

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def n_fds(self):
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))


def families(text):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    return list(text_string_to_metric_families(text))


def program(build):
    path = build.folder / "client/exporter/zerod-exporter"
    if not path.exists():
        pytest.skip("the build has no zerod-exporter (libmicrohttpd)")
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder whose path is short enough for sockets, and that only this user can enter."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def exporter(build, folder):
    started = []

    def start(*options, **more):
        started.append(Exporter(build, folder, *options, **more))
        return started[-1]

    yield start
    for one in started:
        one.popen.send_signal(signal.SIGTERM)
        assert one.popen.wait(30) == 0, one.err()


def examples(command):
    return parts(example(command))


@contextlib.contextmanager
def deaf(path, backlog=1):
    """A socket that accepts no connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.bind(str(path))
        s.listen(backlog)
        yield s


# ---- what it serves ----------------------------------------------------------------------------------------------


def test_both_formats(exporter, folder):
    """
    Prometheus gets OpenMetrics. A client that does not ask for OpenMetrics gets the older format. Both can be parsed.
    """
    from prometheus_client.parser import text_string_to_metric_families as read_prometheus

    with daemon(folder / "a.sock", examples):
        one = exporter()
        status, headers, text = one.request(Accept=OPENMETRICS)
        assert (status, headers["Content-Type"]) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        assert samples(text)["zerod_up", frozenset()] == 1
        status, headers, older = one.request(Accept="*/*")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    types = {f.name: f.type for f in read_prometheus(older)}
    assert types["zerod_steps"] == "counter" and types["zerod_up"] == "gauge"
    newer = {s.name for f in families(text) for s in f.samples}
    assert newer == {s.name for f in read_prometheus(older) for s in f.samples}
    if PROMTOOL:
        lint = subprocess.run([PROMTOOL, "check", "metrics"], input=older, capture_output=True, text=True)
        assert (lint.returncode, lint.stderr) == (0, "")


def test_all_daemons_in_one_text(exporter, folder):
    """One text has all daemons, also two with the same job name, as zerodrun gives it to unnamed jobs."""
    with daemon(folder / "a.sock", examples), daemon(folder / "b.sock", examples):
        one = exporter()
        assert one.up() == {"a.sock": 1, "b.sock": 1}
        _, _, text = one.request(Accept=OPENMETRICS)
    steps = [s for f in families(text) for s in f.samples if s.name == "zerod_step"]
    assert [s.labels["job_name"] for s in steps] == ["pretrain"] * 2
    assert one.said() == []


def test_no_daemons(exporter):
    one = exporter()
    assert one.request(Accept=OPENMETRICS)[2] == "# EOF\n"
    assert one.up() == {} and one.said() == []


def test_pages(exporter, build, folder):
    one = exporter("--sockets", f"{folder}/<b>&\"'*.sock")
    status, headers, body = one.request("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body.count("\n") == 1 and '<a href="/metrics">' in body
    assert "<b>" not in body and "/&#60;b&#62;&#38;&#34;&#39;*.sock" in body
    for url in ("/metrics/", "/x", "/../metrics", "//"):
        assert one.request(url)[0] == 404, url
    assert one.request("/metrics?x=1")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, _ = one.request("/metrics", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, headers, body = one.request("/", "HEAD")
    assert (status, body) == (200, "") and int(headers["Content-Length"]) > 0
    with one.connect() as s:
        s.sendall(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert re.match(rb"HTTP/1.1 4\d\d |$", s.recv(100))
    assert one.request("/")[0] == 200


# ---- daemons -----------------------------------------------------------------------------------------------------


def test_daemons_that_do_not_answer(exporter, folder, zerod):
    """Daemons that are stopped, never accept, use an unknown protocol or have ended do not delay the others."""
    stopped, real = zerod({"job": "stopped"}), zerod({"job": "real"})
    for name, one in ("stopped", stopped), ("real", real):
        (folder / f"{name}.sock").unlink(missing_ok=True)
        os.link(one.socket, folder / f"{name}.sock")
    with deaf(folder / "deaf.sock"), daemon(folder / "odd.sock", lambda _: parts("{no json")), \
            daemon(folder / "silent.sock", lambda _: (time.sleep(0) for _ in range(0))):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
            gone.bind(str(folder / "gone.sock"))
        one = exporter("--timeout", "0.5")
        names = ("deaf", "gone", "odd", "real", "silent", "stopped")
        assert one.up()["stopped.sock"] == 1
        stopped.signal(signal.SIGSTOP)
        time.sleep(0.11)
        try:
            for _ in range(12):  # more than the sockets' backlogs have room for
                begin = time.monotonic()
                assert one.up() == {f"{name}.sock": float(name == "real") for name in names}
                assert time.monotonic() - begin < 3
                time.sleep(0.11)
        finally:
            stopped.signal(signal.SIGCONT)
        wait_for("the daemon that goes on is not seen again", lambda: one.up()["stopped.sock"] == 1)
    said = one.said()
    assert len(said) == 5, said
    assert all(sum(f"{name}.sock: no answer: " in line for line in said) == 1 for name in names if name != "real")


def test_readers_share_answers(exporter, folder):
    """A daemon is asked at most ten times a second, however many clients ask."""
    with daemon(folder / "a.sock", examples) as seen:
        one = exporter()
        begin = time.monotonic()
        threads = [threading.Thread(target=lambda: [one.request() for _ in range(20)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begin
    assert sum(kind == "hello" for kind, _ in seen) <= 10 * seconds + 2


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")
def test_sockets_in_the_wrong_hands(exporter, folder):
    """Sockets in folders of other users are not asked, which is reported once. Sticky folders like /tmp are allowed."""
    for name, mode in ("mine", 0o755), ("others", 0o777), ("group", 0o775), ("sticky", 0o1777), ("foreign", 0o755):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    os.chown(folder / "foreign", FOREIGN_UID, 0)
    paths = [folder / name / "a.sock" for name in ("mine", "others", "group", "sticky", "foreign")]
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(daemon(path, examples))
        stack.enter_context(daemon(folder / "sticky" / "foreign.sock", examples))
        os.chown(folder / "sticky" / "foreign.sock", FOREIGN_UID, 0)
        (folder / "mine" / "file.sock").write_text("")
        (folder / "mine" / "link.sock").symlink_to(paths[0])
        one = exporter("--sockets", f"{folder}/*/*.sock")
        for _ in range(3):
            status, _, text = one.request(Accept=OPENMETRICS)
            asked = [s.labels["socket"] for f in families(text) for s in f.samples if s.name == "zerod_up"]
            assert sorted(asked) == [str(folder / name / "a.sock") for name in ("mine", "sticky")]
            time.sleep(0.11)
    said = sorted(line.removeprefix(f"zerod-exporter: {folder}/") for line in one.said())
    assert said == [
        f"foreign/a.sock: not asked: its folder belongs to uid {FOREIGN_UID}, and not to root, zerod or this user",
        "group/a.sock: not asked: others can write to its folder (mode 0775)",
        "mine/file.sock: not asked: it is no socket",
        "mine/link.sock: not asked: it is no socket",
        "others/a.sock: not asked: others can write to its folder (mode 0777)",
        f"sticky/foreign.sock: not asked: it belongs to uid {FOREIGN_UID}, and not to root, zerod or this user",
    ]


# ---- clients -----------------------------------------------------------------------------------------------------


def test_clients_that_say_nothing(exporter):
    """More silent clients than there is room for are dropped. A client that asks is served at once."""
    one = exporter()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(one.connect()) for _ in range(200)]
        for s in silent[::2]:
            s.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        for _ in range(10):
            begin = time.monotonic()
            assert one.request()[0] == 200
            assert time.monotonic() - begin < 2
        deadline = time.monotonic() + 15
        for s in silent:
            s.settimeout(max(deadline - time.monotonic(), 0.01))
            with contextlib.suppress(ConnectionError):
                while s.recv(1000):  # an error page may come before the end
                    pass


def test_client_that_dribbles(exporter, build):
    """A byte now and then does not keep a connection open. Dropping a client that has already gone does no harm."""
    one = exporter("--timeout", "0.1", preload=None if build.sanitize else build.folder / "tests/libclients-gone.so")
    begin = time.monotonic()
    with one.connect() as s, contextlib.suppress(ConnectionError):
        for byte in b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 1000:
            s.sendall(bytes([byte]))
            time.sleep(0.2)
            assert time.monotonic() - begin < 12, "it is still connected"
    assert time.monotonic() - begin > 3
    assert one.request()[0] == 200


def test_client_that_never_reads(exporter, folder):
    with daemon(folder / "a.sock", examples):
        one = exporter()
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                s = stack.enter_context(one.connect())
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
            assert one.up() == {"a.sock": 1}


def test_nothing_is_left_behind(exporter, folder):
    with daemon(folder / "a.sock", examples):
        one = exporter()
        one.up()
        before = one.n_fds()
        for _ in range(100):
            one.request()
            with one.connect():
                pass
        wait_for("descriptors or threads are left",
                 lambda: one.up() and one.n_fds() <= before + 2 and len(os.listdir(f"/proc/{one.popen.pid}/task")) <= 4)


# ---- the command line --------------------------------------------------------------------------------------------


def run(build, *args):
    return subprocess.run([program(build), *args], capture_output=True, text=True, timeout=30, env=environment())


def test_address_in_use(exporter, build):
    one = exporter()
    result = run(build, "--listen", f"127.0.0.1:{one.port}")
    assert result.returncode == os.EX_UNAVAILABLE
    assert result.stderr == f"zerod-exporter: cannot listen on 127.0.0.1:{one.port}: Address already in use\n"


@pytest.mark.parametrize("args", [
    ["--listen", "17700"], ["--listen", "x:"], ["--listen", "::1:17700"], ["--listen", "127.0.0.1:99999"],
    ["--listen", "127.0.0.1:1x"], ["--listen"], ["--timeout", "0"], ["--timeout", "61"], ["--timeout", "nan"],
    ["--timeout", "1s"], ["--nonsense"], ["more"],
])
def test_usage(build, args):
    result = run(build, *args)
    assert result.returncode == os.EX_USAGE and result.stderr and not result.stdout


def test_no_such_address(build):
    result = run(build, "--listen", "192.0.2.1:17700")  # an address for documentation
    assert result.returncode == os.EX_UNAVAILABLE and result.stderr.count("\n") == 1


def test_ipv6(build, folder):
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        pytest.skip("there is no IPv6 here")
    with subprocess.Popen([program(build), "--listen", "[::1]:0"], stderr=subprocess.PIPE, text=True) as popen:
        try:
            assert re.fullmatch(r"zerod-exporter: listening on http://\[::1\]:\d+/metrics\n", popen.stderr.readline())
        finally:
            popen.terminate()


def test_help_and_manual(build):
    page = (ROOT / "man/zerod-exporter.8").read_text().replace("\\-", "-")
    text = run(build, "--help").stdout
    assert all(word in page for word in re.findall(r"--[a-z-]+", text)) and "--sockets" in text
    assert re.fullmatch(r"zerod-exporter \d+\.\d+\.\d+\n", run(build, "--version").stdout)
