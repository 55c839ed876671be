# SPDX-License-Identifier: Apache-2.0
#
# Shared by the scripts: messages, installation of packages, builds. Source it with bash, with `set -eu` in force. Each
# function is idempotent, and quick if there is nothing to do.

# shellcheck shell=bash
ZEROD_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ZEROD_BUILD=$ZEROD_ROOT/build

# Debian packages for a build.
ZEROD_PACKAGES=(gcc g++ libc6-dev meson ninja-build pkg-config libuv1-dev libprotobuf-c-dev protobuf-c-compiler
    libfyaml-dev libsodium-dev libcmocka-dev libsystemd-dev libxxhash-dev libjson-c-dev libmicrohttpd-dev libgloo-dev
    libncurses-dev python3)
# Further packages for the tests.
ZEROD_TEST_PACKAGES=(python3-venv strace tmux libopenblas0-pthread)
# Shells whose completion is tested, besides bash.
ZEROD_SHELL_PACKAGES=(fish zsh)
ZEROD_TEST_MODULES=(numpy pytest pytest-xdist jsonschema pyyaml prometheus-client==0.26.0)
# For training with PyTorch. pip's configuration selects the build of torch; a CPU build is enough.
ZEROD_TORCH_MODULES=(torch==2.13.0 numpy)
# For tests of training with PyTorch: callers of torch that people use.
ZEROD_CALLERS=(transformers==4.57.6 accelerate==1.15.0 peft==0.21.2 lightning==2.6.6)
# Other versions of transformers. tests/callers runs the Trainer's program with each.
ZEROD_OTHER_TRANSFORMERS=(5.0.0 5.16.1 5.24.0)
# Other versions of torch, for tests of compiled models. Each needs 5 GB from PyPI.
ZEROD_OTHER_TORCHES=(2.6.0 2.11.0 2.14.1)
# Further callers for tests/callers, with quantized models and a logger. They need another gigabyte.
ZEROD_MORE_CALLERS=(trl==1.16.0 sentence-transformers==5.7.0 bitsandbytes==0.50.2 tensorboard==2.20.0)
# timm needs torchvision, which needs a certain version of torch. From PyPI they need 5.5 GB.
ZEROD_TIMM_MODULES=(torch==2.14.1 torchvision==0.29.1 timm==1.0.31)
# For the documents as a site.
ZEROD_DOCS_MODULES=(mkdocs==1.6.1 mkdocs-material==9.8.2)
# For linking the engine for GPUs in tests. The oldest supported version, because an engine refuses a NCCL older than
# its header.
ZEROD_NCCL=nvidia-nccl-cu13==2.28.9

say() {
    printf '%s\n' "$*"
}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# run_quietly LOG COMMAND...: shows the command's output only if the command fails.
run_quietly() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 && return 0
    cat "$log" >&2
    return 1
}

# Seconds between two progress lines if there is no terminal.
progress_s=30

# show_progress LOG: shows how many of ninja's commands are done, until this function is killed or the script has ended.
# On a terminal it rewrites one line.
show_progress() {
    local log=$1 at said= n
    for ((n = 1; ; n++)); do
        sleep 1 >/dev/null 2>&1
        kill -0 $$ 2>/dev/null || return 0
        at=$(grep -o '^\[[0-9]*/[0-9]*\]' "$log" 2>/dev/null | tail -n 1)
        at=${at//[][]/}
        [ -n "$at" ] && [ "$at" != "$said" ] || continue
        if [ -t 1 ]; then
            printf '\rcompiling: %s of %s\033[K' "${at%/*}" "${at#*/}"
        elif [ $((n % progress_s)) = 0 ]; then
            say "compiling: ${at%/*} of ${at#*/}"
        else
            continue
        fi
        said=$at
    done
}

# compile FOLDER [TARGET]...: builds the targets, or everything. Shows progress, and the output only on a failure.
compile() {
    local log=$1/compile.log failed= watcher
    : >"$log"
    show_progress "$log" &
    watcher=$!
    ninja -C "$@" >"$log" 2>&1 || failed=1
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [ ! -t 1 ] || printf '\r\033[K'
    [ -n "$failed" ] || return 0
    cat "$log" >&2
    die "compiling failed"
}

# Ends a script whose --gpu cannot run on this machine, as neither passed nor failed.
skip_gpu() {
    printf 'scripts/%s --gpu: %s; nothing was run\n' "${0##*/}" "$*" >&2
    exit 77
}

need_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || skip_gpu "there is no GPU (nvidia-smi lists none)"
    command -v nvcc >/dev/null || skip_gpu "there is no nvcc on PATH"
    nccl_dir=$(find_nccl) ||
        skip_gpu "there is no NCCL (nccl.h is not found, python3 has no module nvidia.nccl, and NCCL_DIR is not set)"
}

# Prints NCCL's folder for -Dnccl_dir, or an empty line if the compiler finds NCCL by itself.
find_nccl() {
    if [ -n "${NCCL_DIR:-}" ]; then
        say "$NCCL_DIR"
    elif "${CC:-cc}" -E -I/usr/local/cuda/include -include nccl.h -x c /dev/null >/dev/null 2>&1; then
        say
    else
        python3 -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0])' 2>/dev/null
    fi
}

# missing_packages NAME...: prints the packages that are not installed.
missing_packages() {
    local name
    for name in "$@"; do
        dpkg-query -W -f='${db:Status-Abbrev}' "$name" 2>/dev/null | grep -q '^.i' || printf '%s ' "$name"
    done
}

# Runs apt-get as root.
apt_get() {
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends "$@"
}

# check_tools PACKAGE...: without dpkg, checks only that the tools exist; meson finds the libraries.
check_tools() {
    local tool missing=
    for tool in gcc meson ninja pkg-config protoc-c python3; do
        command -v "$tool" >/dev/null || missing+="$tool "
    done
    [ -z "$missing" ] || die "not found: $missing- install what Debian calls: $*"
}

# install_packages NAME...: installs the missing packages, or prints which ones to install.
install_packages() {
    local missing log
    command -v dpkg-query >/dev/null || {
        check_tools "$@"
        return
    }
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
        die "these Debian packages are missing, and installing them needs root: apt-get install $missing"
    fi
    say "installing: $missing"
    log=$(mktemp)
    # The list of packages may be old or absent. Fetch it only if the installation fails.
    # shellcheck disable=SC2086
    if ! { apt_get install $missing >"$log" 2>&1 ||
        { apt_get update >>"$log" 2>&1 && apt_get install $missing >>"$log" 2>&1; }; }; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "installing failed; these Debian packages are needed: apt-get install $missing"
    fi
    rm -f "$log"
}

# configure_tree FOLDER OPTION...: runs meson setup, or changes the options of a folder that is set up.
configure_tree() {
    local folder=$1
    shift
    mkdir -p "$folder"
    if [ ! -f "$folder/build.ninja" ]; then
        run_quietly "$folder/configure.log" meson setup "$folder" "$ZEROD_ROOT" "$@" ||
            die "configuring failed"
    elif [ $# -gt 0 ] && ! meson configure "$folder" "$@" >"$folder/configure.log" 2>&1; then
        # The folder was set up before this option existed.
        run_quietly "$folder/configure.log" meson setup --reconfigure "$folder" "$ZEROD_ROOT" "$@" ||
            die "configuring failed"
    fi
}

# build_tree FOLDER OPTION...: configures and compiles everything.
build_tree() {
    configure_tree "$@"
    compile "$1"
}

# make_venv_of NAME MODULE...: makes build/NAME with these Python modules.
make_venv_of() {
    local name=$1 venv=$ZEROD_BUILD/$1 stamp=$ZEROD_BUILD/$1/zerod-modules
    shift
    [ "$(cat "$stamp" 2>/dev/null)" = "$*" ] && return 0
    install_packages "${ZEROD_TEST_PACKAGES[@]}"
    say "installing into build/$name: $*"
    mkdir -p "$ZEROD_BUILD"
    run_quietly "$ZEROD_BUILD/$name.log" python3 -m venv "$venv" || die "no virtual environment in build/$name"
    run_quietly "$ZEROD_BUILD/$name.log" "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" ||
        die "these Python modules could not be installed: $*"
    printf '%s\n' "$*" >"$stamp"
}

# make_venv: makes build/venv with the Python modules of the tests, including PyTorch and its callers.
make_venv() {
    make_venv_of venv "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TORCH_MODULES[@]}" "${ZEROD_CALLERS[@]}"
}

# make_torch_venv: makes build/venv-torch with PyTorch alone, for scripts/quickstart --torch.
make_torch_venv() {
    make_venv_of venv-torch "${ZEROD_TORCH_MODULES[@]}"
}

# get_nccl: makes build/nccl with include/ and lib/ from the wheel that PyTorch uses. Installs nothing.
get_nccl() {
    local work
    [ "$(cat "$ZEROD_BUILD/nccl/zerod-version" 2>/dev/null)" = "$ZEROD_NCCL" ] && return 0
    say "downloading $ZEROD_NCCL"
    work=$(mktemp -d)
    run_quietly "$ZEROD_BUILD/nccl.log" "$ZEROD_BUILD/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
        --dest "$work" "$ZEROD_NCCL" || die "NCCL could not be downloaded"
    rm -rf "$ZEROD_BUILD/nccl"
    python3 -m zipfile -e "$work"/nvidia_nccl_*.whl "$work"
    mv "$work/nvidia/nccl" "$ZEROD_BUILD/nccl"
    rm -rf "$work"
    printf '%s\n' "$ZEROD_NCCL" >"$ZEROD_BUILD/nccl/zerod-version"
}

# get_promtool: extracts build/promtool from Debian's package prometheus. The package is not installed, because it would
# start a service.
get_promtool() {
    local work
    if command -v promtool >/dev/null || [ -x "$ZEROD_BUILD/promtool" ] || ! command -v dpkg-deb >/dev/null; then
        return
    fi
    work=$(mktemp -d)
    if ! (cd "$work" && { apt-get download prometheus || { apt_get update && apt-get download prometheus; }; } &&
        dpkg-deb -x prometheus_*.deb . && cp usr/bin/promtool "$ZEROD_BUILD/promtool") >"$work/log" 2>&1; then
        say "there is no promtool, so Prometheus' rules are not checked: $(tail -n 1 "$work/log")"
    fi
    rm -rf "$work"
}

# make_callers_venv: makes build/venv-callers, for tests/callers.
make_callers_venv() {
    make_venv_of venv-callers "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TORCH_MODULES[@]}" "${ZEROD_CALLERS[@]}" \
        "${ZEROD_MORE_CALLERS[@]}"
}

# make_transformers_venv VERSION: makes build/venv-transformers-VERSION.
make_transformers_venv() {
    make_venv_of "venv-transformers-$1" "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TORCH_MODULES[@]}" "${ZEROD_CALLERS[@]/#transformers==*/transformers==$1}"
}

# make_other_torch_venv VERSION: makes build/venv-torch-VERSION.
make_other_torch_venv() {
    make_venv_of "venv-torch-$1" "${ZEROD_TEST_MODULES[@]}" "torch==$1" numpy
}

# make_timm_venv: makes build/venv-timm, for tests/callers/timm_images.py.
make_timm_venv() {
    make_venv_of venv-timm "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TIMM_MODULES[@]}"
}

# make_docs_venv: makes build/venv-docs, for scripts/docs.
make_docs_venv() {
    make_venv_of venv-docs "${ZEROD_DOCS_MODULES[@]}"
}

# Most tests wait most of the time, so more of them run than there are processors.
n_workers=$((2 * $(nproc) < 8 ? 2 * $(nproc) : 8))

# run_unit TREE [OPTION]... [NAME]...: runs the unit tests. Prints the output of failed programs, and cmocka's closing
# lines of all.
run_unit() {
    local failed=0
    meson test -C "$1" --no-rebuild --quiet --print-errorlogs --num-processes "$n_workers" "${@:2}" || failed=1
    grep -E '^\[  (PASSED|FAILED|SKIPPED) ' "$1/meson-logs/testlog.txt"
    return "$failed"
}

# run_pytest TREE [OPTION]...: runs pytest. -rs lists the skipped tests and the reasons. ZEROD_VENV names another
# environment than build/venv.
run_pytest() {
    local build=$1
    shift
    env ZEROD_BUILD="$build" ZEROD_LEDGER_DRIVER="$build/tests/ledger-driver" PYTHONDONTWRITEBYTECODE=1 \
        "$ZEROD_BUILD/${ZEROD_VENV:-venv}/bin/python" -m pytest -q -rs -p no:cacheprovider \
        -n "$n_workers" "$@"
}
