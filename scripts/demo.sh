#!/usr/bin/env bash
# Makes .venv and runs `shaderdsl demo` in it; arguments are passed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare plot,nn
exec "$PY" -m shaderdsl demo "$@"
