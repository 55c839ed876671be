# SPDX-License-Identifier: Apache-2.0
"""
The wheel and the Debian packages of scripts/wheel and scripts/packages, in clean roots of Debian 12 and 13.

Debian 12's root gets torch by pip. Debian 13's root has Debian's torch, the oldest that zerod supports (2.6).
"""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT
from roots import Root

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.skipif(Root.missing() is not None, reason=str(Root.missing()))]

PACKAGES = {"bookworm": ["python3-venv", "systemd", "man-db"], "trixie": ["python3-venv", "python3-torch", "systemd", "man-db"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the wheel and the packages."""
    folder = tmp_path_factory.mktemp("made")
    for script in ("wheel", "packages"):
        result = subprocess.run([ROOT / "scripts" / script, "--out", folder], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    debs = {deb.name.split("_")[0]: deb for deb in folder.glob("*.deb") if "dbgsym" not in deb.name}
    return SimpleNamespace(wheel=next(folder.glob("*.whl")), debs=debs)


@pytest.fixture(scope="module")
def train():
    """Return: the program of the README's first use."""
    return re.search(r"```python\n(# train.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


@pytest.fixture(scope="module", params=PACKAGES)
def root(request, tmp_path_factory, train):
    folder = tmp_path_factory.mktemp("roots") / request.param
    root = Root(folder, request.param, PACKAGES[request.param])
    root.suite = request.param
    (folder / "tmp/train.py").write_text(train)
    yield root
    shutil.rmtree(folder)


def install_torch(root, tmp_path):
    """Makes an environment with torch. Return: the pip options that it needs."""
    if root.suite == "trixie":
        root.run("python3 -m venv --system-site-packages /env")
        return "--no-deps"  # Debian's torch and sympy have other versions than torch's metadata require
    version = root.run("python3 -c 'import sys; print(*sys.version_info[:2], sep=str())'").strip()
    here = f"{sys.version_info.major}{sys.version_info.minor}"
    assert version == here, f"pip fetches torch for Python {here}; the root has {version}"
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "torch==2.13.0", "--dest", tmp_path], check=True)
    root.give(*tmp_path.glob("*.whl"))
    root.run("python3 -m venv /env")
    return ""


def trains(root, path=""):
    """Two ranks must train, and a mistake must be explained."""
    said = root.run(f"{path}zerodrun -n 2 -- python3 train.py")
    assert "[0] step 200: loss is below 1: True" in said
    said = root.run(f"{path}zerodrun -n 2 -- python3 train.py with-mistake", status=1)
    assert "E1001 duplicate gradient refused: rank 1, step 3" in said and "called at train.py:16" in said


def test_wheel(root, made, tmp_path):
    """One command installs zerod next to torch, without a compiler, a library or other packages."""
    options = install_torch(root, tmp_path)
    root.give(made.wheel, ROOT / "tests/explain/ready-once-reentrant.txt")
    root.run(f"/env/bin/pip install --quiet --no-index --find-links /tmp {options} {made.wheel.name}")
    in_env = "PATH=/env/bin:$PATH "
    trains(root, in_env)
    for command in ("zerodctl", "python3 -m zerod"):
        said = root.run(f"{in_env}{command} explain ready-once-reentrant.txt")
        assert "E1001 " in said and "use_reentrant=False" in said
    assert "zerod.yaml" in root.run("man -P cat -M /env/share/man zerod.yaml 2>&1")
    for program in ("zerod", "zerodctl", "zerodrun"):
        assert f"{program} {version()}" in root.run(f"/env/bin/{program} --version")
    root.run("cd /env/share/bash-completion/completions; ls zerod zerodrun zerodctl")
    # zerodctl knows the root's terminals, and therefore asks for the daemon.
    for terminal, said, status in (("xterm-256color", "no daemon on", 69), ("no-such", "knows no terminal", 64)):
        command = f"TERM={terminal} script -qec '/env/bin/zerodctl --socket /none top' /dev/null"
        assert said in root.run(command, status=status)
    assert "is started by zerod" in root.run("/env/bin/zerod-engine-gloo", status=2)
    if root.suite == "trixie":  # torch 2.6
        (root.folder / "tmp/stage3.yaml").write_text("zero_optimization: {stage: 3, stage3_on_one_node: gathered}\n")
        said = root.run(f"{in_env}zerodrun -n 2 --config stage3.yaml -- python3 train.py", status=1)
        assert "stage 3 needs a newer torch than 2.6" in said
    root.run("/env/bin/pip uninstall --quiet --yes zerod")
    assert root.run("find /env -name '*zerod*'") == ""


def version():
    return re.search(r"version: '(.*?)'", (ROOT / "meson.build").read_text())[1]


def test_packages(root, made, tmp_path):
    """
    The packages are installed by apt with their dependencies, enabled, upgraded while enabled, removed and purged.
    """
    root.give(*made.debs.values())
    root.run("apt-get update")
    root.run("apt-get install --yes --no-install-recommends ./*.deb", timeout=600)
    assert f"zerod {version()}" in root.run("zerod --version")
    assert re.search(r"^zerod:x:\d+", root.run("getent passwd zerod; getent group zerod-admin"))
    assert f"zerod-exporter {version()}" in root.run("zerod-exporter --version")
    root.run("cd /usr/share; ls bash-completion/completions/zerodrun fish/vendor_completions.d/zerodrun.fish zsh/vendor-completions/_zerod")
    assert "job" in root.run("zerod --config /usr/share/zerod/stage2.yaml --print-config")
    assert "# As a system service" in root.run("cat /usr/share/doc/zerod/docs/service.md")
    if root.suite == "trixie":
        trains(root)
    else:  # its torch is too old
        assert "torch" in root.run("python3 -c 'import zerod'", status=1)
    root.run("cp /usr/share/zerod/stage2.yaml /etc/zerod/pretrain.yaml; mkdir -p /var/lib/zerod/step-1")
    root.run("systemctl enable zerod@pretrain.socket zerod@pretrain.service zerod-exporter.service")

    root.give(newer(made.debs["zerod"], tmp_path))
    root.run("dpkg --install zerod-newer.deb")
    assert root.run("systemctl is-enabled zerod@pretrain.socket zerod@pretrain.service").split() == ["enabled"] * 2
    assert root.run("dpkg-query --show --showformat '${Version}' zerod").endswith("~newer")

    root.run("dpkg --purge zerod-engine-gloo zerod-exporter zerod libzerod-dev python3-zerod libzerod0")
    left = set(root.run("find / -xdev -name '*zerod*' -not -path '/tmp/*' -not -path '/env/*' -not -path '/proc/*' "
                        "-not -path '/dev/*'").split())  # fmt: skip
    # Only files that a user wrote are left.
    assert left == {"/etc/zerod", "/var/lib/zerod"}


def newer(deb, folder):
    """Return: the same package with a later version."""
    subprocess.run(["dpkg-deb", "--raw-extract", deb, folder / "unpacked"], check=True)
    control = folder / "unpacked/DEBIAN/control"
    control.write_text(re.sub(r"^Version: (.*)$", r"Version: \1+1~newer", control.read_text(), flags=re.MULTILINE))
    subprocess.run(["dpkg-deb", "--build", folder / "unpacked", folder / "zerod-newer.deb"], check=True, capture_output=True)
    return folder / "zerod-newer.deb"


def test_too_old():
    """auditwheel refuses functions that a platform lacks, and the script names a system to build on."""
    result = subprocess.run([ROOT / "scripts/wheel", "--platform", "manylinux_2_17_x86_64"], capture_output=True, text=True)
    assert result.returncode == 1
    assert re.search(r"needs more than manylinux_2_17_x86_64 has.*build on Debian 12", result.stderr, re.DOTALL)
