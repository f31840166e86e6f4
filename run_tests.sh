#!/usr/bin/env bash
# Runs the tests:  ./run_tests.sh [--slow] [pytest's arguments]      (--slow adds those that take minutes)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
exec "$python" -m pytest "$@"
