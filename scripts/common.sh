# SPDX-License-Identifier: Apache-2.0
#
# What the scripts share: saying things, installing what a build needs, building.
# Sourced, with `set -eu` in force; needs bash. Everything here is idempotent and
# quick when there is nothing to do.

# shellcheck shell=bash
ZEROD_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ZEROD_BUILD=$ZEROD_ROOT/build

# To build; Debian's names.
ZEROD_PACKAGES=(gcc g++ libc6-dev meson ninja-build pkg-config libuv1-dev libprotobuf-c-dev protobuf-c-compiler
    libfyaml-dev libsodium-dev libcmocka-dev libsystemd-dev libxxhash-dev libjson-c-dev libmicrohttpd-dev libgloo-dev
    libncurses-dev python3)
# To test; beyond those.
ZEROD_TEST_PACKAGES=(python3-venv strace tmux libopenblas0-pthread)
# Those whose completion is tested; bash is there.
ZEROD_SHELL_PACKAGES=(fish zsh)
ZEROD_TEST_MODULES=(numpy pytest pytest-xdist jsonschema pyyaml prometheus-client==0.26.0)
# To train with PyTorch. Which build of torch it is, pip's own configuration decides; the CPU's will do.
ZEROD_TORCH_MODULES=(torch==2.13.0 numpy)
# To test that, beside the callers that people use.
ZEROD_CALLERS=(transformers==4.57.6 accelerate==1.15.0 peft==0.21.2 lightning==2.6.6)
# Other versions of transformers, with which tests/callers trains the Trainer's program.
ZEROD_OTHER_TRANSFORMERS=(5.0.0 5.16.1 5.24.0)
# Other versions of torch, with which compiled models are trained. From PyPI each takes 5 GB.
ZEROD_OTHER_TORCHES=(2.6.0 2.11.0 2.14.1)
# Those of tests/callers, which take a gigabyte more, with quantized models and a logger.
ZEROD_MORE_CALLERS=(trl==1.16.0 sentence-transformers==5.7.0 bitsandbytes==0.50.2 tensorboard==2.20.0)
# timm needs torchvision, which needs a torch of its own. From PyPI they take 5.5 GB.
ZEROD_TIMM_MODULES=(torch==2.14.1 torchvision==0.29.1 timm==1.0.31)
# The documents as a site.
ZEROD_DOCS_MODULES=(mkdocs==1.6.1 mkdocs-material==9.8.2)
# To link the engine for GPUs in tests. The oldest that it is to run with: an engine refuses a NCCL older than its header.
ZEROD_NCCL=nvidia-nccl-cu13==2.28.9

say() {
    printf '%s\n' "$*"
}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# run_quietly LOG COMMAND...: shows the output only when the command fails.
run_quietly() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 && return 0
    cat "$log" >&2
    return 1
}

# Where no terminal shows progress: seconds between two lines.
progress_s=30

# show_progress LOG: until it is killed, or the script has ended, says how many of ninja's commands are done: on a
# terminal on one line, else now and then.
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

# compile FOLDER [TARGET]...: the targets, or everything. Shows progress, and the output only when it fails.
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

# What a script does with --gpu cannot be done here: neither passed nor failed.
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

# Prints the folder of NCCL for -Dnccl_dir; an empty line where the compiler finds it by itself.
find_nccl() {
    if [ -n "${NCCL_DIR:-}" ]; then
        say "$NCCL_DIR"
    elif "${CC:-cc}" -E -I/usr/local/cuda/include -include nccl.h -x c /dev/null >/dev/null 2>&1; then
        say
    else
        python3 -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0])' 2>/dev/null
    fi
}

# missing_packages NAME...: prints those that are not installed.
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

# Where there is no dpkg nobody can be asked, so only the tools are looked for; meson finds the libraries.
check_tools() {
    local tool missing=
    for tool in gcc meson ninja pkg-config protoc-c python3; do
        command -v "$tool" >/dev/null || missing+="$tool "
    done
    [ -z "$missing" ] || die "not found: $missing- install what Debian calls: $*"
}

# install_packages NAME...: installs those that are missing, or says which ones to install.
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
    # The list of packages may be old or absent: fetch it, but only if it has to be.
    # shellcheck disable=SC2086
    if ! { apt_get install $missing >"$log" 2>&1 ||
        { apt_get update >>"$log" 2>&1 && apt_get install $missing >>"$log" 2>&1; }; }; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "installing failed; these Debian packages are needed: apt-get install $missing"
    fi
    rm -f "$log"
}

# configure_tree FOLDER OPTION...: meson setup, or new options for a folder that has been set up.
configure_tree() {
    local folder=$1
    shift
    mkdir -p "$folder"
    if [ ! -f "$folder/build.ninja" ]; then
        run_quietly "$folder/configure.log" meson setup "$folder" "$ZEROD_ROOT" "$@" ||
            die "configuring failed"
    elif [ $# -gt 0 ] && ! meson configure "$folder" "$@" >"$folder/configure.log" 2>&1; then
        # A folder that was set up when there was no such option.
        run_quietly "$folder/configure.log" meson setup --reconfigure "$folder" "$ZEROD_ROOT" "$@" ||
            die "configuring failed"
    fi
}

# build_tree FOLDER OPTION...: configures and compiles everything.
build_tree() {
    configure_tree "$@"
    compile "$1"
}

# make_venv_of NAME MODULE...: build/NAME with these Python modules.
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

# make_venv: build/venv with the Python modules that the tests use, PyTorch and its callers among them.
make_venv() {
    make_venv_of venv "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TORCH_MODULES[@]}" "${ZEROD_CALLERS[@]}"
}

# make_torch_venv: build/venv-torch with PyTorch alone, for scripts/quickstart --torch.
make_torch_venv() {
    make_venv_of venv-torch "${ZEROD_TORCH_MODULES[@]}"
}

# get_nccl: build/nccl with include/ and lib/, out of the wheel that PyTorch uses. Nothing of it is installed.
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

# get_promtool: build/promtool, out of Debian's package prometheus, which is not installed: it would start a service.
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

# make_callers_venv: build/venv-callers, for tests/callers.
make_callers_venv() {
    make_venv_of venv-callers "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TORCH_MODULES[@]}" "${ZEROD_CALLERS[@]}" \
        "${ZEROD_MORE_CALLERS[@]}"
}

# make_transformers_venv VERSION: build/venv-transformers-VERSION.
make_transformers_venv() {
    make_venv_of "venv-transformers-$1" "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TORCH_MODULES[@]}" "${ZEROD_CALLERS[@]/#transformers==*/transformers==$1}"
}

# make_other_torch_venv VERSION: build/venv-torch-VERSION.
make_other_torch_venv() {
    make_venv_of "venv-torch-$1" "${ZEROD_TEST_MODULES[@]}" "torch==$1" numpy
}

# make_timm_venv: build/venv-timm, for tests/callers/timm_images.py.
make_timm_venv() {
    make_venv_of venv-timm "${ZEROD_TEST_MODULES[@]}" "${ZEROD_TIMM_MODULES[@]}"
}

# make_docs_venv: build/venv-docs, for scripts/docs.
make_docs_venv() {
    make_venv_of venv-docs "${ZEROD_DOCS_MODULES[@]}"
}

# Most tests wait most of the time, so there are more of them than processors.
n_workers=$((2 * $(nproc) < 8 ? 2 * $(nproc) : 8))

# run_unit TREE [OPTION]... [NAME]...: of what failed, all that it printed; of the rest, the closing lines of cmocka.
run_unit() {
    local failed=0
    meson test -C "$1" --no-rebuild --quiet --print-errorlogs --num-processes "$n_workers" "${@:2}" || failed=1
    grep -E '^\[  (PASSED|FAILED|SKIPPED) ' "$1/meson-logs/testlog.txt"
    return "$failed"
}

# run_pytest TREE [OPTION]...: -rs lists what was skipped, and why. ZEROD_VENV: another environment than build/venv.
run_pytest() {
    local build=$1
    shift
    env ZEROD_BUILD="$build" ZEROD_LEDGER_DRIVER="$build/tests/ledger-driver" PYTHONDONTWRITEBYTECODE=1 \
        "$ZEROD_BUILD/${ZEROD_VENV:-venv}/bin/python" -m pytest -q -rs -p no:cacheprovider \
        -n "$n_workers" "$@"
}
