#!/usr/bin/env bash
# Makes .venv and runs the tests in it; arguments are passed on to pytest.
# SHADERDSL_EXPECT_ADAPTER=1 makes a missing adapter a failure instead of skips.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare dev
exec "$PY" -m pytest -n "${SHADERDSL_TEST_WORKERS:-auto}" "$@"
