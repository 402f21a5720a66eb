#!/usr/bin/env bash
# Builds the source distribution and, from it, the wheel; installs the wheel with its
# core dependencies alone into a bare environment and uses it there.
#
#   scripts/package.sh [PYTHON…]    interpreters to try (default: that of .venv)
set -euo pipefail
unset PYTHONPATH # a checkout on it would count as installed
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A copy, because building leaves files beside the sources.
mkdir "$work/source"
git ls-files -z 2>/dev/null | xargs -0 cp --parents -t "$work/source" 2>/dev/null ||
    tar -cf - --exclude=./.venv --exclude=./.git . | tar -xf - -C "$work/source"
say "building"
"$PY" -m build --outdir "$work/dist" "$work/source" >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    exit 1
}
[ $# -gt 0 ] || set -- "$PY"
for python in "$@"; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "installing the wheel into a bare environment of Python $version"
    rm -rf "$work/bare"
    # Packages of the checkout's own environment must not be seen.
    make_venv "$python" "$work/bare"
    "$work/bare/bin/python" -m pip install -q --disable-pip-version-check \
        "$work"/dist/*.whl
    (cd "$work" && "$work/bare/bin/python" - "$work"/dist/* \
        <"$OLDPWD/scripts/package_check.py")
done
