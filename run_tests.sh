#!/usr/bin/env bash
# Runs the tests:  ./run_tests.sh [--slow] [pytest's arguments]      (--slow adds those that take minutes)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# Most tests leave one of two cores idle. More workers than that gain nothing: ranks fill the rest of any machine.
[ $# -gt 0 ] || set -- --numprocesses=2 --dist=worksteal
exec "$python" -m pytest "$@"
