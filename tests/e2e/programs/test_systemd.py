# SPDX-License-Identifier: Apache-2.0
"""
zerod as a service: the units under a real systemd, and the messages to NOTIFY_SOCKET. Tests with the fixture `systemd`
boot one in private namespaces (private_systemd.py). If that is impossible, they are skipped with the reason.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import pytest
from conftest import ROOT, Daemon, wait_for
from private_systemd import PrivateSystemd, children

EX_IOERR = 74
EX_NOPERM = 77
EX_CONFIG = 78
WATCHDOG_S = 1.0
ONE_RANK = {"world": {"size": 1}, "threads": 1}
WATCHED = f"[Service]\nWatchdogSec={WATCHDOG_S}s\n"


@pytest.fixture(scope="module")
def systemd(build, tmp_path_factory):
    if build.sanitize:
        pytest.skip("the units forbid system calls that sanitizers need")
    if why := PrivateSystemd.missing():
        pytest.skip(why)
    if not Path(build.options["prefix"]).is_dir():
        pytest.skip(f"the build's prefix {build.options['prefix']} does not exist, nothing can be laid over it")
    machine = PrivateSystemd(build, tmp_path_factory.mktemp("systemd"))
    yield machine
    machine.stop()


@pytest.fixture
def job(systemd, request):
    """The test's name as a job's name. The job's units are stopped when the test ends."""
    name = re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))
    yield name
    systemd.ctl("stop", f"zerod@{name}.service", f"zerod@{name}.socket", check=False)


def service(job):
    return f"zerod@{job}.service"


def ranks(systemd, job):
    """Return: {rank: process id} of the attached ranks."""
    found = json.loads(systemd.zerodctl(job, "--json", "ranks").stdout)
    return {rank["rank"]: rank["pid"] for rank in found if rank["attached"]}


def connect(path):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        s.connect(str(path))
    except OSError:
        s.close()
        raise
    return s


def steps_of(trainer, *others):
    out, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, out + err
    assert [other.wait(60) for other in others] == [0] * len(others)
    return [int(n) for n in re.findall(r"^step +(\d+)/", out, re.MULTILINE)]


# ---- the files --------------------------------------------------------------------------------------------------


def test_verify_has_nothing_to_say(systemd):
    systemd.configure("verify", {"world": {"size": 1}})
    result = systemd.run("systemd-analyze", "verify", "--man=no", "zerod@verify.service", "zerod@verify.socket",
                         "zerod@verify.target")
    assert result.stdout + result.stderr == ""


def test_exposure(systemd):
    result = systemd.run("systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager",
                         f"{systemd.prefix}/lib/systemd/system/zerod@.service", check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "exposure level" in result.stdout


def test_exporter(systemd, job):
    """The unit is valid and hardened. Its rights suffice to read the metrics of a job that allows no group."""
    unit = "zerod-exporter.service"
    if not systemd.path(f"{systemd.prefix}/lib/systemd/system/{unit}").exists():
        pytest.skip("the build has no zerod-exporter (libmicrohttpd)")
    result = systemd.run("systemd-analyze", "verify", "--man=no", unit)
    assert result.stdout + result.stderr == ""
    result = systemd.run("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager",
                         f"{systemd.prefix}/lib/systemd/system/{unit}", check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    systemd.run("ip", "link", "set", "lo", "up")
    systemd.configure(job, ONE_RANK | {"listen": {"socket": f"/run/zerod/{job}.sock"}})
    systemd.ctl("start", service(job), unit)
    fetch = "import urllib.request as r; print(r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:17700/metrics').read().decode())"
    wait_for("the exporter does not listen",
             lambda: systemd.run("python3", "-c", fetch, check=False).returncode == 0)
    try:
        text = systemd.run("python3", "-c", fetch).stdout
        assert f'zerod_up{{socket="/run/zerod/{job}.sock"}} 1\n' in text
        assert f'zerod_ranks{{socket="/run/zerod/{job}.sock",job_name="{job}"}} 1\n' in text
        pid, daemon = systemd.main_pid(unit), systemd.main_pid(service(job))
        inside = ["nsenter", "--target", pid, "--all", "--preserve-credentials", "setpriv", "--reuid=zerod"]
        assert systemd.run(*inside, "cat", "/proc/self/maps").stdout
        assert systemd.run(*inside, "cat", f"/proc/{daemon}/maps", check=False).returncode != 0
    finally:
        systemd.ctl("stop", unit)
    assert systemd.show(unit, "Result") == "success"
    assert [e["MESSAGE"] for e in systemd.journal("-u", unit, "_COMM=zerod-exporter")] == \
        ["zerod-exporter: listening on http://127.0.0.1:17700/metrics"]


def test_users_and_folders(systemd):
    """sysusers and tmpfiles create the users and folders of our files."""
    assert systemd.run("stat", "-c", "%U:%G %a", "/run/zerod").stdout == "zerod:zerod 755\n"
    assert systemd.run("stat", "-c", "%U:%G %a", "/etc/zerod").stdout == "root:root 755\n"
    assert systemd.run("getent", "group", "zerod-admin").returncode == 0


# ---- a job's life ---------------------------------------------------------------------------------------------------


def test_life(systemd, job):
    """A job is started and trains, a trainer is killed, its successor attaches, and the job is stopped."""
    unit, path = service(job), f"/run/zerod/{job}.sock"
    systemd.configure(job, {"world": {"size": 2}})
    systemd.ctl("start", unit)
    connect(systemd.path(path)).close()
    assert "0 of 2 ranks" in systemd.zerodctl(job, "status").stdout
    assert systemd.state(unit) == "active"
    assert systemd.show(unit, "StatusText") == "waiting for ranks, 0 of 2 ranks, step 0"
    assert systemd.run("stat", "-c", "%U:%G %a", path).stdout == "zerod:zerod 660\n"
    daemon = systemd.main_pid(unit)
    assert [Path(f"/proc/{pid}/comm").read_text() for pid in children(systemd.main_pid_outside(unit))] == ["zerod-memory\n"]

    trainers = [systemd.trainer(job, rank, "--steps", 1_000_000) for rank in (0, 1)]
    try:
        wait_for("the status line never said that it trains",
                 lambda: re.match(r"training, 2 of 2 ranks, step [1-9]", systemd.show(unit, "StatusText")))
        check_watched_through_pidfds(systemd, unit, 2)
        systemd.run("kill", "-KILL", ranks(systemd, job)[1])
        wait_for("the status line never said that a rank is gone",
                 lambda: "1 of 2 ranks" in systemd.show(unit, "StatusText"))
        assert systemd.state(unit) == "active" and systemd.main_pid(unit) == daemon
        trainers.append(systemd.trainer(job, 1, "--steps", 1_000_000))
        step = int(systemd.show(unit, "StatusText").split()[-1])
        wait_for("the successor does not train",
                 lambda: re.match(r"training, 2 of 2 ranks, step (\d+)", text := systemd.show(unit, "StatusText"))
                 and int(text.split()[-1]) > step)
    finally:
        for pid in ranks(systemd, job).values():
            systemd.run("kill", "-KILL", pid)
        for trainer in trainers:
            trainer.communicate(timeout=60)

    systemd.ctl("stop", unit)
    assert {key: systemd.show(unit, key) for key in ("ActiveState", "Result", "ExecMainStatus", "NRestarts")} == \
        {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0", "NRestarts": "0"}
    assert not systemd.path(path).exists()
    assert not [e for e in systemd.journal("-u", unit) if re.search("^cannot|remains running", e["MESSAGE"])]


def check_watched_through_pidfds(systemd, unit, n_trainers):
    """The unit's system call filter and its view of /proc allow pidfds."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{systemd.main_pid_outside(unit)}/fd").iterdir()]
    assert sum("pidfd" in link for link in links) == n_trainers, links


def drop_in_of_the_manual():
    """Return: the drop-in of docs/nodes.md for a daemon that needs the network, changed for nodes on the loopback."""
    lines = (ROOT / "docs/nodes.md").read_text().splitlines()
    first = lines.index("    [Unit]")
    last = next(i for i in range(first, len(lines)) if "IPAddressAllow=" in lines[i])
    text = "\n".join(line.strip() for line in lines[first:last + 1]) + "\n"
    assert "IPAddressAllow=10.0.0.0/24" in text and "key_file: /run/credentials/zerod@" in "\n".join(lines)
    return text.replace("10.0.0.0/24", "127.0.0.0/8")


def test_two_nodes(systemd, job):
    """Two daemons of one job train, with the drop-in of the manual and a key that only the service manager can read."""
    systemd.run("ip", "link", "set", "lo", "up")
    key = systemd.path("/etc/zerod/pretrain.key")
    key.write_bytes(os.urandom(48))
    key.chmod(0o600)
    nodes = [{"address": f"127.77.1.{i + 1}:7700", "ranks": 1} for i in range(2)]
    names = [f"{job}-{i}" for i in range(2)]
    try:
        for i, name in enumerate(names):
            key_file = f"/run/credentials/zerod@{name}.service/pretrain.key"
            systemd.configure(name, {"job": job, "collective": "gloo",
                                     "world": {"size": 2, "nodes": nodes, "node": i, "key_file": key_file}},
                              drop_in_of_the_manual())
            started = systemd.ctl("start", service(name), check=False)
            assert started.returncode == 0, systemd.run("journalctl", "--no-pager", "-n", "40").stdout
        trainers = [systemd.trainer(name, i, "--steps", 3) for i, name in enumerate(names)]
        assert [steps_of(trainer) for trainer in trainers][0][-1] == 3  # rank 0 prints them
        for i, name in enumerate(names):
            seen = json.loads(systemd.zerodctl(name, "--json", "status").stdout)
            assert seen["step"] == 3 and seen["nodes"]["connected"] and seen["nodes"]["list"][1 - i]["reached"]
            assert systemd.main_pid(service(name)) and systemd.show(service(name), "NRestarts") == "0"
    finally:
        for name in names:
            systemd.ctl("stop", service(name), check=False)


def test_who_may_read_the_key(systemd, job):
    """
    A trainer of the group zerod could act as a node if it could read the key. The start refuses such a file, prints its
    mode, and names a command that repairs it. The manual's command repairs it too.
    """
    systemd.run("ip", "link", "set", "lo", "up")
    key, unit = f"/etc/zerod/{job}.key", service(job)
    systemd.path(key).write_bytes(os.urandom(48))
    nodes = [{"address": f"127.77.2.{i + 1}:7700", "ranks": 1} for i in range(2)]
    systemd.configure(job, {"collective": "gloo", "world": {"size": 2, "nodes": nodes, "node": 0, "key_file": key}},
                      drop_in_of_the_manual().replace("LoadCredential=", "#"))
    for owner, mode in ("root:zerod", "0640"), ("root:root", "0600"), ("zerod:zerod", "0440"), ("trainer:zerod", "0440"):
        systemd.run("chown", owner, key)
        systemd.run("chmod", mode, key)
        assert systemd.ctl("start", unit, check=False).returncode != 0
        assert (systemd.show(unit, "ExecMainStatus"), systemd.show(unit, "NRestarts")) == (str(EX_NOPERM), "0")
        said = [e["MESSAGE"] for e in systemd.journal("-u", unit) if "world.key_file" in e["MESSAGE"]][-1]
        assert f"it belongs to {owner.split(':')[0]}, mode {mode}" in said
        systemd.ctl("reset-failed", unit)
    systemd.run("sh", "-c", re.search(r"chown .* && chmod \S+ \S+", said)[0])
    systemd.ctl("start", unit)
    assert systemd.run("cat", key, user="trainer", check=False).returncode != 0
    systemd.ctl("stop", unit)
    command = re.search(r"`(install .*)`", (ROOT / "docs/nodes.md").read_text())[1].replace("/etc/zerod/pretrain.key", key)
    systemd.run("sh", "-c", f"cd /run && head -c 48 /dev/urandom >pretrain.key && {command}")
    systemd.ctl("start", unit)
    assert systemd.run("cat", key, user="trainer", check=False).returncode != 0


GPU_DROP_IN = ROOT / "config/zerod@.service.d/gpu.conf"
# Operations of CUDA and NCCL, run inside the unit's sandbox before the daemon.
LIKE_NCCL = """[Service]
ExecStartPre=/usr/bin/python3 -c "import os, socket as s; \\
    os.sched_setaffinity(0, os.sched_getaffinity(0)); \\
    assert [name for number, name in s.if_nameindex()] == ['lo']; \\
    server = s.create_server(('127.0.0.1', 0)); \\
    client = s.create_connection(server.getsockname()); \\
    server.accept()[0].send(b'x'); \\
    assert client.recv(1) == b'x'"
"""


def test_gpu_drop_in(systemd):
    """With the drop-in, and with its commented-out options too, the unit is valid and still hardened."""
    folder = systemd.path("/run/gpu")
    (folder / "zerod@.service.d").mkdir(parents=True)
    shutil.copy(systemd.path(f"{systemd.prefix}/lib/systemd/system/zerod@.service"), folder)
    installed = systemd.path(f"{systemd.prefix}/share/zerod/zerod@.service.d/gpu.conf").read_text()
    assert installed == GPU_DROP_IN.read_text()
    for text in installed, with_options(installed):
        (folder / "zerod@.service.d/gpu.conf").write_text(text)
        result = systemd.run("systemd-analyze", "verify", "--man=no", "/run/gpu/zerod@gpu.service")
        assert result.stdout + result.stderr == ""
        result = systemd.run("systemd-analyze", "security", "--offline=true", "--threshold=22", "--no-pager",
                             "/run/gpu/zerod@.service", check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Service has no device access" not in result.stdout, result.stdout


def with_options(text):
    return re.sub(r"(?m)^#(?=[A-Z]\w+=)", "", text)


def test_gpu_job(systemd, job):
    """
    A job on stand-in GPUs trains, as the user of its trainers, and its daemon is killed once. Without the drop-in the
    sandbox forbids operations that NCCL needs.
    """
    engine = f"Environment=ZEROD_DEVICE_ENGINE={systemd.bin}/zerod-engine-nccl-sim ZEROD_SIM=devices=2\n"
    config = {"world": {"size": 2}, "device": "cuda", "collective": "nccl", "listen": {"socket": f"/run/zerod-{job}/zerod.sock"}}
    systemd.configure(job, config, LIKE_NCCL)
    assert systemd.ctl("start", service(job), check=False).returncode != 0
    systemd.ctl("stop", service(job))
    systemd.drop_in(job, with_options(GPU_DROP_IN.read_text()) + LIKE_NCCL + engine)
    assert "char-nvidia* rw" in systemd.show(service(job), "DeviceAllow").splitlines()
    started = systemd.ctl("start", service(job), check=False)
    assert started.returncode == 0, systemd.run("journalctl", "--no-pager", "-n", "40").stdout
    options = ["--device", "cuda", "--steps", 300, "--socket", f"/run/zerod-{job}/zerod.sock"]
    env = [f"ZEROD_LIBCUDA={systemd.lib}/libcuda-sim.so", "ZEROD_SIM=devices=2"]
    trainers = [systemd.trainer(job, rank, *options, user="alice", env=env) for rank in (0, 1)]
    wait_for("no training", lambda: re.match(r"training, 2 of 2 ranks, step [1-9]", systemd.show(service(job), "StatusText")))
    restart_after_kill(systemd, service(job))
    assert [steps_of(trainer) for trainer in trainers][0][-1] == 300
    assert systemd.show(service(job), "NRestarts") == "1"


def test_who_may_attach(systemd, job):
    """All users in the configuration may attach, also members of groups that zerod is not in, and no other user."""
    unit, listen = service(job), {"socket": f"/run/zerod/{job}.sock", "admin_groups": ["zerod-admin"]}
    systemd.configure(job, ONE_RANK | {"listen": listen | {"allow_groups": ["zerod", "lab"], "allow_users": ["alice"]}})
    systemd.ctl("start", unit)
    for user in "trainer", "ann", "alice":
        systemd.zerodctl(job, "status", user=user)
    assert "no open step" in systemd.zerodctl(job, "abort-step", user="operator", check=False).stderr
    assert "listen.admin_groups" in systemd.zerodctl(job, "abort-step", user="ann", check=False).stderr
    assert steps_of(systemd.trainer(job, 0, "--steps", 2, user="ann")) == [1, 2]
    out, err = systemd.trainer(job, 0, "--steps", 2, user="stranger").communicate(timeout=60)
    assert "Permission denied" in out + err

    # The daemon applies the new list to a socket that systemd has kept for it.
    systemd.configure(job, ONE_RANK | {"listen": listen | {"allow_groups": ["lab"]}})
    restart_after_kill(systemd, unit)
    systemd.zerodctl(job, "status", user="ann")
    assert "Permission denied" in systemd.zerodctl(job, "status", user="alice", check=False).stderr


def test_socket_unit_of_another_group(systemd, job):
    """
    If the socket unit has another group, its members could not start the daemon. The start fails and names the missing
    setting, which repairs it.
    """
    unit, socket_unit = service(job), f"zerod@{job}.socket"
    systemd.configure(job, ONE_RANK | {"listen": {"socket": f"/run/zerod/{job}.sock", "allow_groups": ["lab"],
                                                  "admin_groups": ["zerod-admin"]}})
    systemd.ctl("start", socket_unit)
    assert systemd.ctl("start", unit, check=False).returncode != 0
    assert (systemd.show(unit, "ExecMainStatus"), systemd.show(unit, "NRestarts")) == (str(EX_CONFIG), "0")
    assert any("add SocketGroup=lab to the section [Socket]" in e["MESSAGE"] for e in systemd.journal("-u", unit))
    systemd.ctl("reset-failed", unit)
    systemd.ctl("stop", socket_unit)
    folder = systemd.path(f"/run/units/{socket_unit}.d")
    folder.mkdir()
    (folder / "test.conf").write_text("[Socket]\nSocketGroup=lab\n")
    systemd.ctl("daemon-reload")
    systemd.ctl("start", socket_unit)
    assert steps_of(systemd.trainer(job, 0, "--steps", 2, user="ann")) == [1, 2]
    systemd.zerodctl(job, "status", user="operator")


def test_who_may_read_checkpoints(systemd, job):
    """A user of the job's group can copy the model. A stranger and zerod's own group cannot even list the folder."""
    dir = f"/var/lib/zerod/{job}"
    systemd.configure(job, ONE_RANK | {"listen": {"socket": f"/run/zerod/{job}.sock", "allow_groups": ["lab"]},
                                       "checkpoint": {"dir": dir, "allow_groups": ["lab"]}})
    systemd.ctl("start", service(job))
    assert steps_of(systemd.trainer(job, 0, "--steps", 2, user="ann")) == [1, 2]
    systemd.ctl("stop", service(job))
    model = f"{dir}/step-00000002/model.safetensors"
    systemd.run("cp", model, "/tmp/model.safetensors", user="ann")
    assert systemd.path("/tmp/model.safetensors").read_bytes() == systemd.path(model).read_bytes()
    assert "whole and right" in systemd.run(systemd.bin / "zerodctl", "checkpoint", "verify", f"{dir}/step-00000002",
                                            user="ann").stdout
    assert systemd.run("touch", f"{dir}/mine", f"{dir}/step-00000002/mine", user="ann", check=False).returncode != 0
    assert systemd.run("sh", "-c", f"echo no >>{model}", user="ann", check=False).returncode != 0
    for user in "stranger", "trainer":
        assert systemd.run("ls", dir, user=user, check=False).returncode != 0
        assert systemd.run("cat", model, user=user, check=False).returncode != 0


def test_folder_outside_of_the_sandbox(systemd, job):
    """A checkpoint folder outside the sandbox is reported at the start. With the line in E1701, a save succeeds."""
    dir = f"/srv/{job}"
    systemd.run("mount", "-t", "tmpfs", "tmpfs", "/srv")
    systemd.run("install", "-d", "-o", "zerod", dir)
    systemd.configure(job, ONE_RANK | {"checkpoint": {"dir": dir}})
    systemd.ctl("start", service(job))
    wait_for("no E1701", lambda: systemd.journal("-u", service(job), "ZEROD_CODE=E1701"))
    said = systemd.journal("-u", service(job), "ZEROD_CODE=E1701")[0]["MESSAGE"]
    assert "Read-only file system" in said
    systemd.ctl("stop", service(job))
    assert systemd.show(service(job), "Result") == "success"  # nothing was trained, so no checkpoint is missing
    systemd.drop_in(job, f"[Service]\n{re.search('ReadWritePaths=[^ ]+', said)[0]}\n")
    systemd.ctl("start", service(job))
    assert steps_of(systemd.trainer(job, 0, "--steps", 2)) == [1, 2]
    systemd.ctl("stop", service(job))
    assert systemd.path(f"{dir}/step-00000002/model.safetensors").exists()
    assert len(systemd.journal("-u", service(job), "ZEROD_CODE=E1701")) == 1


def test_last_checkpoint_is_not_there(systemd, job):
    """The unit fails if the checkpoint of save_on_stop cannot be written."""
    systemd.configure(job, ONE_RANK | {"checkpoint": {"dir": f"/var/lib/zerod/{job}", "save_on_stop": True}},
                      "[Service]\nEnvironment=ZEROD_FAILPOINT=disk.write:error@*\n")
    systemd.ctl("start", service(job))
    assert steps_of(systemd.trainer(job, 0, "--steps", 2)) == [1, 2]
    systemd.ctl("stop", service(job), check=False)
    assert (systemd.state(service(job)), systemd.show(service(job), "ExecMainStatus")) == ("failed", str(EX_IOERR))
    assert any("the last step is not saved: " in e["MESSAGE"] for e in systemd.journal("-u", service(job)))
    systemd.ctl("reset-failed", service(job))


def test_wrong_configuration(systemd, job):
    """systemd does not restart a unit with a wrong configuration, and the journal has the error."""
    systemd.configure(job, {"world": {"size": 1}, "zero_optimization": {"stage": 4}})
    result = systemd.ctl("start", service(job), check=False)
    assert result.returncode != 0
    time.sleep(0.5)
    assert systemd.state(service(job)) == "failed"
    assert systemd.show(service(job), "ExecMainStatus") == str(EX_CONFIG)
    assert systemd.show(service(job), "NRestarts") == "0"
    messages = [e["MESSAGE"] for e in systemd.journal("-u", service(job))]
    assert any(m.startswith("E1601 config: ") and "zero_optimization.stage" in m for m in messages), messages
    systemd.ctl("reset-failed", service(job))


def test_checked_as_the_units_user(systemd, job):
    """zerod --check, run by root, reports all rights that the unit's user lacks, at once."""
    file, key = f"/etc/zerod/{job}.yaml", f"/etc/zerod/{job}.key"
    check = [systemd.bin / "zerod", "--config", file, "--check"]
    systemd.path(key).write_bytes(os.urandom(48))
    systemd.path(key).chmod(0o640)
    nodes = [{"address": f"127.77.3.{i + 1}:7700", "ranks": 1} for i in range(2)]
    systemd.configure(job, {"collective": "gloo", "world": {"size": 2, "nodes": nodes, "node": 0, "key_file": key},
                            "listen": {"socket": "/etc/zerod.sock", "allow_groups": ["no-such-group"]},
                            "checkpoint": {"dir": "/etc/zerod/checkpoints"}})
    found = systemd.run(*check, check=False)
    assert found.returncode == EX_CONFIG and f"{file}: looked at as user zerod" in found.stderr
    for part in ('no group "no-such-group"', f"chown zerod {key}", "listen.socket /etc/zerod.sock: its folder cannot be written",
                 "checkpoint.dir /etc/zerod/checkpoints: /etc/zerod cannot be written"):
        assert part in found.stderr
    assert systemd.run(*check, "--user", "root", check=False).stderr.count("zerod: ") == 3  # group, key, user
    systemd.configure(job, ONE_RANK | {"checkpoint": {"dir": f"/var/lib/zerod/{job}"}})
    systemd.path(file).chmod(0o600)
    found = systemd.run(*check, check=False)
    assert found.returncode != 0 and "Permission denied" in found.stderr
    systemd.path(file).chmod(0o644)
    assert "as user zerod sees them" in systemd.run(*check).stdout


def socket_of_another(systemd, job):
    """A socket of another daemon listens on /run/zerod/JOB-another.sock."""
    path = systemd.path(f"/run/zerod/{job}-another.sock")
    path.unlink(missing_ok=True)
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.bind(str(path))
    s.listen(1000)
    path.chmod(0o666)
    return s


def test_socket_in_use(systemd, job):
    """With a used socket the start fails for good, and names the socket's owner. Without it the next start succeeds."""
    unit, path = service(job), systemd.path(f"/run/zerod/{job}-another.sock")
    systemd.configure(job, ONE_RANK | {"listen": {"socket": f"/run/zerod/{job}-another.sock"}})
    with contextlib.closing(socket_of_another(systemd, job)):
        for mode, why in (0o600, "a socket of user root, to which this daemon's user may not connect"), (0o666, "another daemon"):
            path.chmod(mode)
            assert systemd.ctl("start", unit, check=False).returncode != 0
            time.sleep(0.5)
            assert (systemd.show(unit, "ExecMainStatus"), systemd.show(unit, "NRestarts")) == (str(os.EX_UNAVAILABLE), "0")
            assert why in [e["MESSAGE"] for e in systemd.journal("-u", unit, "SYSLOG_IDENTIFIER=zerod")][-1]
            systemd.ctl("reset-failed", unit)
    systemd.ctl("start", unit)


def test_zerodrun_beside_the_unit(systemd, job):
    """zerodrun starts no daemon on a socket of the unit, running or not. It names a command, after which it works."""
    unit, path = service(job), f"/run/zerod/{job}.sock"
    config = {"listen": {"socket": path, "allow_groups": ["lab"], "admin_groups": ["zerod-admin"]}}
    systemd.configure(job, ONE_RANK | config)
    systemd.ctl("start", unit)

    def zerodrun(*options, user=None):
        return systemd.run(systemd.bin / "zerodrun", *options, "--", "true", user=user, check=False)

    refused = zerodrun("--socket", path, user="stranger")
    assert (refused.returncode, refused.stdout) == (EX_NOPERM, "")
    assert refused.stderr == (f"zerodrun: not allowed to connect to {path}: Permission denied; members of lab, zerod-admin may "
                              "(as root: usermod -aG lab stranger; then log in again)\n")
    for asks in (systemd.zerodctl(job, "status", user="stranger", check=False).stderr,
                 systemd.trainer(job, 0, user="stranger").communicate(timeout=60)[1]):
        assert refused.stderr.partition("denied; ")[2].strip() in asks
    systemd.run(*re.search(r"usermod -aG \w+ \w+", refused.stderr)[0].split())
    assert zerodrun("--socket", path, user="stranger").returncode == 0
    systemd.run("gpasswd", "-d", "stranger", "lab")

    systemd.ctl("stop", unit)
    for options in ["--config", f"/etc/zerod/{job}.yaml"], ["--socket", path]:
        refused = zerodrun(*options)
        assert refused.returncode == os.EX_UNAVAILABLE and not systemd.path(path).exists()
    assert zerodrun("--no-daemon", "--socket", path).returncode == 0  # its ranks may wait for the unit's daemon
    stale = f"/tmp/{job}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.bind(str(systemd.path(stale)))
    systemd.run("chown", "zerod", stale)
    assert f"{stale}, a socket of user zerod" in zerodrun("--socket", stale).stderr
    assert zerodrun("--socket", f"/run/{job}.sock").returncode == 0  # root's own folder, as in a container
    systemd.run(*re.search(r"systemctl start [\w@.-]+", refused.stderr)[0].split())
    assert zerodrun("--socket", path).returncode == 0 and systemd.state(unit) == "active"


def test_journal(systemd, job):
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", service(job))
    trainer = systemd.trainer(job, 0, "--steps", 3, "--provoke-duplicate", "1:blocks.0.attn.qkv.weight")
    assert steps_of(trainer)
    entries = systemd.journal("-u", service(job), "ZEROD_CODE=E1001")
    assert len(entries) == 1
    entry = entries[0]
    wanted = {"ZEROD_JOB": job, "ZEROD_CLASS": "D2", "ZEROD_PARAM": "blocks.0.attn.qkv.weight", "ZEROD_RANK": "0",
              "ZEROD_STEP": "1", "ZEROD_MICRO_BATCH": "0", "PRIORITY": "3", "SYSLOG_IDENTIFIER": "zerod"}
    assert {key: entry.get(key) for key in wanted} == wanted
    assert entry["MESSAGE"].splitlines()[0] == "E1001 duplicate gradient refused: rank 0, step 1, micro-batch 0"
    assert any(e["MESSAGE"].startswith("ready: ") and "ZEROD_CODE" not in e
               for e in systemd.journal("-u", service(job), "PRIORITY=5"))


# ---- the socket unit ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nobody_is_refused(path):
    """Connects to the path all the time. No connection may be refused."""
    refused, n_connected, stop = [], 0, threading.Event()

    def knock():
        nonlocal n_connected
        while not stop.is_set():
            try:
                connect(path).close()
                n_connected += 1
            except OSError as e:
                refused.append(e)
            time.sleep(0.005)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not refused and n_connected > 20, (refused[:3], n_connected)


def test_socket_activation(systemd, job):
    """
    The first connection starts the daemon. The socket outlives a daemon that crashes, is restarted or drained, so that
    no client is refused. A stop of the service closes it, because a waiting trainer would start an empty daemon.
    """
    unit, path = service(job), systemd.path(f"/run/zerod/{job}.sock")
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", f"zerod@{job}.socket")
    assert systemd.state(unit) == "inactive"
    assert systemd.run("stat", "-c", "%U:%G %a", f"/run/zerod/{job}.sock").stdout == "zerod:zerod 660\n"
    assert steps_of(systemd.trainer(job, 0, "--steps", 2)) == [1, 2]
    assert systemd.state(unit) == "active"

    with nobody_is_refused(path):
        for _ in range(3):
            restart_after_kill(systemd, unit)
        systemd.ctl("restart", unit)
        drained = systemd.main_pid(unit)
        systemd.zerodctl(job, "drain")
        wait_for("nobody started it again",
                 lambda: systemd.state(unit) == "active" and systemd.main_pid(unit) not in (0, drained))
    assert "0 of 1 ranks" in systemd.zerodctl(job, "status").stdout

    trainer = systemd.trainer(job, 0, "--steps", 1_000_000)
    wait_for("no training", lambda: status(systemd, job)["step"] > 2)
    pid = ranks(systemd, job)[0]
    systemd.ctl("stop", unit)
    time.sleep(1)  # the trainer keeps trying to connect
    assert (systemd.state(unit), systemd.state(f"zerod@{job}.socket")) == ("inactive", "inactive")
    assert not path.exists()
    systemd.run("kill", "-KILL", pid, check=False)
    trainer.communicate(timeout=60)


def test_restart_of_the_socket(systemd, job):
    """
    A restart of the socket unit restarts the daemon, because it must have the socket that clients reach. The run is
    kept. A stop of the socket unit stops the daemon.
    """
    unit, socket_unit = service(job), f"zerod@{job}.socket"
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", socket_unit)
    trainer = systemd.trainer(job, 0, "--steps", 1_000_000)
    wait_for("no training", lambda: status(systemd, job)["step"] > 2)
    systemd.ctl("restart", socket_unit)
    step = status(systemd, job)["step"]
    wait_for("it does not go on", lambda: status(systemd, job)["step"] > step)
    assert step > 2 and status(systemd, job)["n_daemons"] == 2
    end_trainers(systemd, job, [trainer])
    systemd.ctl("stop", unit)
    assert systemd.state(socket_unit) == "inactive"

    systemd.ctl("start", socket_unit)
    systemd.zerodctl(job, "status")
    systemd.ctl("stop", socket_unit)
    assert (systemd.state(unit), systemd.show(unit, "Result")) == ("inactive", "success")


def restart_after_kill(systemd, unit):
    before = systemd.kill_main(unit)
    wait_for(f"{unit} was not started again",
             lambda: systemd.main_pid(unit) not in (0, before) and systemd.state(unit) == "active")


def test_kills_without_end(systemd, job):
    """A daemon that dies again and again is always restarted, and removes what its predecessor left."""
    unit = service(job)
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", unit)
    for _ in range(8):
        restart_after_kill(systemd, unit)
    assert systemd.show(unit, "NRestarts") == "8"
    assert "0 of 1 ranks" in systemd.zerodctl(job, "status").stdout


# ---- the watchdog ---------------------------------------------------------------------------------------------------------


def check_watchdog_fired(systemd, unit, before):
    wait_for("the watchdog did not fire", lambda: systemd.main_pid(unit) not in (0, before))
    wait_for("it is not back", lambda: systemd.state(unit) == "active")
    assert systemd.show(unit, "NRestarts") == "1"
    assert any(e["MESSAGE"].startswith(f"{unit}: Watchdog timeout") for e in systemd.journal("-u", unit))


def test_watchdog_blocked_loop(systemd, job):
    unit = service(job)
    systemd.configure(job, ONE_RANK, WATCHED)
    systemd.ctl("start", unit)
    time.sleep(3 * WATCHDOG_S)  # an idle daemon counts as alive
    assert systemd.show(unit, "NRestarts") == "0"
    check_watchdog_fired(systemd, unit, systemd.kill_main(unit, signal.SIGSTOP))
    assert "0 of 1 ranks" in systemd.zerodctl(job, "status").stdout


def test_frozen_daemon(systemd, job):
    """zerodctl reports a frozen daemon without waiting for the watchdog."""
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", service(job))
    pid, began = systemd.kill_main(service(job), signal.SIGSTOP), time.monotonic()
    said = systemd.zerodctl(job, "status", check=False)
    assert time.monotonic() - began < 5
    assert (said.returncode, said.stdout) == (75, "") and f"process {pid} is stopped" in said.stderr
    systemd.run("sh", "-c", re.search(r"kill -CONT \d+", said.stderr)[0])
    assert "0 of 1 ranks" in systemd.zerodctl(job, "status").stdout


# Stops single threads, which SIGSTOP cannot, until their process ends. The tracer must wait for each thread.
STOP_THREADS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
tids = [int(word) for word in sys.argv[1:]]
for tid in tids:
    for request in SEIZE, INTERRUPT:
        if libc.ptrace(request, tid, None, None) != 0:
            sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(tid, WALL)
print("stopped", flush=True)
while tids:
    tid, status = os.waitpid(-1, WALL)
    if os.WIFEXITED(status) or os.WIFSIGNALED(status):
        tids.remove(tid)
"""


@contextlib.contextmanager
def stopped_threads(pid, name):
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == name]
    assert tasks, f"{pid} has no thread {name}"
    helper = subprocess.Popen([sys.executable, "-c", STOP_THREADS, *(task.name for task in tasks)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if helper.stdout.readline() != "stopped\n":
            pytest.skip(f"threads cannot be stopped one by one: {helper.communicate()[1].strip()}")
        yield
    finally:
        helper.kill()
        helper.communicate()


def test_watchdog_stuck_worker(systemd, job):
    """The watchdog ends a daemon whose loop answers while its worker, for which a trainer waits, is stuck."""
    unit = service(job)
    systemd.configure(job, ONE_RANK, WATCHED)
    systemd.ctl("start", unit)
    before = systemd.main_pid(unit)
    trainer = systemd.trainer(job, 0, "--steps", 1_000_000)
    wait_for("no training", lambda: re.search(r"^step +[1-9]", systemd.zerodctl(job, "status").stdout, re.MULTILINE))
    with stopped_threads(systemd.main_pid_outside(unit), "zerod-worker"):
        assert "1 of 1 ranks" in systemd.zerodctl(job, "status").stdout
        check_watchdog_fired(systemd, unit, before)
    # The trainer has only noticed a pause.
    step = status(systemd, job)["step"]
    wait_for("it does not go on", lambda: status(systemd, job)["step"] > step)
    end_trainers(systemd, job, [trainer])


# ---- state that outlives the daemon ----------------------------------------------------------------------------------------


def status(systemd, job):
    return json.loads(systemd.zerodctl(job, "--json", "status").stdout)


def end_trainers(systemd, job, trainers):
    for pid in ranks(systemd, job).values():
        systemd.run("kill", "-KILL", pid)
    for trainer in trainers:
        trainer.communicate(timeout=60)


def kept_memory(systemd, unit):
    """Return: {name: inode} of the memory that the daemon has mapped."""
    found = {}
    for fd in Path(f"/proc/{systemd.main_pid_outside(unit)}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was closed meanwhile
            found[os.readlink(fd)] = os.stat(fd).st_ino
    return {name: inode for name, inode in found.items() if "memfd:zerod.s" in name}


def held_by(systemd, unit):
    """Return: the daemon's open descriptors, its stored descriptors, and KiB of its private memory."""
    pid = systemd.main_pid_outside(unit)
    own = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(systemd.show(unit, "NFileDescriptorStore")), int(own)


def install_another(systemd, unit):
    """Installs other files, then daemon-reload and restart, as a package does."""
    old = systemd.run("sh", "-c", "command -v zerod").stdout.strip()
    systemd.run("install", "-D", old, "/run/new/zerod")
    folder = systemd.path(f"/run/units/{unit}.d")
    folder.mkdir()
    (folder / "new.conf").write_text("[Service]\nExecStart=\nExecStart=/run/new/zerod --config /etc/zerod/%i.yaml\n")
    systemd.ctl("daemon-reload")
    systemd.ctl("restart", unit)
    assert systemd.run("readlink", f"/proc/{systemd.main_pid(unit)}/exe").stdout == "/run/new/zerod\n"
    shutil.rmtree(folder)
    systemd.ctl("daemon-reload")


def test_run_outlives_its_daemon(systemd, job, build, tmp_path):
    """
    The run survives 50 kills, starts that fail by configuration in between, daemon-reexec, a manual restart and an
    upgrade. Meanwhile no client is refused, and the daemon's resources do not grow.
    """
    unit, file = service(job), systemd.path(f"/etc/zerod/{job}.yaml")
    systemd.configure(job, {"world": {"size": 2}, "gradient_clipping": 1.0})
    systemd.ctl("start", unit)
    trainers = [systemd.trainer(job, rank, "--steps", 1_000_000) for rank in (0, 1)]
    wait_for("no training", lambda: systemd.zerodctl(job, "status", check=False).returncode == 0
             and status(systemd, job)["step"] > 2)
    with nobody_is_refused(systemd.path(f"/run/zerod/{job}.sock")):
        outlive(systemd, job, unit, file)
    assert all(trainer.poll() is None for trainer in trainers)
    end_trainers(systemd, job, trainers)


def outlive(systemd, job, unit, file):
    good, memory, held = file.read_text(), kept_memory(systemd, unit), []
    assert len(memory) >= 2, memory
    for i in range(50):
        if i % 5 == 0:
            file.write_text("wrong: true\n")
        restart_after_kill(systemd, unit)
        if i % 5 == 0:
            wait_for("it does not hold", lambda: "holds the state of a run" in systemd.show(unit, "StatusText"))
            file.write_text(good)
        step = status(systemd, job)["step"]
        wait_for(lambda: f"it does not go on: {i}, {[e['MESSAGE'] for e in systemd.journal('-u', unit)][-30:]}",
                 lambda: status(systemd, job)["step"] > step)
        assert kept_memory(systemd, unit) == memory
        held.append(held_by(systemd, unit))
    fds, kept, own = zip(*held[5:])
    assert median(fds[-15:]) - median(fds[:15]) <= 2, held  # connections of nobody_is_refused() may be open
    # Longer training uses more of the recorder's rings. The memory must not keep growing.
    assert min(kept) == max(kept) and median(own[-15:]) < median(own[:15]) * 1.2 + 256, held
    systemd.ctl("daemon-reexec")
    systemd.ctl("restart", unit)
    install_another(systemd, unit)
    systemd.ctl("restart", unit)
    step = status(systemd, job)["step"]
    wait_for("it does not go on", lambda: status(systemd, job)["step"] > step)
    assert kept_memory(systemd, unit) == memory
    assert status(systemd, job)["n_daemons"] == 54


def test_restart_with_a_wrong_file(systemd, job):
    """
    systemctl restart fails with a wrong file, and the run is kept. The corrected file is used without a further
    command. The file cannot be read, or names an unknown group or a socket of another daemon.
    """
    unit, file = service(job), systemd.path(f"/etc/zerod/{job}.yaml")
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", unit)
    trainer = systemd.trainer(job, 0, "--steps", 1_000_000)
    wait_for("no training", lambda: status(systemd, job)["step"] > 2)
    good = file.read_text()
    wrong = json.dumps(json.loads(good) | {"checkpoint": {"dir": f"/var/lib/zerod/{job}", "allow_groups": ["no-such-group"]}})
    another = socket_of_another(systemd, job)
    taken = json.dumps(json.loads(good) | {"listen": {"socket": f"/run/zerod/{job}-another.sock"}})
    for text, why in ("wrold: {size: 1}\n", "wrold"), (wrong, "there is no group"), (taken, "another daemon already listens"):
        file.write_text(text)
        restarted = systemd.ctl("restart", unit, check=False)
        assert restarted.returncode != 0 and f"Job for {unit} failed" in restarted.stderr
        wait_for("it does not hold", lambda: "holds the state of a run" in systemd.show(unit, "StatusText"))
        assert any(why in e["MESSAGE"] for e in systemd.journal("-u", unit))
        n_starts = systemd.show(unit, "NRestarts")
        time.sleep(1)
        assert systemd.show(unit, "NRestarts") == n_starts and trainer.poll() is None
        file.write_text(good)
        wait_for("it does not go on", lambda: systemd.zerodctl(job, "status", check=False).returncode == 0)
        step = status(systemd, job)["step"]
        wait_for("it does not go on", lambda: status(systemd, job)["step"] > step)
    systemd.ctl("restart", unit)
    another.close()
    file.write_text(wrong)
    systemd.ctl("restart", unit, check=False)
    wait_for("it does not hold", lambda: "holds the state of a run" in systemd.show(unit, "StatusText"))
    systemd.ctl("stop", unit)
    assert not systemd.path(f"/run/zerod/{job}.sock").exists()
    end_soon([trainer], "it was stopped or killed")


@pytest.mark.full
def test_address_comes_free(systemd, job):
    """A daemon that has kept the state of a run tries to bind its socket again, at long intervals."""
    unit, file = service(job), systemd.path(f"/etc/zerod/{job}.yaml")
    systemd.configure(job, ONE_RANK)
    systemd.ctl("start", unit)
    assert steps_of(systemd.trainer(job, 0, "--steps", 2)) == [1, 2]
    file.write_text(file.read_text().replace(f"{job}.sock", f"{job}-another.sock"))
    with contextlib.closing(socket_of_another(systemd, job)):
        restart_after_kill(systemd, unit)
        time.sleep(15)
        assert systemd.show(unit, "StatusText") == "holds the state of a run, and waits for an address that is in use"
        assert int(systemd.show(unit, "NRestarts")) in (2, 3)
    wait_for("it does not go on", lambda: systemd.show(unit, "StatusText") == "waiting for ranks, 0 of 1 ranks, step 2")


def two_that_train(systemd, job):
    trainers = [systemd.trainer(job, rank, "--steps", 1_000_000) for rank in (0, 1)]
    wait_for("no training", lambda: re.match(r"training, 2 of 2 ranks, step [1-9]", systemd.show(service(job), "StatusText")))
    return trainers


def end_soon(trainers, said):
    """The trainers must end by themselves."""
    began = time.monotonic()
    for trainer in trainers:
        out, err = trainer.communicate(timeout=60)
        assert trainer.returncode != 0 and said in out + err, out + err
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "has no folder"])
def test_stop_under_the_ranks(systemd, job, saves):
    """After a restart the run continues. A stop ends it, and ranks and journal say at once where the next begins."""
    unit, dir = service(job), f"/var/lib/zerod/{job}"
    systemd.configure(job, {"world": {"size": 2}} | ({"checkpoint": {"dir": dir}} if saves else {}))
    systemd.ctl("start", unit)
    trainers = two_that_train(systemd, job)
    systemd.ctl("restart", unit)
    step = status(systemd, job)["step"]
    wait_for("it does not go on", lambda: status(systemd, job)["step"] > step)
    assert all(trainer.poll() is None for trainer in trainers) and not systemd.journal("-u", unit, "ZEROD_CODE=E1305")
    n_before = sum("the next daemon goes on with it" in e["MESSAGE"] for e in systemd.journal("-u", unit))

    systemd.ctl("stop", unit)
    end_soon(trainers, "E1305 daemon stopped, the run ends")
    assert not systemd.path(f"/run/zerod/{job}.sock").exists()
    assert (systemd.show(unit, "Result"), systemd.show(unit, "ExecMainStatus")) == ("success", "0")
    said = [e["MESSAGE"] for e in systemd.journal("-u", unit)]
    assert (n_before, sum("the next daemon goes on with it" in text for text in said)) == (1, 1)
    [text] = [e["MESSAGE"] for e in systemd.journal("-u", unit, "ZEROD_CODE=E1305")]
    assert "by systemctl stop" in text
    if saves:
        last = max(int(folder.name.removeprefix("step-")) for folder in systemd.path(dir).glob("step-*"))
        assert f"the run begins with step {last}, from {dir}\n" in text
        systemd.ctl("start", unit)
        assert steps_of(systemd.trainer(job, 0, "--steps", last + 1), systemd.trainer(job, 1, "--steps", last + 1)) == [last + 1]
    else:
        assert "lost: masters and moments\n" in text + "\n"


def test_end_without_a_word(systemd, job):
    """The daemon is killed, and systemd starts no other one. The ranks do not wait for one."""
    unit = service(job)
    systemd.configure(job, {"world": {"size": 2}}, "[Service]\nRestart=no\n")
    systemd.ctl("start", unit)
    trainers = two_that_train(systemd, job)
    systemd.kill_main(unit)
    end_soon(trainers, "it was stopped or killed")
    systemd.ctl("reset-failed", unit)


def test_held_run_is_said_once(systemd, job):
    """
    Ranks ask a daemon that cannot adopt their run several times a second. The journal has one refusal for each rank,
    and `systemctl status` and zerodctl report the same cause.
    """
    unit, file = service(job), systemd.path(f"/etc/zerod/{job}.yaml")
    systemd.configure(job, {"world": {"size": 2}})
    systemd.ctl("start", unit)
    trainers = [systemd.trainer(job, rank, "--steps", 1_000_000) for rank in (0, 1)]
    wait_for("no training", lambda: re.match(r"training, 2 of 2 ranks, step [1-9]", systemd.show(unit, "StatusText")))
    good = json.loads(file.read_text())
    file.write_text(json.dumps(good | {"persist": "off"}))
    restart_after_kill(systemd, unit)
    time.sleep(4)
    refused = systemd.journal("-u", unit, "ZEROD_CODE=E1304")
    assert sorted(e.get("ZEROD_RANK", "") for e in refused) == ["", "0", "1"], len(refused)
    held = status(systemd, job)["held"]
    assert "persist: off" in held
    assert systemd.show(unit, "StatusText") == \
        f"holds the state of a run (E1304): {held}; zerodctl drop discards it"
    assert f"held      {held}; zerodctl drop discards it\n" in systemd.zerodctl(job, "status").stdout

    file.write_text(json.dumps(good))
    systemd.ctl("restart", unit)
    step = status(systemd, job)["step"]
    wait_for("it does not go on", lambda: status(systemd, job)["step"] > step)
    end_trainers(systemd, job, trainers)


# ---- messages to NOTIFY_SOCKET
# ---------------------------------------------------------------------------------------------


class Listener:
    """Receives a service's messages like systemd. Connects to the service at READY=1."""

    def __init__(self, path, service):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.service = service
        self.said, self.connected = [], None
        self.thread = threading.Thread(target=self.receive)
        self.thread.start()

    def receive(self):
        while text := self.socket.recv(4096).decode():
            if "READY=1" in text.splitlines():
                self.connected = self.try_to_connect()
            self.said.append((time.monotonic(), text))

    def try_to_connect(self):
        try:
            connect(self.service).close()
            return "yes"
        except OSError as e:
            return str(e)

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"", self.socket.getsockname())
        self.thread.join()
        self.socket.close()

    def when(self, text):
        return [at for at, said in list(self.said) if text in said.splitlines()]

    def lines(self):
        return [line for _, said in list(self.said) for line in said.splitlines()]


@pytest.fixture
def notified(build):
    """notified(config, env={}) -> a started daemon, and a Listener to it."""
    with tempfile.TemporaryDirectory(prefix="zerod-") as folder:
        daemon, listener = None, Listener(Path(folder) / "notify", Path(folder) / "zerod.sock")

        def start(config, env=None):
            nonlocal daemon
            daemon = Daemon(build, folder, config, {"NOTIFY_SOCKET": Path(folder) / "notify", **(env or {})}, wait=False)
            return daemon, listener

        yield start
        listener.close()
        if daemon:
            daemon.kill()


def test_transcript(notified, build):
    limit_s = 1.0 * build.patience
    daemon, listener = notified({"world": {"size": 1}}, {"WATCHDOG_USEC": int(limit_s * 1e6)})
    wait_for("it never said READY=1", lambda: listener.when("READY=1"), 20 * build.patience)
    assert listener.connected == "yes"
    wait_for("the watchdog is not fed", lambda: len(listener.when("WATCHDOG=1")) >= 8, 20 * limit_s)
    fed = listener.when("WATCHDOG=1")
    assert max(b - a for a, b in zip(fed, fed[1:])) < limit_s
    daemon.stop()
    wait_for("it never removed its socket", lambda: listener.when("FDSTOREREMOVE=1"))
    lines = listener.lines()
    assert lines.count("READY=1") == lines.count("STOPPING=1") == 1
    assert lines[-3:] == ["STOPPING=1", "FDSTOREREMOVE=1", "FDNAME=listen"]
    assert lines.index("FDSTORE=1") < lines.index("READY=1")
    assert lines.index("STATUS=waiting for ranks, 0 of 1 ranks, step 0") < lines.index("READY=1")


def test_no_watchdog_unless_asked(notified):
    daemon, listener = notified({"world": {"size": 1}})
    wait_for("it never said READY=1", lambda: listener.when("READY=1"))
    time.sleep(2.5)  # an unchanged status is not repeated after its interval of 2 s
    assert sum(line.startswith("STATUS=") for line in listener.lines()) == 1
    assert not listener.when("WATCHDOG=1")
    daemon.stop()


def test_not_ready_when_it_cannot_listen(notified):
    daemon, listener = notified({"world": {"size": 1}, "listen": {"allow_users": ["no-such-user"]}})
    assert daemon.wait() == EX_CONFIG
    assert 'there is no user "no-such-user"' in daemon.err()
    assert listener.lines() == []


def test_log_goes_where_stderr_goes(zerod):
    """If stderr was redirected, the log goes there, although JOURNAL_STREAM is inherited."""
    daemon = zerod({"world": {"size": 1}}, env={"JOURNAL_STREAM": "1:2"})
    wait_for("nothing in its stderr", lambda: "zerod[test]: ready: job test" in daemon.err())
