# SPDX-License-Identifier: Apache-2.0
"""
A real systemd as process 1 of private namespaces, with zerod installed as by a distribution.

    systemd = PrivateSystemd(build, folder)
    systemd.configure("train", {"world": {"size": 2}})
    systemd.ctl("start", "zerod@train.service")
    assert systemd.show("zerod@train.service", "ActiveState") == "active"
    systemd.stop()

The private machine has its own mounts, processes, network and cgroups. /etc is an overlay, so users that are added in
it exist only inside. The installed tree is an overlay over the build's prefix. /run, /tmp, /var/tmp and /var/lib/zerod
are private. journald runs in it. Of the machine's units it has only those of journald, and the targets that units refer
to are empty. It needs root, and a kernel that allows this; PrivateSystemd.missing() returns the reason if not. It ends
when this process dies.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SYSTEMD = Path("/usr/lib/systemd/systemd")
TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "journalctl", "systemd-sysusers", "systemd-tmpfiles", "meson")
TARGETS = ("default", "basic", "sysinit", "shutdown", "sockets", "multi-user", "network")

# $1 is the folder, $2 the prefix. The outer shell keeps access to the cgroup file system, to clean up there.
OUTER = r"""
set -eu
folder=$1
mkdir "$folder/cgroup"
mount -t cgroup2 cgroup2 "$folder/cgroup"
group=$folder/cgroup/zerod-test-$$
clean_up() {
    kill -KILL $child || true
    wait
    for i in $(seq 100); do
        find "$group" -depth -type d -exec rmdir {} + && break
        sleep 0.05
    done
} 2>/dev/null
mkdir "$group"
(
    echo $BASHPID >"$group/cgroup.procs"
    exec unshare --cgroup --pid --fork --kill-child --mount --uts --ipc --net --mount-proc \
        bash "$folder/inner.sh" "$@"
) &
child=$!
trap 'clean_up; exit' TERM
wait $child || true
clean_up
"""

INNER = r"""
set -eu
folder=$1 prefix=$2
mount --make-rprivate /
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
# What process 1 and journald write there belongs to the machine.
for device in kmsg console; do
    [ ! -e /dev/$device ] || mount --bind /dev/null /dev/$device
done
mkdir "$folder/private"
mount -t tmpfs tmpfs "$folder/private"
mkdir "$folder/private/upper" "$folder/private/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$folder/private/upper,workdir=$folder/private/work" /etc
mount -t overlay overlay -o "lowerdir=$folder/installed$prefix:$prefix" "$prefix"
mount -t tmpfs -o mode=755 tmpfs /run
cp -r "$folder/run/." /run
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p /var/lib/zerod
mount -t tmpfs tmpfs /var/lib/zerod
systemd-sysusers "$prefix/lib/sysusers.d/zerod.conf" /run/units/trainer.conf
systemd-tmpfiles --create "$prefix/lib/tmpfiles.d/zerod.conf"
# As process 1 would make it where it does not find itself in a container: credentials come to services that way.
mount --make-rshared /
exec env -i container=zerod-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH="/run/units:/etc/systemd/system:$prefix/lib/systemd/system" SYSTEMD_LOG_TARGET=journal-or-kmsg \
    SYSTEMD_PROC_CMDLINE=systemd.unified_cgroup_hierarchy=1 /usr/lib/systemd/systemd --system
"""


def children(pid):
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class PrivateSystemd:
    @staticmethod
    def missing():
        """Return: why there can be no private systemd, or ""."""
        if os.geteuid() != 0:
            return "a private systemd needs root"
        if not SYSTEMD.exists():
            return "systemd is not installed"
        if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
            return "not installed: " + ", ".join(lacking)
        test = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--cgroup", "--net", "mount", "-t", "cgroup2",
                               "cgroup2", "/mnt"], capture_output=True, text=True)
        return f"no namespaces or cgroups of our own: {test.stderr.strip()}" if test.returncode else ""

    def __init__(self, build, folder):
        self.folder = Path(folder)
        self.prefix = build.options["prefix"]
        self.bin = Path(self.prefix) / build.options["bindir"]
        self.lib = Path(self.prefix) / build.options["libdir"]
        self.install(build)
        self.write_run()
        (self.folder / "inner.sh").write_text(INNER)
        self.console = self.folder / "console"
        with open(self.console, "wb") as console:
            self.outer = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "bash", "-c", OUTER, "bash", self.folder,
                 self.prefix], stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            self.pid = self.wait("systemd did not boot", self.find_init)
            self.wait("systemd did not boot", lambda: self.state("default.target") == "active")
        except BaseException:
            self.stop()
            raise

    def install(self, build):
        """
        Installs zerod. Further programs are put where an unprivileged user can reach them: the example trainer, and the
        stand-ins for the GPU engine and the driver.
        """
        installed = self.folder / "installed"
        subprocess.run(["meson", "install", "-C", build.folder, "--no-rebuild", "--quiet", "--destdir", installed],
                       check=True)
        self.units = Path(f"{installed}{self.prefix}/lib/systemd/system")
        shutil.copy(build.path("tests/example/zerod-example"), f"{installed}{self.bin}")
        for file, folder in ("zerod-engine-nccl-sim", self.bin), ("libcuda-sim.so", self.lib):
            file = Path(build.path(f"tests/sim/{file}"))
            if file.exists():  # a build of scripts/bench has no tests
                shutil.copy(file, f"{installed}{folder}")
        installed.chmod(0o755)

    def write_run(self):
        """Writes the files of /run that systemd needs at its start."""
        units = self.folder / "run" / "units"
        units.mkdir(parents=True)
        for name in TARGETS:
            wants = "Wants=systemd-journald.service\n" if name == "default" else ""
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n{wants}")
        for name in ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket"):
            shutil.copy(SYSTEMD.parent / "system" / name, units)
        (units / "trainer.conf").write_text("u trainer - trainer\nm trainer zerod\nu stranger - stranger\nu alice - alice\n"
                                            "g lab -\nu ann - ann\nm ann lab\nu operator - operator\nm operator zerod-admin\n")
        journald = self.folder / "run" / "systemd" / "journald.conf.d"
        journald.mkdir(parents=True)
        (journald / "test.conf").write_text("[Journal]\nStorage=volatile\nReadKMsg=no\nRateLimitBurst=0\n")

    def find_init(self):
        """Return: the pid, outside of the namespace, of its process 1. The shells above it have another name."""
        for shell in children(self.outer.pid):
            for child in children(shell):
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return child
        return None

    def wait(self, what, condition, timeout=60):
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > deadline or self.outer.poll() is not None:
                raise AssertionError(f"{what}\n{self.console.read_text(errors='replace')}")
            time.sleep(0.02)
        return value

    def stop(self):
        self.outer.terminate()
        self.outer.wait()

    # ---- inside ----------------------------------------------------------------------------------------------

    def path(self, inside):
        """Return: the path outside for a path inside the private machine."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def command(self, words, user=None):
        """Return: a command line that runs the command inside."""
        if user:
            words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *words]
        return ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup",
                "--wd=/", *map(str, words)]

    def run(self, *words, user=None, check=True, timeout=60):
        result = subprocess.run(self.command(words, user), capture_output=True, text=True, timeout=timeout,
                                stdin=subprocess.DEVNULL)
        assert not check or result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
        return result

    def ctl(self, *words, check=True):
        return self.run("systemctl", *words, check=check)

    def show(self, unit, key):
        return self.ctl("show", "--value", "--property", key, unit).stdout.strip()

    def state(self, unit):
        return self.ctl("is-active", unit, check=False).stdout.strip()

    def main_pid(self, unit):
        """Return: the pid, inside the namespace, of the unit's main process, or 0."""
        return int(self.show(unit, "MainPID"))

    def main_pid_outside(self, unit):
        inside = self.main_pid(unit)
        for entry in Path("/proc").iterdir():
            try:
                status = (entry / "status").read_text() if entry.name.isdigit() else ""
                same = os.stat(entry / "ns/pid").st_ino == os.stat(f"/proc/{self.pid}/ns/pid").st_ino if status else False
            except OSError:
                continue
            numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
            if same and inside and numbers[-1] == str(inside):
                return int(entry.name)
        return None

    def journal(self, *matches):
        """Return: journal entries as dictionaries."""
        self.run("journalctl", "--sync")
        out = self.run("journalctl", "--quiet", "--no-pager", "--output=json", *matches).stdout
        return [json.loads(line) for line in out.splitlines()]

    # ---- jobs ------------------------------------------------------------------------------------------------

    def configure(self, job, config, drop_in=None):
        """Writes /etc/zerod/JOB.yaml, and a drop-in for zerod@JOB.service."""
        config = {"job": job, "listen": {"socket": f"/run/zerod/{job}.sock", "allow_groups": ["zerod"]}, **config}
        self.path(f"/etc/zerod/{job}.yaml").write_text(json.dumps(config, indent=2))
        self.drop_in(job, drop_in)

    def drop_in(self, job, text):
        if text:
            folder = self.path(f"/run/units/zerod@{job}.service.d")
            folder.mkdir(exist_ok=True)
            (folder / "test.conf").write_text(text)
        self.ctl("daemon-reload")

    def zerodctl(self, job, *words, check=True, user=None):
        return self.run(self.bin / "zerodctl", "--socket", f"/run/zerod/{job}.sock", *words, check=check, user=user)

    def trainer(self, job, rank, *options, user="trainer", env=()):
        """Starts the example trainer inside. env: words NAME=VALUE."""
        return subprocess.Popen(
            self.command(["env", f"LD_LIBRARY_PATH={self.lib}", *env, self.bin / "zerod-example", "--socket",
                          f"/run/zerod/{job}.sock", "--rank", rank, "--width", 64, "--layers", 2, "--heads", 4, *options],
                         user),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill_main(self, unit, number=signal.SIGKILL):
        """Sends a signal to the unit's main process. Return: the process's pid."""
        pid = self.main_pid(unit)
        assert pid, f"{unit} has no process"
        self.run("kill", f"-{int(number)}", pid)
        return pid
