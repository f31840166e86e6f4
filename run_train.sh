#!/usr/bin/env bash
# Trains what CONFIG_FILE describes:  ./run_train.sh [--section.key value …]      (--help shows every key)
#
#   CONFIG_FILE    a path, or the name of a file in train_configs/   (debug_model.toml)
#   NGPU           processes on this node                            (its GPUs, or 1 process on the CPU)
#   NNODES         nodes, or MIN:MAX if their number may change      (1)
#   RDZV_ENDPOINT  host:port where several nodes meet
#   MAX_RESTARTS   how often a failed job is started again           (0)
#   LOG_RANK       ranks that write to the console: "0,3" or "all"   (0)
#
# Exit codes: 0 done, 1 fault, 2 config, 3 data, 4 checkpoint, 75 stopped by a signal with everything saved.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment run
exec "$python" -m titanlike.cli train "${CONFIG_FILE:-debug_model.toml}" "$@"
