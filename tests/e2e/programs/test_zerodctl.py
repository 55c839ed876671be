# SPDX-License-Identifier: Apache-2.0
"""zerodctl with a small test daemon that sends the output of test-status; plan; the JSON Schemas."""

import json
import mmap
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
import referencing

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("ZEROD_BUILD", ROOT / "build")).resolve()
ZERODCTL = BUILD / "client" / "ctl" / "zerodctl"
TEST_STATUS = BUILD / "tests" / "test-status"
SCHEMAS = ROOT / "docs" / "schema"
TIMEOUT = 60


def zerodctl(*args, cwd=None, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ZEROD_")}
    return subprocess.run([ZERODCTL, *map(str, args)], capture_output=True, text=True, timeout=TIMEOUT, cwd=cwd,
                          env=clean | env)


def example(name):
    """Return: the output of the daemon's own code for this example."""
    return subprocess.run([TEST_STATUS, "--print", name], capture_output=True, check=True).stdout.decode().strip()


def validator(name):
    resources = [(path.name, referencing.Resource.from_contents(json.loads(path.read_text())))
                 for path in SCHEMAS.glob("*.json")]
    registry = referencing.Registry().with_resources(resources)
    schema = registry.contents(f"{name}.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, registry=registry)


# ---- a small test daemon ---------------------------------------------------------------------------------


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number, value):
    """Return: a protobuf field with an integer or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(data):
    """Parses protobuf fields. Return: {number: value} with the last value of each number."""
    out, i = {}, 0

    def number():
        nonlocal i
        n = shift = 0
        while True:
            n |= (data[i] & 127) << shift
            shift += 7
            i += 1
            if data[i - 1] < 128:
                return n

    while i < len(data):
        key = number()
        assert key & 7 in (0, 2)
        value = number()
        if key & 7 == 2:
            value, i = data[i:i + value], i + value
        out[key >> 3] = value
    return out


WELCOME, REFUSED, ADMIN_PART = 1, 7, 8
HELLO, ADMIN = 1, 24


def welcome():
    return field(WELCOME, field(1, 1) + field(3, 4) + field(4, 2) + field(5, 2_000_000) + field(6, 1))


def parts(text, exit_code=0, size=1000):
    data = text.encode()
    pieces = [data[i:i + size] for i in range(0, len(data), size)] or [b""]
    for i, piece in enumerate(pieces):
        last = i + 1 == len(pieces)
        body = field(1, piece) + (field(2, 1) if last else b"") + (field(3, exit_code) if exit_code else b"")
        yield field(ADMIN_PART, body)


def refused(code, text):
    return field(REFUSED, field(1, field(1, code) + field(3, "refused") + field(15, text)) + field(2, 1))


@contextmanager
def daemon(path, answer, greet=welcome):
    """A test daemon. answer(command) yields packets; None closes the connection without an answer."""
    seen = []

    def serve(connection):
        with connection:
            hello = fields(fields(connection.recv(1 << 17))[HELLO])
            seen.append(("hello", hello))
            connection.send(greet())
            while data := connection.recv(1 << 17):
                command = fields(fields(data)[ADMIN])[1].decode()
                seen.append(("admin", command))
                replies = answer(command)
                if replies is None:
                    return
                for packet in replies:
                    connection.send(packet)

    def listen(server):
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            try:
                serve(connection)
            except (OSError, KeyError, AssertionError) as e:
                seen.append(("error", e))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=listen, args=(server,), daemon=True)
        thread.start()
        yield seen
        server.shutdown(socket.SHUT_RDWR)
    thread.join(TIMEOUT)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


def examples(command):
    return parts(example(command))


# ---- schemas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, schema", [
    ("status", "status"), ("status-minimal", "status"), ("status-nodes", "status"), ("status-node-1", "status"),
    ("ranks", "ranks"), ("stacks", "stacks"), ("params", "params"),
    ("params-minimal", "params"), ("diagnostics", "diagnostics"), ("diagnostics-unformed", "diagnostics"),
])
def test_the_daemons_json_fits_its_schema(name, schema):
    validator(schema).validate(json.loads(example(name)))


@pytest.mark.parametrize("name", ["status", "ranks", "stacks", "params", "diagnostics"])
def test_schemas_notice(name):
    """The schema detects a missing or additional key and a changed type in every object."""
    check = validator(name)
    value = json.loads(example(name))

    def objects(v):
        if isinstance(v, dict):
            yield v
            for child in list(v.values()):
                yield from objects(child)
        elif isinstance(v, list):
            for child in v:
                yield from objects(child)

    n = 0
    for o in objects(value):
        for key in list(o):
            kept = o.pop(key)
            assert not check.is_valid(value), f"{key} may be missing"
            o[key] = {"no": "such"}
            assert not check.is_valid(value), f"{key} may be anything"
            o[key] = kept
            n += 1
        o["surplus"] = 1
        assert not check.is_valid(value), "unknown keys are allowed"
        del o["surplus"]
    assert n > 10 and check.is_valid(value)


def test_every_key_is_described():
    def walk(schema, where):
        for key, sub in schema.get("properties", {}).items():
            yield from walk(sub, f"{where}.{key}")
        if "items" in schema:
            yield from walk(schema["items"], where + "[]")
        for key, sub in schema.get("$defs", {}).items():
            yield from walk(sub, f"{where}#{key}")
        yield where, schema

    for file in SCHEMAS.glob("*.json"):
        schema = json.loads(file.read_text())
        assert schema["title"] and schema["description"], file
        for where, sub in walk(schema, file.name):
            assert "additionalProperties" in sub or sub.get("type") != "object", where


# ---- output for people -----------------------------------------------------------------------------------


def test_status(path):
    with daemon(path, examples) as seen:
        result = zerodctl("--socket", path, "status")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "pretrain: training, stage 2, 3 of 4 ranks attached",
        "daemon    zerod 0.1.0 (avx2), pid 4242, up 1 min 0 s",
        r"run       run\xff-7: 4 parameters, 2.17 k elements trainable, 81 frozen, 3 buckets of up to 1.00 M",
        "step      42: 41 applied, 1 skipped, 1 aborted; 3.5 steps/s, last 300 ms",
        "values    grad norm 0.1, loss scale 65536, lr 0.001",
        "time      waiting for ranks 10 ns (0 %), reduce 20 ns (0 %), update 30 ns (0 %) of the last step",
        "overlap   75 % (3 B of 4 B) reduced before the last rank ended its backward",
        "early     75 % of the last step's update was made in the backward (1.50 k of 2.00 k elements); 12 chunks accepted, 5 dropped; "
        "memory is short: 2 of 3 buckets have spare places",
        "memory    26.0 MiB of at most 64.0 GiB: gradient 1.00 MiB, overflow 3.00 MiB, staging 4.00 MiB, "
        "weights 5.00 MiB, pool 6.00 MiB, fixed 7.00 MiB",
        "on GPUs   2.00 MiB: ring 2.00 MiB",
        "pushes    1000 admitted, 3 accumulated, 1 warnings; refused: 2 E1001, 1 E1302",
        "checkpoint in /var/lib/pretrain: step 20 saved 1 min 0 s ago, 4.00 MiB in 3.00 s (updates waited 7.00 ms); saving "
        "step 42 for 2.00 s, 25 % of 4.00 MiB (updates have waited 5.00 ms); one more is asked for; the last one failed: "
        "model.safetensors: No space left on device",
        "engine    nccl, generation 3, ready, pid 4711: CUDA 13.0, driver 13.0, NCCL 2.28.9; 2 failed",
        "          reduce-scatter: 2.00 MiB sent, 1.00 MiB received in 40 orders, 8.00 MiB/s",
        "          all-gather: 1.00 MiB sent, 0 B received in 80 orders",
        "slowest   rank 3, 1.50 ms behind the first",
        "finding   slow",
        "finding   zero",
        "last      E1001 duplicate gradient refused: rank 1, step 41, micro-batch 0 (5.00 s ago; zerodctl diagnostics)",
    ]
    (_, hello), (_, command) = seen
    assert hello[4] == 1 and hello[7] != 0 and hello[9].startswith(b"zerodctl ") and hello[1] == hello[2] == 3
    assert command == "status"


def test_status_of_a_new_daemon(path):
    with daemon(path, lambda _: parts(example("status-minimal"))):
        result = zerodctl("status", ZEROD_SOCKET=str(path))
    assert result.returncode == 0
    assert "train: waiting, stage 2, 0 of 1 ranks attached" in result.stdout
    assert "no model declared" in result.stdout and "no diagnostic" in result.stdout
    assert "overlap" not in result.stdout and "early" not in result.stdout
    assert len(result.stdout.splitlines()) <= 12


def test_status_of_several_nodes(path):
    with daemon(path, lambda _: parts(example("status-nodes"))):
        result = zerodctl("--socket", path, "status")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "pretrain: training, stage 2, 1 of 2 ranks of this node attached, 4 ranks in all"
    assert "early     no update is made in the backward; the job has several nodes" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("nodes "))
    assert lines[at:at + 8] == [
        "nodes     gloo engines of generation 3 connected: 3.00 MiB sent, 1.00 MiB received",
        "          reduce-scatter: 2.00 MiB sent, 1.00 MiB received in 40 orders, 8.00 MiB/s",
        "          all-gather: 1.00 MiB sent, 0 B received in 80 orders",
        "          node 0 at 10.0.0.1:7700, ranks 0 to 1: this one",
        "          node 1 at 10.0.0.2:7700, rank 2: not reached, last heard 3.10 s ago: has not been heard for 3.1 s",
        "          node 2 at [fd00::3]:7700, rank 3: not reached yet: not heard of yet",
        "          node 0 waits for nodes 1, 2 to ask for the step",
        "slowest   rank 3, 1.50 ms behind the first",
    ]


def test_status_of_another_node_than_0(path):
    with daemon(path, lambda _: parts(example("status-node-1"))):
        result = zerodctl("--socket", path, "status")
    lines = result.stdout.splitlines()
    assert lines[0] == "pretrain: training, stage 2, 1 of 1 ranks of this node attached, 4 ranks in all"
    at = next(i for i, line in enumerate(lines) if line.startswith("nodes "))
    assert lines[at] == "nodes     gloo engines of generation 3 not connected: 3.00 MiB sent, 1.00 MiB received"
    assert lines[at + 3:at + 7] == [
        "          node 0 at 10.0.0.1:7700, ranks 0 to 1: reached",
        "          node 1 at 10.0.0.2:7700, rank 2: this one",
        "          node 2 at [fd00::3]:7700, rank 3: known to node 0",
        "slowest   rank 3, 1.50 ms behind the first",
    ]


def rows(result):
    assert result.returncode == 0, result.stderr
    return [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]


def test_ranks(path):
    with daemon(path, examples):
        head, *lines = rows(zerodctl("--socket", path, "ranks"))
    assert head[0] == "RANK" and head[-1] == "FOR / FAULT"
    assert lines[0] == ["0", "backward", "500", "1000", "42", "0", "7", "50.0 s", "1.00 s", "-", "-"]
    assert lines[1][-1].startswith("E1001 duplicate gradient refused")
    assert lines[2][-2:] == ["2.00 s", "ranks 1, 3 to ask for the step"]
    assert lines[3] == ["3", "absent", "-", "-", "0", "0", "0", "-", "-", "-", "-"]


def test_params(path):
    with daemon(path, examples):
        head, *lines = rows(zerodctl("--socket", path, "params"))
    assert head == ["ID", "PUSHED-BY", "STEPS", "GRAD-NORM", "DTYPE", "SHAPE", "GROUP", "BUCKET", "OWNERS", "NAME"]
    by_name = {line[-1]: line for line in lines}
    assert by_name["layers.0.w"][1:6] == ["-", "41", "0.25", "bf16", "300x7"]
    assert by_name["layers.0.b"][1] == "1,3"
    assert by_name["frozen"][1] == "frozen" and by_name["frozen"][7] == "-"
    assert r'odd "name" \xff\x01\x0a' in by_name
    assert [line for line in lines if line[5] == "scalar"]


def test_diagnostics(path):
    with daemon(path, examples):
        result = zerodctl("--socket", path, "diagnostics")
    assert result.returncode == 0
    texts = [d["text"].rstrip("\n") for d in json.loads(example("diagnostics"))]
    assert result.stdout == f"refusal 5, 5.00 s ago\n{texts[0]}\n\nwarning 6, 0 ns ago\n{texts[1]}\n"
    with daemon(path.with_name("t"), lambda _: parts("[]")):
        assert zerodctl("--socket", path.with_name("t"), "diagnostics").stdout == "no diagnostic\n"


@pytest.mark.parametrize("command", ["status", "ranks", "params", "diagnostics"])
def test_json_comes_as_it_was_sent(path, command):
    with daemon(path, examples):
        for args in (["--json", "--socket", path, command], ["--socket", path, command, "--json"],
                     [command, f"--socket={path}", "--json"]):
            result = zerodctl(*args)
            assert (result.returncode, result.stdout) == (0, example(command) + "\n")


@pytest.mark.parametrize("command", ["drain", "abort-step", "drop"])
def test_commands_that_change_the_job(path, command):
    with daemon(path, lambda c: parts(json.dumps({"message": f"did {c}"}))) as seen:
        result = zerodctl("--socket", path, command)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"did {command}\n", "")
    assert seen[-1] == ("admin", command)


def test_answers_of_many_parts(path):
    value = [{"filler": "x" * 100, "n": i} for i in range(50000)]
    with daemon(path, lambda _: parts(json.dumps(value), size=60000)):
        result = zerodctl("--socket", path, "--json", "params")
    assert json.loads(result.stdout) == value


# ---- watch -----------------------------------------------------------------------------------------------


def test_watch(path):
    n = 0

    def answer(_):
        nonlocal n
        n += 1
        return parts(example("status")) if n <= 3 else None

    with daemon(path, answer) as seen:
        result = zerodctl("--socket", path, "status", "--watch", "0.05")
    assert result.returncode == os.EX_UNAVAILABLE
    assert "has closed the connection" in result.stderr
    assert result.stdout.count("pretrain: training") == 3
    assert [kind for kind, _ in seen].count("hello") == 4  # connections are not kept between questions


def test_watch_json_is_a_line_each(path):
    n = 0

    def answer(_):
        nonlocal n
        n += 1
        return parts(example("status")) if n <= 2 else None

    with daemon(path, answer):
        result = zerodctl("--socket", path, "--json", "status", "--watch=0.05")
    assert [json.loads(line)["job"] for line in result.stdout.splitlines()] == ["pretrain"] * 2


@pytest.mark.parametrize("args", [["--watch", "x"], ["--watch", "0"], ["--watch", "1", "2"], ["more"], ["--watch="],
                                  ["--watch", "nan"]])
def test_watch_usage(args):
    result = zerodctl("status", *args, ZEROD_SOCKET="/nowhere")
    assert result.returncode == os.EX_USAGE and "--watch" in result.stderr


# ---- errors ----------------------------------------------------------------------------------------------


def test_no_daemon(path):
    result = zerodctl("--socket", path, "status")
    assert result.returncode == os.EX_UNAVAILABLE
    assert result.stderr == f"zerodctl: no daemon on {path}: connect: No such file or directory\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.bind(str(path))
    result = zerodctl("--socket", path, "report")
    assert result.returncode == os.EX_UNAVAILABLE and "Connection refused" in result.stderr


def test_a_socket_of_another_kind(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.bind(str(path))
        s.listen()
        assert zerodctl("--socket", path, "status").returncode == os.EX_UNAVAILABLE


def test_not_allowed(path):
    with daemon(path, examples, greet=lambda: refused(1402, "E1402 not allowed: uid 7")):
        result = zerodctl("--socket", path, "status")
    assert (result.returncode, result.stderr) == (os.EX_NOPERM, "zerodctl: E1402 not allowed: uid 7\n")
    error = json.dumps({"error": "E1402 not allowed: drop needs listen.admin_users"})
    with daemon(path.with_name("t"), lambda _: parts(error, exit_code=os.EX_NOPERM)):
        for flags in ([], ["--json"]):
            result = zerodctl(*flags, "--socket", path.with_name("t"), "drop")
            assert result.returncode == os.EX_NOPERM
            assert result.stderr == "zerodctl: E1402 not allowed: drop needs listen.admin_users\n"
            assert result.stdout == (error + "\n" if flags else "")


def test_not_allowed_by_the_file():
    """A user that may not connect is told who may. Root becomes nobody for this test."""
    become = {"user": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        program = shutil.copy(ZERODCTL, directory)
        path = Path(directory) / "s"
        with daemon(path, examples):
            os.chmod(path, 0)
            result = subprocess.run([program, "--socket", path, "status"], capture_output=True, text=True,
                                    timeout=TIMEOUT, **become)
    assert result.returncode == os.EX_NOPERM, result.stderr
    assert result.stderr == (f"zerodctl: not allowed to connect to {path}: Permission denied; listen.allow_users, "
                             "listen.allow_groups and listen.mode of the job say who may\n")


@pytest.mark.parametrize("packet, code, said", [
    (b"\xff\xff\xff", os.EX_PROTOCOL, "an invalid message"),
    (field(3, b""), os.EX_PROTOCOL, "Done instead of Welcome"),
    (refused(1403, "E1403 bad message"), os.EX_PROTOCOL, "E1403 bad message"),
    (refused(1401, "E1401 over quota"), os.EX_UNAVAILABLE, "E1401 over quota"),
])
def test_daemons_that_do_not_speak_our_language(path, packet, code, said):
    with daemon(path, examples, greet=lambda: packet):
        result = zerodctl("--socket", path, "status")
    assert result.returncode == code and said in result.stderr, result.stderr


def test_daemon_that_goes_away(path):
    with daemon(path, lambda _: None):
        result = zerodctl("--socket", path, "status")
    assert result.returncode == os.EX_UNAVAILABLE and "has closed the connection" in result.stderr
    with daemon(path.with_name("t"), lambda _: parts("{no json")):
        result = zerodctl("--socket", path.with_name("t"), "status")
    assert result.returncode == os.EX_PROTOCOL and "not JSON" in result.stderr


@pytest.mark.parametrize("args", [[], ["nonsense"], ["status", "x"], ["drop", "x"], ["--nonsense"], ["--socket"], ["metrics", "x"],
                                  ["report", "a", "b"], ["--socket", "/" + "x" * 200, "status"], ["status"]])
def test_usage_errors(args):
    result = zerodctl(*args)
    assert result.returncode == os.EX_USAGE, result.stderr
    assert result.stderr.startswith("zerodctl: ") or "Try 'zerodctl --help'" in result.stderr
    assert not result.stdout


def test_help_version_and_what_is_no_command():
    result = zerodctl("--help")
    assert result.returncode == 0 and not result.stderr
    for word in ("status", "ranks", "params", "diagnostics", "drain", "abort-step", "drop", "plan", "explain", "report",
                 "checkpoint", "resize", "metrics"):
        assert re.search(rf"^  {word}\b", result.stdout, re.M), word
    assert zerodctl("status", "--help").stdout == zerodctl("plan", "--help").stdout == result.stdout
    assert re.fullmatch(r"zerodctl \d+\.\d+\.\d+\n", zerodctl("--version").stdout)
    result = zerodctl("top")
    assert result.returncode == os.EX_USAGE and result.stderr.count("\n") == 1


def test_full_disk():
    with open("/dev/full", "w") as full:
        result = subprocess.run([ZERODCTL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == os.EX_IOERR and "No space left" in result.stderr


@pytest.mark.parametrize("typed, meant", [("tpo", "top"), ("stauts", "status"), ("abort-stpe", "abort-step"), ("frobnicate", None)])
def test_commands_that_are_mistyped(typed, meant):
    result = zerodctl(typed)
    assert result.returncode == 64
    assert (f"Did you mean '{meant}'?" in result.stderr) == (meant is not None) == ("mean" in result.stderr)


# ---- report ----------------------------------------------------------------------------------------------


def own_report():
    """Return: the example report with the pids of existing processes."""
    value = json.loads(example("report"))
    value["status"]["pid"] = os.getpid()
    value["ranks"][0]["pid"] = os.getppid()
    value["ranks"][1]["pid"] = 2**22 + 1
    return value


def test_report(path, tmp_path):
    secret = {"ZEROD_TEST_SECRET": "do-not-tell"}
    segment = os.memfd_create("zerod-test-weights")
    os.truncate(segment, 1 << 20)
    mapping = mmap.mmap(segment, 1 << 20)
    mapping[:4096] = b"x" * 4096
    with daemon(path, lambda _: parts(json.dumps(own_report()))):
        result = zerodctl("--socket", path, "report", cwd=tmp_path, **secret)
        assert result.returncode == 0, result.stderr
        named = zerodctl("--socket", path, "report", tmp_path / "mine.json")
        dash = zerodctl("--socket", path, "report", "-")
        as_json = zerodctl("--socket", path, "--json", "report")
        nowhere = zerodctl("--socket", path, "report", tmp_path / "no" / "folder.json")
    mapping.close()
    os.close(segment)
    name = result.stdout.strip()
    assert re.fullmatch(r"zerod-report-pretrain-\d{8}T\d{6}Z\.json", name)
    file = tmp_path / name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "do-not-tell" not in file.read_text()
    assert named.stdout == f"{tmp_path}/mine.json\n"
    assert nowhere.returncode == os.EX_CANTCREAT and "No such file" in nowhere.stderr
    for text in (file.read_text(), (tmp_path / "mine.json").read_text(), dash.stdout, as_json.stdout):
        report = json.loads(text)
        validator("report").validate(report)
        assert report["daemon"] == own_report()
        assert f"Pid:\t{os.getpid()}\n" in report["process"]["status"]["text"]
        segments = {s["name"]: s for s in report["process"]["memfd"]["segments"]}
        assert segments["zerod-test-weights"]["size_bytes"] == 1 << 20
        assert segments["zerod-test-weights"]["resident_bytes"] >= 4096
        assert [p["pid"] for p in report["rank_processes"]][:2] == [os.getppid(), 2**22 + 1]
        assert "No such file" in report["rank_processes"][1]["status"]["error"]
        assert "MemTotal" in report["machine"]["meminfo"]["text"]


def test_report_name_stays_in_the_folder(path, tmp_path):
    value = own_report()
    value["status"]["job"] = "../evil"
    with daemon(path, lambda _: parts(json.dumps(value))):
        result = zerodctl("--socket", path, "report", cwd=tmp_path)
    assert re.fullmatch(r"zerod-report-job-\d{8}T\d{6}Z\.json\n", result.stdout)


# ---- plan ------------------------------------------------------------------------------------------------


def plan(*args):
    result = zerodctl("plan", *args, "--json")
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    validator("plan").validate(value)
    return value


# The ZeRO paper's Table 1: ranks, then stages 1, 2, 3 for 7.5e9, 128e9 and 1e12 parameters.
TABLE_1 = {
    1: [120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000],
    4: [52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000],
    16: [35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000],
    64: [31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250],
    256: [30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5],
    1024: [30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6],
}


@pytest.mark.parametrize("ranks", TABLE_1)
def test_table_1_of_the_zero_paper(ranks):
    for i, (params, stage) in enumerate((p, s) for p in ("7.5e9", "128e9", "1e12") for s in (1, 2, 3)):
        gb = plan("--params", params, "--ranks", ranks, "--stage", stage)["model_states_gb"]
        p = float(params)
        exact = {1: 4 * p + 12 * p / ranks, 2: 2 * p + 14 * p / ranks, 3: 16 * p / ranks}[stage] / 1e9
        assert gb == pytest.approx(exact, rel=1e-12)
        printed = TABLE_1[ranks][i]
        # The paper rounds the first model and truncates the others, to the digits that it prints.
        digits = len(str(printed).partition(".")[2])
        if params == "7.5e9":
            assert abs(gb - printed) <= 0.5 * 10**-digits + 1e-9
        else:
            assert int(gb * 10**digits) / 10**digits == printed


def test_plan_bytes():
    value = plan("--params", "64e6", "--ranks", 4, "--stage", 1)
    elems, classes = 64_000_000, value["bytes_by_class"]
    assert classes["state"] == pytest.approx(2 * 4 * elems, rel=0.02)       # fp32 weights are also the master weights
    assert classes["gradient"] == pytest.approx(4 * elems, rel=0.02)
    assert classes["weights"] == pytest.approx(4 * elems, rel=0.02)
    assert classes["overflow"] == pytest.approx(4 * 4 * elems, rel=0.02)
    assert classes["pool"] == classes["staging"] == 0
    assert value["total_bytes"] == sum(classes.values())
    assert value["needed_bytes"] == value["total_bytes"] - classes["overflow"]
    bf16 = plan("--params", "64e6", "--ranks", 4, "--stage", 1, "--dtype", "bf16")["bytes_by_class"]
    assert bf16["state"] == pytest.approx(3 * 4 * elems, rel=0.02)
    assert bf16["weights"] == pytest.approx(2 * elems, rel=0.02)
    assert bf16["overflow"] == pytest.approx(4 * 2 * elems, rel=0.02)
    mixed = plan("--params", "64e6", "--ranks", 4, "--stage", 1, "--dtype", "bf16", "--grad-dtype", "fp32")
    assert mixed["bytes_by_class"]["overflow"] == classes["overflow"]


def test_plan_of_models_whose_tables_would_not_fit():
    """Models too large for tables are extrapolated from smaller ones, without a step."""
    per_param = []
    for params in (1e9, 4e9, 16e9, 64e9, 256e9, 1e12):
        value = plan("--params", params, "--ranks", 64, "--stage", 3)
        per_param.append(value["bytes_by_class"]["state"] / params)
        assert value["bytes_by_class"]["pool"] <= 64 * 4 * 1_000_000_000 + 65536
    assert per_param == pytest.approx([per_param[0]] * 6, rel=1e-3)


def test_plan_with_a_configuration(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("job: p\nlisten: {socket: /run/p.sock}\nworld: {size: 2}\n"
                    "zero_optimization: {stage: 1, reduce_bucket_size: 1000}\noptimizer: {type: SGD}\n")
    value = plan("--config", file, "--params", 10_500)
    assert (value["ranks"], value["stage"], value["n_buckets"], value["bucket_elems"]) == (2, 1, 11, 1000)
    assert value["bytes_by_class"]["state"] < 4096 + 1   # plain SGD with fp32 weights has no state
    assert plan("--config", file, "--params", 10_500, "--stage", 3, "--ranks", 8)["ranks"] == 8
    file.write_text("world: {size: 0}\n")
    result = zerodctl("plan", "--config", file, "--params", 1)
    assert result.returncode == os.EX_CONFIG and "E1601" in result.stderr


def test_plan_of_models_on_gpus(tmp_path):
    """
    With models on GPUs the ring has room for all gradients of a micro-batch, unless the file asks for the minimum, and each
    parameter has a spare place for its fp32 state and its bf16 weight.
    """
    host, gpus = (plan("--params", "64e6", "--ranks", 2, "--dtype", "bf16", *more) for more in ((), ("--offload",)))
    assert (host["bucket_elems"], host["offload"], gpus["bucket_elems"], gpus["offload"]) == (500_000, False, 50_000_000, True)
    assert host["bytes_by_class"]["ring"] == pytest.approx(2 * 5 * 2 * 500_000, rel=0.02)
    assert gpus["bytes_by_class"]["ring"] == pytest.approx(2 * 2 * 64e6, rel=0.02)
    assert gpus["bytes_by_class"]["state"] - host["bytes_by_class"]["state"] == pytest.approx(14 * 64e6, rel=0.02)
    others = {"gradient", "overflow", "staging", "weights", "pool"}
    assert all(gpus["bytes_by_class"][c] == pytest.approx(host["bytes_by_class"][c], rel=0.02) for c in others)
    file = tmp_path / "job.yaml"
    file.write_text("world: {size: 2}\nzero_optimization: {overlap_comm: false, reduce_bucket_size: 1000000}\n")
    little = plan("--config", file, "--params", "64e6", "--dtype", "bf16", "--offload")
    assert little["bytes_by_class"]["ring"] == pytest.approx(2 * 2 * 2 * 1_000_000, rel=0.02)
    assert " copied from GPUs,\n" in zerodctl("plan", "--params", 1, "--ranks", 1, "--offload").stdout
    file.write_text("world: {size: 1}\ndevice: cuda\ncollective: nccl\n")
    result = zerodctl("plan", "--config", file, "--params", 1, "--offload")
    assert result.returncode == os.EX_USAGE and "device: cpu" in result.stderr


def test_plan_for_people():
    result = zerodctl("plan", "--params", "7.5e9", "--ranks", 64, "--stage", 2)
    assert result.returncode == 0
    assert "model_states_gb" in result.stdout and "bytes_by_class" in result.stdout
    marked = [line for line in result.stdout.splitlines() if line.startswith("*")]
    assert len(marked) == 1 and re.match(r"\* stage 2 +16\.6406 ", marked[0])
    value = plan("--params", "7.5e9", "--ranks", 64, "--stage", 2)
    for word, n_bytes in value["bytes_by_class"].items():
        assert re.search(rf"^  {word} +{n_bytes} ", result.stdout, re.M)


def test_plan_of_muon(tmp_path):
    """
    Matrices have no exp_avg_sq. The seconds are measured on this machine, and are at least those of the largest matrix.
    """
    file, args = tmp_path / "job.yaml", ("--params", "100k", "--matrices", "64x512x2,512x64")
    file.write_text("listen: {socket: /run/p.sock}\nworld: {size: 2}\nthreads: 8\noptimizer: {type: Muon}\n")
    value, muon = plan("--config", file, "--params", "100k"), plan("--config", file, *args)
    assert value["bytes_by_class"]["state"] - muon["bytes_by_class"]["state"] == pytest.approx(3 * 4 * 32768, abs=16384)
    scratch = 3 * (4 * (2 * 32768 + 2 * 4096) + (32 << 20))
    assert muon["bytes_by_class"]["fixed"] - value["bytes_by_class"]["fixed"] == pytest.approx(scratch, rel=0.01)
    found = muon["muon"]
    assert (found["n_matrices"], found["n_elems"], found["threads"]) == (3, 3 * 32768, 8) and "muon" not in value
    assert found["flop"] == 3 * 5 * (3 * 64 * 64 * 512 + 64**3)
    assert found["seconds"] == pytest.approx(found["flop"] / 3 / found["flops_per_second"])
    shown = zerodctl("plan", "--config", file, *args).stdout
    assert re.search(r"muon: [\d.]+ Gflop for each step, for 3 matrices of 0.0983 million elements\nabout [\d.e-]+ s on 8 "
                     r"threads of [\d.]+ Gflop/s each, as just measured", shown)
    for node, n_matrices in enumerate((2, 1)):  # three buckets
        file.write_text(f"listen: {{socket: /run/p.sock}}\noptimizer: {{type: Muon}}\n"
                        "collective: gloo\nzero_optimization: {reduce_bucket_size: 32768}\n"
                        f"world: {{size: 2, node: {node}, key_file: /k, nodes: [{{address: 'a:1', ranks: 1}}, "
                        "{address: 'b:1', ranks: 1}]}\n")
        assert plan("--config", file, *args)["muon"]["n_matrices"] == n_matrices
    for wrong, text in (["--params", "1k"], "more than the 1000 of --params"), (["--matrices", "8x"], "'8x' is not a list"):
        result = zerodctl("plan", "--config", file, *args, *wrong)
        assert result.returncode == os.EX_USAGE and text in result.stderr
    result = zerodctl("plan", "--ranks", 2, *args)
    assert result.returncode == os.EX_USAGE and "is for optimizer: {type: Muon}" in result.stderr


@pytest.mark.parametrize("text, params", [("7B", 7 * 10**9), ("1.1b", 1_100_000_000), ("350M", 350_000_000), ("8k", 8000)])
def test_plan_for_the_names_of_models(text, params):
    assert plan("--params", text, "--ranks", 8, "--stage", 2) == plan("--params", params, "--ranks", 8, "--stage", 2)


@pytest.mark.parametrize("args", [
    ["--params", "7X", "--ranks", 2], ["--params", "7BB", "--ranks", 2], ["--params", "B", "--ranks", 2],
    [], ["--params", "1e6"], ["--ranks", 2], ["--params", "x", "--ranks", 2], ["--params", "1.5", "--ranks", 2],
    ["--params", "0", "--ranks", 2], ["--params", "1e16", "--ranks", 2], ["--params", "nan", "--ranks", 2],
    ["--params", "1e6", "--ranks", 0], ["--params", "1e6", "--ranks", 1025], ["--params", "1e6", "--ranks", 2, "more"],
    ["--params", "1e6", "--ranks", 2, "--stage", 0], ["--params", "1e6", "--ranks", 2, "--stage", 4],
    ["--params", "1e6", "--ranks", 2, "--dtype", "fp8"], ["--nonsense"],
])
def test_plan_usage(args):
    result = zerodctl("plan", *args)
    assert result.returncode == os.EX_USAGE and result.stderr and not result.stdout


# ---- a real daemon ---------------------------------------------------------------------------------------


def fetch(path, *command):
    """Return: the answer, which must fit its schema."""
    result = zerodctl("--json", "--socket", path, *command)
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    validator(command[0]).validate(value)
    return value


@contextmanager
def real_daemon(directory, size):
    """Starts a daemon, waits until it listens, and yields its process and socket. Stops it afterwards."""
    path = directory / "z"
    config = directory / "job.yaml"
    config.write_text(f"job: live\nlisten: {{socket: {path}}}\nworld: {{size: {size}}}\n"
                      "zero_optimization: {stage: 2, reduce_bucket_size: 60000}\n")
    with subprocess.Popen([BUILD / "daemon" / "zerod", "--config", config], stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + TIMEOUT
            while not path.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            yield process, path
        finally:
            process.kill()


def test_real_daemon_without_trainers(tmp_path):
    with real_daemon(tmp_path, 3) as (process, path):
        status = fetch(path, "status")
        assert (status["job"], status["world_size"], status["n_attached"], status["pid"]) == ("live", 3, 0, process.pid)
        assert not status["formed"] and status["last_diagnostic"] is None
        assert [rank["rank"] for rank in fetch(path, "ranks")] == [0, 1, 2]
        assert fetch(path, "params") == fetch(path, "diagnostics") == []
        assert fetch(path, "report", "-")["daemon"]["status"]["job"] == "live"
        result = zerodctl("--socket", path, "abort-step")
        assert result.returncode == os.EX_UNAVAILABLE and result.stderr.startswith("zerodctl: ") and not result.stdout
        assert zerodctl("--socket", path, "drop").returncode == 0
        assert zerodctl("--socket", path, "drain").returncode == 0
        assert process.wait(TIMEOUT) == 0
    assert zerodctl("--socket", path, "status").returncode == os.EX_UNAVAILABLE


def test_real_daemon_in_training(tmp_path):
    """While two ranks train, the answers fit their schemas, agree with each other, and advance."""
    zerodrun = BUILD / "client" / "run" / "zerodrun"
    trainer = BUILD / "tests/example/zerod-example"
    small = ["--layers", "2", "--width", "32", "--heads", "2", "--batch", "2", "--steps", "1000000"]
    provoke = ["--provoke-duplicate", "2:blocks.0.norm1.bias:1"]
    with real_daemon(tmp_path, 2) as (process, path):
        with subprocess.Popen([zerodrun, "-n", "2", "-q", "--socket", path, "--", trainer, *small, *provoke],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            try:
                deadline = time.monotonic() + TIMEOUT
                while (before := fetch(path, "status"))["step"] < 5:
                    assert run.poll() is None, run.stderr.read()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                ranks, params, diagnostics = (fetch(path, c) for c in ("ranks", "params", "diagnostics"))
                report = fetch(path, "report", "-")
                after = fetch(path, "status")
                aborted = zerodctl("--socket", path, "abort-step")
                tables = [zerodctl("--socket", path, c) for c in ("status", "ranks", "params", "diagnostics")]
            finally:
                run.kill()
    assert before["formed"] and before["n_attached"] == 2 and before["n_params"] == len(params)
    assert after["step"] > before["step"] and after["n_applied"] == after["step"] > 0
    assert after["counters"]["n_pushes_admitted"] > before["counters"]["n_pushes_admitted"]
    assert after["steps_per_s"] > 0 and after["grad_norm"] > 0 and after["overlap"]["micro_batch_bytes"] > 0
    assert all(after["time"][phase]["total_ns"] > 0 for phase in ("wait", "reduce", "update"))
    for word, class_ in after["memory"].items():
        if word not in ("overflow", "total"):
            assert class_["held_bytes"] <= 1.02 * class_["planned_bytes"] + 2**24, word
    assert [rank["rank"] for rank in ranks] == [0, 1] and all(rank["attached"] for rank in ranks)
    behind = sum(rank["behind_total_ns"] for rank in ranks)  # one of two ranks is behind as long as the other waits
    assert before["time"]["wait"]["total_ns"] <= behind <= after["time"]["wait"]["total_ns"]
    assert {param["name"] for param in params} >= {"blocks.0.norm1.bias"}
    assert all(param["n_steps"] >= 5 and param["grad_norm"] >= 0 for param in params)
    assert any(set(param["owners"]) == {0} for param in params) and any(1 in param["owners"] for param in params)
    duplicate, = [d for d in diagnostics if d["code"] == "E1001"]
    assert (duplicate["rank"], duplicate["step"], duplicate["params"]) == (1, 2, ["blocks.0.norm1.bias"])
    assert duplicate["first"]["sequence"] != duplicate["second"]["sequence"]
    assert {"code": "E1001", "n": 1} in after["refused"]
    assert report["process"]["pid"] == process.pid and len(report["rank_processes"]) == 2
    names = [segment["name"] for segment in report["process"]["memfd"]["segments"]]
    assert any("weights" in name for name in names), names
    assert aborted.returncode in (0, os.EX_UNAVAILABLE) and (aborted.stdout or aborted.stderr)
    assert all(table.returncode == 0 and table.stdout for table in tables)
    assert "E1001 duplicate gradient refused: rank 1, step 2" in tables[3].stdout


def test_man_page_names_what_help_names():
    page = (ROOT / "man" / "zerodctl.1").read_text().replace("\\-", "-")
    words = re.findall(r"--[a-z-]+", zerodctl("--help").stdout)
    assert len(set(words)) > 8
    for word in set(words):
        assert word in page, word
    for name in (schema.stem for schema in SCHEMAS.glob("*.json")):
        assert re.search(rf"^\.BR? {name}\b", page, re.M), name


def test_explain_without_torch(build, tmp_path):
    """python -m zerod is zerodctl. explain reads a log without torch."""
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(f'{__name__} is imported')\n")
    log = ROOT / "tests/explain/ready-once-reentrant.txt"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'client/python'}",
                        "PATH": f"{build.folder / 'client/ctl'}:{os.environ['PATH']}"}
    for words in (["-m", "zerod"], ["-mzerod"], ["-X", "dev", "-m", "zerod"]):
        ran = subprocess.run([sys.executable, *words, "explain", log], env=env, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and "use_reentrant" in ran.stdout, ran.stderr


def test_explain_ends(build, tmp_path):
    """explain ends even with a FIFO without a writer and with an endless device. It can read a pipe."""
    zerodctl = build.folder / "client/ctl/zerodctl"
    os.mkfifo(tmp_path / "fifo")
    for name, code in ((tmp_path / "fifo", os.EX_DATAERR), ("/dev/zero", os.EX_NOINPUT)):
        assert subprocess.run([zerodctl, "explain", name], capture_output=True, timeout=60).returncode == code
    said = f"{zerodctl} explain <(echo 'RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.')"
    assert "E1005" in subprocess.run(["bash", "-c", said], capture_output=True, text=True, timeout=60).stdout
