# Sourced by demo.sh, test.sh and .ci/run: makes the project's own Python
# environment in .venv and sees to a Vulkan driver. Needs a Debian or Ubuntu with
# Python 3.11 or newer; installs what is missing where it may (as root, or through
# sudo without a password) and says what to do where it may not.

say() { printf '%s\n' "shaderdsl: $*" >&2; }

# Runs apt-get as root where that needs no password; fails quietly where it does.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo -n "$@"
    else
        return 1
    fi
}

# Bounded, because a mirror may stall: APT_SECONDS for each of its two parts.
apt_install() {
    local log status=0
    command -v apt-get >/dev/null || return 1
    as_root true || return 1
    say "installing $* with apt-get"
    log=$(mktemp)
    as_root env DEBIAN_FRONTEND=noninteractive \
        timeout "${APT_SECONDS:-600}" apt-get update >"$log" 2>&1 || true
    as_root env DEBIAN_FRONTEND=noninteractive \
        timeout "${APT_SECONDS:-600}" apt-get install -y --no-install-recommends "$@" >"$log" 2>&1 || status=$?
    [ "$status" = 0 ] || tail -n 5 "$log" >&2
    rm -f "$log"
    return "$status"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# A venv by whichever way this machine has: venv, the package that Debian splits off
# from it, a venv that borrows the system's pip, virtualenv.
make_venv() {
    local python=$1 folder=$2 version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -m venv "$folder" >/dev/null 2>&1 && return 0
    rm -rf "$folder"
    if apt_install "python$version-venv" || apt_install python3-venv; then
        "$python" -m venv "$folder" && return 0
        rm -rf "$folder"
    fi
    if "$python" -m pip --version >/dev/null 2>&1 &&
        "$python" -m venv --without-pip "$folder" >/dev/null 2>&1; then
        "$python" -m pip --python "$folder/bin/python" install -q pip >&2 && return 0
    fi
    rm -rf "$folder"
    "$python" -m virtualenv -q "$folder" >/dev/null 2>&1 && return 0
    say "cannot make a Python environment; run: apt-get install python$version-venv"
    return 1
}

has_adapter() {
    "$PY" - <<'END' >/dev/null 2>&1
import sys, wgpu
kinds = {a.info["backend_type"] for a in wgpu.gpu.enumerate_adapters_sync()}
sys.exit(not kinds & {"Vulkan", "Metal", "D3D12"})
END
}

# prepare EXTRA: afterwards $PY is a Python that has shaderdsl[EXTRA].
prepare() {
    local extra=$1 python stamp wanted
    : "${XDG_RUNTIME_DIR:=${TMPDIR:-/tmp}}" # Mesa warns on every start without one
    export XDG_RUNTIME_DIR
    python=$(find_python) || {
        apt_install python3 || apt_install python3.11 || true
        python=$(find_python) || {
            say "needs Python 3.11 or newer; run: apt-get install python3.11"
            return 1
        }
    }
    PY="$PWD/.venv/bin/python"
    stamp="$PWD/.venv/installed-$extra"
    wanted=$(cksum <pyproject.toml)
    if [ ! -x "$PY" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$PY" ] || make_venv "$python" "$PWD/.venv" || return 1
        say "installing shaderdsl[$extra] into .venv (about a minute)"
        "$PY" -m pip install -q --disable-pip-version-check -e ".[$extra]" || return 1
        printf '%s\n' "$wanted" >"$stamp"
    fi
    if ! has_adapter; then
        apt_install mesa-vulkan-drivers || true
        has_adapter ||
            say "no adapter: going on with the device 'cpu'" \
                "(for WGSL: apt-get install mesa-vulkan-drivers)"
    fi
}
