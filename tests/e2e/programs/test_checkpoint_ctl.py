# SPDX-License-Identifier: Apache-2.0
"""zerodctl checkpoint, with and without a daemon, on correct and on damaged checkpoints."""

import ctypes
import json
import os
import random
import re
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from tiers import full
from conftest import Daemon, environment, wait_for
from test_zerodctl import validator

SMALL = ["--layers", "2", "--width", "128", "--heads", "4", "--batch", "1", "--run-id", "r"]
FILES = ("model.safetensors", "optimizer.safetensors", "ranks.safetensors")
MIB = 1 << 20
NOBODY = 65534


def train(daemon, n_steps):
    """Trains two ranks until this many steps are committed."""
    program = daemon.build.path("tests/example/zerod-example")
    ranks = [daemon.spawn(program, *SMALL, "--steps", n_steps, rank=r) for r in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err() + daemon.log()


@pytest.fixture(scope="module")
def job(build, tmp_path_factory):
    """A daemon that has written the checkpoints of steps 2 and 3 into daemon.dir; its ranks have left."""
    folder = tmp_path_factory.mktemp("job")
    daemon = Daemon(build, folder, {"checkpoint": {"dir": str(folder / "checkpoints")}})
    daemon.dir = folder / "checkpoints"
    try:
        assert daemon.ctl("checkpoint", "list").stdout == f"no checkpoint in {daemon.dir}\n"
        assert daemon.json("checkpoint", "list") == {"schema_version": 1, "dir": str(daemon.dir), "checkpoints": []}
        for n_steps in (2, 3):
            train(daemon, n_steps)
            assert daemon.ctl("checkpoint", "save").stdout == f"{daemon.dir}/step-0000000{n_steps}\n"
        yield daemon
        daemon.stop()
    finally:
        daemon.kill()


@pytest.fixture
def copy(job, tmp_path):
    """A copy of the checkpoints, to be damaged."""
    return shutil.copytree(job.dir, tmp_path / "copy")


@pytest.fixture
def ctl(build):
    def run(*args, **more):
        return subprocess.run([build.path("client/ctl/zerodctl"), *map(str, args)], capture_output=True, text=True,
                              timeout=60, env=environment(), **more)

    return run


@pytest.fixture
def public(build):
    """A folder that everybody may enter, with a copy of zerodctl."""
    with tempfile.TemporaryDirectory(prefix="zerod-") as folder:
        os.chmod(folder, 0o755)
        shutil.copy(build.path("client/ctl/zerodctl"), folder)
        yield Path(folder)


def as_nobody(public, *args):
    become = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    return subprocess.run([public / "zerodctl", *map(str, args)], capture_output=True, text=True, timeout=60,
                          env=environment(), **become)


def check(kind, value):
    """Checks the value against docs/schema/checkpoint.json. Return: value."""
    whole = validator("checkpoint")
    whole.validate(value)
    whole.evolve(schema={"$ref": f"checkpoint.json#/$defs/{kind}"}).validate(value)
    return value


def answer(kind, result, code=0):
    assert result.returncode == code, result.stderr
    return check(kind, json.loads(result.stdout))


def flip(file, *places, bit=1):
    with open(file, "r+b") as f:
        for at in places:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ bit]))


def n_bytes(checkpoint):
    return sum((checkpoint / name).stat().st_size for name in FILES)


# ---- list ------------------------------------------------------------------------------------------------


def test_list(job, copy, ctl):
    told = job.ctl("checkpoint", "list").stdout
    assert ctl("checkpoint", "list", copy).stdout.splitlines()[0] == told.splitlines()[0]
    head, *rows = [re.split(r"\s{2,}", line.strip()) for line in told.splitlines()]
    assert head == ["STEP", "WHOLE", "RANKS", "SIZE", "WRITTEN"]
    assert [row[:3] for row in rows] == [["3", "yes", "2"], ["2", "yes", "2"]]
    for row in rows:
        assert re.fullmatch(r"[\d.]+ MiB", row[3]) and re.fullmatch(r"[\d.]+ (s|min \d+ s) ago", row[4])
    value = answer("list", ctl("--json", "checkpoint", "list", copy))
    assert value["dir"] == str(copy)
    assert [(c["step"], c["path"], c["whole"], c["why"], c["world_size"], c["bytes"]) for c in value["checkpoints"]] == [
        (step, f"{copy}/step-0000000{step}", True, None, 2, n_bytes(copy / f"step-0000000{step}")) for step in (3, 2)]
    assert all(time.time() - 3600 < c["written_s"] <= time.time() + 1 for c in value["checkpoints"])


def test_list_says_why_one_is_not_whole(copy, ctl):
    os.utime(copy / "step-00000003" / "zerod.json", (0, 86400))
    shutil.copytree(copy / "step-00000002", copy / "step-00000007")
    os.remove(copy / "step-00000002" / "optimizer.safetensors")
    (copy / "step-00000005").mkdir()
    (copy / ".step-00000009.writing").mkdir()
    (copy / "step-6").mkdir()
    rows = [re.split(r"\s{2,}", line.strip()) for line in ctl("checkpoint", "list", copy).stdout.splitlines()[1:]]
    assert rows[0] == ["7", "zerod.json is of step 2", "-", "-", "-"]
    assert rows[1] == ["5", "zerod.json: No such file or directory", "-", "-", "-"]
    assert rows[2][:3] == ["3", "yes", "2"] and rows[2][4].startswith("1970-01-0")
    assert rows[3] == ["2", "optimizer.safetensors: No such file or directory", "-", "-", "-"]
    assert len(rows) == 4
    value = answer("list", ctl("checkpoint", "list", copy, "--json"))
    assert [c["whole"] for c in value["checkpoints"]] == [False, False, True, False]
    assert value["checkpoints"][1]["bytes"] is None


# ---- show ------------------------------------------------------------------------------------------------


def test_show(job, copy, ctl):
    text = job.ctl("checkpoint", "show").stdout
    described = json.loads((job.dir / "step-00000003" / "zerod.json").read_text())
    lines = text.splitlines()
    assert lines[:6] == [f"{job.dir}/step-00000003", "job       test, run r", "step      3: 3 applied",
                         "ranks     2 on 1 node, stage 1", "optimizer AdamW", "scale     1, constant"]
    assert re.fullmatch(rf"written   by zerod {re.escape(described['zerod'])}, .* ago", lines[6])
    for i, file in enumerate(described["files"]):
        assert lines[7 + i].startswith(f"{'' if i else 'files':<9} {file['name']}, ")
        assert f"({file['bytes']} bytes), xxh128 {file['xxh128']}" in lines[7 + i]
    assert text.endswith(described["configuration"].rstrip("\n") + "\n") and "reduce_bucket_size: 2000" in text
    value = answer("show", ctl("--json", "checkpoint", "show", f"{copy}/step-00000002/"))
    assert (value["path"], value["step"], value["world_size"]) == (f"{copy}/step-00000002", 2, 2)
    assert [file["name"] for file in value["files"]] == list(FILES)
    assert (value["job"], value["run"], value["stage"], value["loss_scale"]["scale"]) == ("test", "r", 1, 1)
    assert value["configuration"] == described["configuration"]


def test_show_takes_the_newest_whole_one(zerod, copy):
    daemon = zerod({"checkpoint": {"dir": str(copy)}})
    os.truncate(copy / "step-00000003" / "ranks.safetensors", 8)
    assert check("show", daemon.json("checkpoint", "show"))["step"] == 2
    shutil.rmtree(copy / "step-00000002")
    result = daemon.ctl("checkpoint", "show", check=False)
    assert (result.returncode, result.stdout) == (os.EX_NOINPUT, "")
    assert f"{copy} has no whole checkpoint" in result.stderr
    result = daemon.ctl("checkpoint", "show", copy / "step-00000003", check=False)
    assert result.returncode == os.EX_DATAERR
    assert re.search(rf"{copy}/step-00000003: ranks.safetensors has 8 bytes instead of \d+\n", result.stderr)


# ---- verify ----------------------------------------------------------------------------------------------


def test_verify(job, copy, ctl):
    for said in (job.ctl("checkpoint", "verify"), ctl("checkpoint", "verify", job.dir)):
        assert (said.returncode, said.stderr) == (0, "")
        assert re.fullmatch("".join(rf"{job.dir}/step-0000000{step}: whole and right, [\d.]+ MiB\n" for step in (3, 2)),
                            said.stdout)
    value = answer("verify", ctl("--json", "checkpoint", "verify", copy / "step-00000002"))
    assert value == {"schema_version": 1, "right": True, "checkpoints": [
        {"path": f"{copy}/step-00000002", "right": True, "why": None, "bytes": n_bytes(copy / "step-00000002"),
         "differs": []}]}


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte(copy, ctl, name):
    file = copy / "step-00000003" / name
    size = file.stat().st_size
    flip(file, size - 1)
    block = (size - 1) // MIB
    where = f"{copy}/step-00000003: {name}: MiB {block} differs, bytes {block * MIB} to {size - 1}\n"
    result = ctl("checkpoint", "verify", copy)
    assert result.returncode == os.EX_DATAERR
    assert result.stdout.startswith(f"{where}{copy}/step-00000002: whole and right") and result.stdout.count("\n") == 2
    assert result.stderr.startswith("zerodctl: 1 of 2 checkpoints is not as written, and zerod will not load it (E1702): restore")
    assert ctl("checkpoint", "verify", copy / "step-00000002").returncode == 0
    value = answer("verify", ctl("--json", "checkpoint", "verify", file.parent), os.EX_DATAERR)
    assert not value["right"] and value["checkpoints"][0]["why"] is None
    assert value["checkpoints"][0]["differs"] == [{"file": name, "first_byte": block * MIB, "last_byte": size - 1}]


def test_a_flipped_byte_in_the_description(copy, ctl):
    file = copy / "step-00000003" / "zerod.json"
    flip(file, file.stat().st_size // 2)
    result = ctl("checkpoint", "verify", copy)
    assert result.returncode == os.EX_DATAERR
    assert f"{copy}/step-00000003: cannot be loaded (E1702): zerod.json: its bytes are not those that were written\n" in result.stdout
    value = answer("verify", ctl("--json", "checkpoint", "verify", copy), os.EX_DATAERR)
    assert [c["right"] for c in value["checkpoints"]] == [False, True]


@pytest.mark.parametrize("n", [25, *full(1000)])
def test_any_flipped_bit(copy, ctl, n):
    """verify detects any single flipped bit and names the file. Long and short files have equally many tests."""
    rng, checkpoint = random.Random(n), copy / "step-00000003"
    for _ in range(n):
        file = checkpoint / rng.choice([*FILES, "zerod.json"])
        at, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        flip(file, at, bit=bit)
        result = ctl("checkpoint", "verify", checkpoint)
        assert result.returncode == os.EX_DATAERR and f": {file.name}: " in result.stdout, (file.name, at, bit, result.stdout)
        flip(file, at, bit=bit)
    assert ctl("checkpoint", "verify", checkpoint).returncode == 0


def test_several_places(copy, ctl):
    """verify reports adjacent damaged MiB in one line."""
    file = copy / "step-00000003" / "optimizer.safetensors"
    assert file.stat().st_size > 3 * MIB
    flip(file, 5, MIB - 1, MIB, file.stat().st_size - 1)
    flip(copy / "step-00000003" / "model.safetensors", 0)
    lines = ctl("checkpoint", "verify", copy / "step-00000003").stdout.splitlines()
    last = (file.stat().st_size - 1) // MIB
    assert lines == [
        f"{copy}/step-00000003: model.safetensors: MiB 0 differs, bytes 0 to {MIB - 1}",
        f"{copy}/step-00000003: optimizer.safetensors: MiB 0 to 1 differ, bytes 0 to {2 * MIB - 1}",
        f"{copy}/step-00000003: optimizer.safetensors: MiB {last} differs, bytes {last * MIB} to "
        f"{file.stat().st_size - 1}"]


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def link(file):
    file.rename(file.with_suffix(".kept"))
    file.symlink_to(file.with_suffix(".kept").name)


def pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage, why", [
    (cut, r"{name} has \d+ bytes instead of \d+"), (link, "{name} is a link, or not what it should be: .*"),
    (pipe, "{name} is a link, or not what it should be: .*"), (os.remove, "{name}: No such file or directory"),
])
@pytest.mark.parametrize("name", (*FILES, "zerod.json"))
def test_files_that_are_not_as_written(copy, ctl, name, damage, why):
    damage(copy / "step-00000003" / name)
    expected = why.format(name=re.escape(name))
    if damage is cut and name == "zerod.json":
        expected = "zerod.json: its bytes are not those that were written"
    result = ctl("checkpoint", "verify", copy / "step-00000003")
    assert result.returncode == os.EX_DATAERR
    assert re.fullmatch(rf"{copy}/step-00000003: cannot be loaded \(E1702\): {expected}\n", result.stdout)
    value = answer("verify", ctl("--json", "checkpoint", "verify", copy), os.EX_DATAERR)
    assert re.fullmatch(expected, value["checkpoints"][0]["why"]) and value["checkpoints"][1]["right"]
    assert answer("list", ctl("--json", "checkpoint", "list", copy))["checkpoints"][0]["why"] == \
        value["checkpoints"][0]["why"]
    assert ctl("checkpoint", "show", copy / "step-00000003").returncode == os.EX_DATAERR


def test_a_link_in_place_of_the_folder(copy, ctl):
    (copy / "step-00000003").rename(copy / "elsewhere")
    (copy / "step-00000003").symlink_to("elsewhere")
    for path in (copy, copy / "step-00000003", f"{copy}/step-00000003/"):
        result = ctl("checkpoint", "verify", path)
        assert result.returncode == os.EX_DATAERR and "step-00000003 is a link" in result.stdout
    assert ctl("checkpoint", "show", f"{copy}/step-00000003/").returncode == os.EX_NOINPUT
    assert ctl("checkpoint", "verify", copy / "elsewhere").returncode == 0  # any name is allowed


def test_nothing_to_verify(tmp_path, ctl):
    result = ctl("checkpoint", "verify", tmp_path)
    assert (result.returncode, result.stdout) == (os.EX_NOINPUT, "")
    assert result.stderr.startswith(f"zerodctl: {tmp_path} has no checkpoint")
    missing = tmp_path / "missing"
    for command in ("list", "verify"):
        result = ctl("checkpoint", command, missing)
        assert result.returncode == os.EX_NOINPUT
        assert result.stderr == f"zerodctl: {missing} cannot be read: No such file or directory\n"
    result = ctl("checkpoint", "verify", missing / "step-00000001")
    assert result.returncode == os.EX_NOINPUT
    assert result.stderr == f"zerodctl: {missing}/step-00000001: No such file or directory\n"
    assert ctl("checkpoint", "show", missing).stderr == f"zerodctl: {missing}: No such file or directory\n"


def test_folders_that_cannot_be_read(job, public):
    copy = shutil.copytree(job.dir, public / "copy")
    for path in (copy, copy / "step-00000003"):
        path.chmod(0o755)
    for path in [*copy.glob("*/*"), copy / "step-00000002"]:
        path.chmod(0 if path.is_dir() else 0o644)
    result = as_nobody(public, "checkpoint", "verify", copy)
    assert result.returncode == os.EX_DATAERR
    assert re.search(r"step-00000003: whole and right", result.stdout)
    assert result.stdout.endswith("cannot be loaded (E1702): step-00000002: Permission denied\n")
    (copy / "step-00000002").chmod(0o755)
    copy.chmod(0)
    try:
        for command in ("list", "verify"):
            result = as_nobody(public, "checkpoint", command, copy)
            assert (result.returncode, result.stdout) == (os.EX_NOINPUT, "")
            assert result.stderr == (f"zerodctl: {copy} cannot be read: Permission denied; ask as root, or as the daemon's "
                                     "user\n")
        assert as_nobody(public, "checkpoint", "show", copy / "step-00000003").returncode == os.EX_NOINPUT
    finally:
        copy.chmod(0o755)


def test_progress_on_a_terminal(copy, ctl, build):
    ours, its = os.openpty()
    try:
        result = subprocess.run([build.path("client/ctl/zerodctl"), "checkpoint", "verify", copy], stdout=subprocess.PIPE,
                                stderr=its, timeout=60, env=environment())
        assert result.returncode == 0
        said = ""
        while select.select([ours], [], [], 1)[0]:  # one read may return only a part
            said += os.read(ours, 65536).decode()
        assert re.search(rf"{copy}/step-00000003: \d+ % of [\d.]+ MiB\r\033\[K", said), said
    finally:
        os.close(ours)
        os.close(its)


# Errors that loading detects although all bytes have the checksums of zerod.json: each function rewrites a checkpoint,
# and reseals it.


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3():
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_64bits.restype, library.XXH3_128bits.restype = ctypes.c_uint64, Hash128
    for call in (library.XXH3_64bits, library.XXH3_128bits):
        call.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return library


def hash128(data):
    value = xxh3().XXH3_128bits(data, len(data))
    return f"{value.high:016x}{value.low:016x}"


def reseal(checkpoint, change=lambda described: None):
    """Writes zerod.json as if the files had been written with their present contents."""
    path = checkpoint / "zerod.json"
    described = json.loads(path.read_text())
    described.pop("xxh128_of_the_above")
    for file in described["files"]:
        data = (checkpoint / file["name"]).read_bytes()
        blocks = [data[at:at + MIB] for at in range(0, len(data), MIB)]
        file |= {"bytes": len(data), "xxh128": hash128(data),
                 "xxh64_of_each_mib": "".join(f"{xxh3().XXH3_64bits(b, len(b)):016x}" for b in blocks)}
    change(described)
    text = json.dumps(described, separators=(",", ":"))[:-1]
    path.write_text(f'{text},"xxh128_of_the_above":"{hash128(text.encode())}"}}\n')


def rewrite(checkpoint, name, change):
    """Rewrites a file. change(header, bytes of the tensors) returns the new header and bytes."""
    data = (checkpoint / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = change(json.loads(data[8:8 + length]), data[8 + length:])
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    text += b" " * (-len(text) % 64)
    (checkpoint / name).write_bytes(len(text).to_bytes(8, "little") + text + rest)


def edit(name, change):
    def damage(checkpoint):
        def edited(header, rest):
            return change(header) or header, rest

        rewrite(checkpoint, name, edited)
        reseal(checkpoint)
    return damage


def largest(header):
    return max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])


def drop(kind):
    """Return: a function that removes the last tensor of that kind."""
    def damage(checkpoint):
        def dropped(header, rest):
            gone = max((k for k in header if k.endswith(kind)), key=lambda k: header[k]["data_offsets"])
            begin, end = header.pop(gone)["data_offsets"]
            for tensor in header.values():
                if tensor.get("data_offsets", [0])[0] >= end:
                    tensor["data_offsets"] = [at - (end - begin) for at in tensor["data_offsets"]]
            return header, rest[:begin] + rest[end:]

        rewrite(checkpoint, "optimizer.safetensors" if kind.startswith(".") else "model.safetensors", dropped)
        reseal(checkpoint)
    return damage


def twice(checkpoint):
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "model-node1.safetensors")
    reseal(checkpoint)
    reseal(checkpoint, lambda d: d["files"].append(d["files"][0] | {"name": "model-node1.safetensors"}))


def describe(change):
    return lambda checkpoint: reseal(checkpoint, change)


def no_header(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"\xff" * 100)
    reseal(checkpoint)


def longer(checkpoint):
    with open(checkpoint / "optimizer.safetensors", "ab") as file:
        file.write(b"....")
    reseal(checkpoint)


REFUSED = {
    "no model": (describe(lambda d: d["files"].pop(0)), "it has no model.safetensors"),
    "no header": (no_header, "model.safetensors is no safetensors file"),
    "no JSON": (edit("model.safetensors", lambda h: json.dumps(h)[:-1]), "model.safetensors: its header is no JSON object"),
    "a name twice": (edit("model.safetensors", lambda h: json.dumps(h).replace("{", '{"__metadata__": {"format": "pt"}, ', 1)),
                     "model.safetensors: its header has two values of one name"),
    "a gap": (longer, "optimizer.safetensors: its tensors do not fill it: it was cut short, or has gaps"),
    "a size": (edit("model.safetensors", lambda h: h[largest(h)]["shape"].append(2)),
               r'model.safetensors: its header says something of tensor ".*" that cannot be'),
    "a shape": (edit("model.safetensors", lambda h: h[largest(h)]["shape"].append(1)),
                ".* has another shape or type there than in JOB"),
    "a type": (edit("model.safetensors", lambda h: h[largest(h)].update(dtype="I32")),
               ".* has another shape or type there than in JOB"),
    "a parameter lacks": (drop("weight"), r"it lacks .*weight, which JOB has"),
    "a moment lacks": (drop(".exp_avg"), r"it lacks state\..*\.exp_avg, which JOB has"),
    "a count lacks": (drop(".step"), r"it lacks state\..*\.step, which JOB has"),
    "another name": (edit("optimizer.safetensors", lambda h: h.update({"x": h.pop(largest(h))})),
                     "it lacks state.*, which JOB has"),
    "a tensor twice": (twice, "it has a part of .* twice"),
    "one more": (edit("model.safetensors", lambda h: h.update({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),
                 "it has x, which JOB lacks"),
    "a field lacks": (describe(lambda d: d.pop("world_size")), 'zerod.json: it lacks "world_size", or that is no int'),
}


@pytest.mark.parametrize("damage, why", REFUSED.values(), ids=REFUSED)
def test_verify_says_what_loading_refuses(zerod, copy, ctl, damage, why):
    checkpoint = copy / "step-00000003"
    reseal(checkpoint)
    assert ctl("checkpoint", "verify", checkpoint).returncode == 0  # reseal() computes the seal as zerod does
    damage(checkpoint)
    value = answer("verify", ctl("--json", "checkpoint", "verify", checkpoint), os.EX_DATAERR)["checkpoints"][0]
    assert (value["right"], value["differs"]) == (False, [])
    assert re.fullmatch(why.replace("JOB", "its job"), value["why"]), value["why"]
    text = ctl("checkpoint", "verify", checkpoint)
    assert text.stdout == f"{checkpoint}: cannot be loaded (E1702): {value['why']}\n"
    daemon = zerod({"world": {"size": 1}, "checkpoint": {"load": str(checkpoint)}})
    rank = daemon.spawn(daemon.build.path("tests/example/zerod-example"), *SMALL, "--steps", 4, rank=0)
    assert rank.wait() != 0
    told = wait_for("the refusal", lambda: re.search(r"E1702 checkpoint not loaded\n.*\n  cause +(.*)\n", daemon.log()))
    assert told[1] == value["why"].replace("its job", "this job")


def test_verify_says_that_a_checkpoint_has_another_name(zerod, copy, ctl):
    """A checkpoint that was copied to another step's name is not used as the latest. By its path it can be loaded."""
    (copy / "step-00000003").rename(copy / "step-00000009")
    shutil.rmtree(copy / "step-00000002")
    result = ctl("checkpoint", "verify", copy)
    assert (result.returncode, result.stdout) == (
        os.EX_DATAERR, f"{copy}/step-00000009: cannot be loaded (E1702): zerod.json is of step 3\n")
    daemon = zerod({"world": {"size": 1}, "checkpoint": {"dir": str(copy), "save_on_stop": False}})
    rank = daemon.spawn(daemon.build.path("tests/example/zerod-example"), *SMALL, "--steps", 4, rank=0)
    assert rank.wait() != 0
    wait_for("the refusal", lambda: "step-00000009: zerod.json is of step 3" in daemon.log())
    assert ctl("checkpoint", "verify", copy / "step-00000009").returncode == 0


# ---- save ------------------------------------------------------------------------------------------------


def test_saved_already(job):
    path = f"{job.dir}/step-00000003"
    for args in ([], ["--no-wait"], ["--wait"]):
        assert job.ctl("checkpoint", "save", *args).stdout == f"step 3 is saved already: {path}\n"
    assert check("save", job.json("checkpoint", "save")) == {"schema_version": 1, "saved": True, "new": False, "step": 3,
                                                             "path": path}
    status = job.status()["checkpoint"]
    validator("status").validate(job.status())
    assert (status["dir"], status["wanted"], status["saving"], status["why"]) == (str(job.dir), False, None, None)
    assert (status["n_saved"], status["n_failed"], status["last"]["step"]) == (2, 0, 3)
    assert status["last"]["bytes"] == n_bytes(Path(path)) and 0 < status["last"]["ns"] < status["last"]["ago_ns"] + 60e9
    line, = [line for line in job.ctl("status").stdout.splitlines() if line.startswith("checkpoint ")]
    assert re.fullmatch(rf"checkpoint in {job.dir}: step 3 saved .* ago, [\d.]+ MiB in [\d.]+ m?s", line)


def test_save_that_takes_a_while(zerod, build, tmp_path):
    if not build.options.get("failpoints"):
        pytest.skip("a build without failpoints: meson setup -Dfailpoints=true")
    folder = tmp_path / "c"
    daemon = zerod({"checkpoint": {"dir": str(folder)}}, {"ZEROD_FAILPOINT": f"save:sleep:{1000 * build.patience}"})
    train(daemon, 1)
    asked = check("save", daemon.json("checkpoint", "save", "--no-wait"))
    assert asked == {"schema_version": 1, "saved": False, "new": True, "step": 1, "path": None}
    wait_for("the memory is there, and the save begins", lambda: not daemon.status()["checkpoint"]["wanted"])
    status = daemon.status()
    validator("status").validate(status)
    assert status["checkpoint"]["saving"]["step"] == 1 and status["checkpoint"]["last"] is None
    assert f"checkpoint in {folder}: none by this daemon; saving step 1 for " in daemon.ctl("status").stdout
    assert daemon.ctl("checkpoint", "save", "--no-wait").stdout == "step 1 is being saved\n"
    waited = check("save", daemon.json("checkpoint", "save"))
    assert waited == {"schema_version": 1, "saved": True, "new": True, "step": 1, "path": f"{folder}/step-00000001"}
    assert daemon.status()["checkpoint"]["n_saved"] == 1


def test_save_while_it_trains(zerod, tmp_path):
    """A save during training returns a checkpoint that is at least as new as the step committed at the request."""
    folder = tmp_path / "c"
    daemon = zerod({"checkpoint": {"dir": str(folder), "save_steps": 1, "save_total_limit": 3}})
    program = daemon.build.path("tests/example/zerod-example")
    for r in range(2):
        daemon.spawn(program, *SMALL, "--steps", 1000000, rank=r)
    wait_for("a step", lambda: daemon.status()["step"] > 0)
    for _ in range(5):
        before = daemon.status()["step"]
        saved = check("save", daemon.json("checkpoint", "save"))
        assert saved["saved"] and saved["step"] >= before
        result = daemon.ctl("checkpoint", "verify", check=False)  # while older checkpoints are removed
        assert result.returncode == 0, result.stdout + result.stderr
    for process in daemon.others:
        process.kill()


def test_save_that_fails(zerod, tmp_path):
    folder = tmp_path / "missing" / "checkpoints"
    daemon = zerod({"checkpoint": {"dir": str(folder)}})
    train(daemon, 1)
    for flags in ([], ["--json"]):
        result = daemon.ctl(*flags, "checkpoint", "save", check=False)
        assert (result.returncode, result.stdout) == (os.EX_CANTCREAT, "")
        assert result.stderr == (f"zerodctl: the checkpoint of step 1 was not written: {folder}: No such file or directory; "
                                 "remove the cause, and ask again\n")
    status = daemon.status()["checkpoint"]
    assert (status["n_failed"], status["last"], status["why"]) == (2, None, f"{folder}: No such file or directory")
    assert "none by this daemon; the last one failed: " in daemon.ctl("status").stdout
    folder.parent.mkdir()
    assert daemon.ctl("checkpoint", "save").stdout == f"{folder}/step-00000001\n"
    assert daemon.status()["checkpoint"]["why"] is None
    assert daemon.ctl("checkpoint", "verify").returncode == 0


def test_what_cannot_be_saved(zerod, tmp_path):
    daemon = zerod({"checkpoint": {"dir": str(tmp_path / "c")}})
    result = daemon.ctl("checkpoint", "save", check=False)
    assert result.returncode == os.EX_UNAVAILABLE
    assert result.stderr == "zerodctl: nothing is saved: the job has no weights yet; ask again when it trains\n"
    daemon = zerod()
    result = daemon.ctl("checkpoint", "save", check=False)
    assert result.returncode == os.EX_UNAVAILABLE
    assert result.stderr == ("zerodctl: nothing is saved: the configuration has no checkpoint.dir; set it, and restart the "
                             "daemon\n")
    for command in ("list", "verify", "show"):
        result = daemon.ctl("checkpoint", command, check=False)
        assert (result.returncode, result.stdout) == (os.EX_UNAVAILABLE, "")
        assert "the daemon's configuration has no checkpoint.dir: name a folder, " in result.stderr
    assert daemon.status()["checkpoint"] is None and "checkpoint" not in daemon.ctl("status").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
def test_not_allowed(build, public):
    daemon = Daemon(build, public, {"listen": {"mode": "0666", "allow_users": [str(NOBODY)]},
                                    "checkpoint": {"dir": str(public / "c")}})
    try:
        assert as_nobody(public, "--socket", daemon.socket, "status").returncode == 0
        result = as_nobody(public, "--socket", daemon.socket, "checkpoint", "save")
        assert (result.returncode, result.stdout) == (os.EX_NOPERM, "")
        assert "E1402" in result.stderr and "listen.admin_users" in result.stderr
        assert not daemon.status()["checkpoint"]["wanted"]
        daemon.stop()
    finally:
        daemon.kill()


# ---- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[], ["lst"], ["list", "a", "b"], ["show", ""], ["verify", "--all"], ["save", "a"],
                                  ["save", "--nowait"], ["list", "--no-wait"]])
def test_usage(ctl, args):
    result = ctl("checkpoint", *args)
    assert (result.returncode, result.stdout) == (os.EX_USAGE, "")
    assert result.stderr.startswith("zerodctl: checkpoint takes save [--no-wait], list [DIR], ")


def test_no_daemon(ctl, tmp_path):
    for command in ("list", "verify", "show", "save"):
        result = ctl("--socket", tmp_path / "s", "checkpoint", command)
        assert (result.returncode, result.stdout) == (os.EX_UNAVAILABLE, "")
        assert ctl("checkpoint", command).returncode == os.EX_USAGE


def test_schemas_notice(job):
    """The schemas detect a missing or additional key in every object."""
    for kind in ("list", "verify", "show", "save"):
        value = check(kind, job.json("checkpoint", kind))
        schema = validator("checkpoint").evolve(schema={"$ref": f"checkpoint.json#/$defs/{kind}"})
        pending = [value]
        while pending:
            part = pending.pop()
            pending += part if isinstance(part, list) else part.values() if isinstance(part, dict) else []
            if not isinstance(part, dict):
                continue
            for key in list(part):
                kept = part.pop(key)
                assert not schema.is_valid(value), f"{kind}: {key} may be missing"
                part[key] = kept
            part["surplus"] = 1
            assert not schema.is_valid(value), f"{kind}: unknown keys are allowed"
            del part["surplus"]
