# Finds the Python environment that runs titanlike, or makes one. Sourced by run_train.sh, run_tests.sh and .ci/run.
#
#   use_environment run|dev    sets $python; dev has what the tests need as well
#
# Taken is, in this order: an active environment that has titanlike and torch, as it is; the interpreter
# TITANLIKE_PYTHON; .venv, which is made where it is missing, half-made or older than pyproject.toml and lock file.
# TITANLIKE_VENV names another folder for .venv, and then nothing else is looked for. A torch that some Python of this
# machine already has is borrowed from there, not downloaded again. The code that runs is always this checkout's.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

use_environment() {
  kind=$1
  venv=${TITANLIKE_VENV:-$root/.venv}
  state=$venv/.titanlike # our notes: lock, making, borrowed, and the stamps run and dev
  local needs=(torch torchdata pydantic tokenizers pyarrow tensorboard)
  [ "$kind" = run ] || needs+=(pytest pytest_timeout hypothesis)
  python=$venv/bin/python
  if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}${TITANLIKE_PYTHON:-}" ] && is_made; then return; fi # no need to ask others
  if [ -z "${TITANLIKE_VENV:-}" ]; then
    python=$(command -v python3 || command -v python || true)
    if installed titanlike "${needs[@]}"; then return; fi
    if [ -n "${TITANLIKE_PYTHON:-}" ]; then
      python=$TITANLIKE_PYTHON
      installed "${needs[@]}" || die "TITANLIKE_PYTHON=$python lacks some of: ${needs[*]}. To install them:" \
        "  $python -m pip install -e '${root}[dev,wandb,lowbit]' -c $root/constraints.txt"
      return
    fi
  fi
  python=$venv/bin/python
  if is_made; then return; fi
  if [ ! -e "$state" ] && installed "${needs[@]}"; then return; fi # somebody's own .venv that will do
  make_environment
}

# Whether $python has these modules: looks for them and imports none. The checkout doesn't count as titanlike.
installed() {
  (cd / && PYTHONPATH=${PYTHONPATH#"$root"} "$python" -c '
import sys
from importlib.util import find_spec
sys.exit(sys.version_info < (3, 10) or not all(map(find_spec, sys.argv[1:])))' "$@") 2> /dev/null
}

# A stamp is written when everything is installed, and holds what it was installed from.
is_made() {
  [ -x "$python" ] && [ -d "$(borrowed)" ] && grep -qsxF "$(wanted)" "$state/dev" "$state/$kind"
}

wanted() { cat "$root/pyproject.toml" "$root/constraints.txt" | cksum; }

borrowed() { cat "$state/borrowed" 2> /dev/null || echo /; }

make_environment() {
  mkdir -p "$state"
  lock
  if ! is_made; then
    is_usable || make_venv
    install_packages
  fi
  unlock
}

is_usable() {
  [ ! -e "$state/making" ] && [ -d "$(borrowed)" ] &&
    { "$python" -m pip --version || "$python" -m ensurepip; } > /dev/null 2>&1
}

make_venv() {
  local base='' torch_folder=''
  [ -e "$state/making" ] || [ -e "$venv/pyvenv.cfg" ] || [ "$venv" = "$root/.venv" ] || [ "$(ls -A "$venv")" = .titanlike ] ||
    die "$venv is neither empty nor an environment: choose another TITANLIKE_VENV"
  find_base
  say "making $venv with $base"
  touch "$state/making"
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .titanlike -exec rm -rf {} +
  rm -f "$state"/{run,dev,borrowed}
  if "$base" -c 'import ensurepip, venv' 2> /dev/null; then
    "$base" -m venv "$venv"
  elif command -v uv > /dev/null; then
    uv venv --quiet --allow-existing --seed --python "$base" "$venv"
  elif "$base" -m virtualenv --version > /dev/null 2>&1; then
    "$base" -m virtualenv --quiet "$venv"
  elif command -v virtualenv > /dev/null; then
    virtualenv --quiet --python "$base" "$venv"
  else
    die "$base can't make an environment: it lacks ensurepip, and there is neither uv nor virtualenv. To install it:" \
      "  $(install_line)"
  fi || die "$venv could not be made"
  if [ -n "$torch_folder" ]; then
    say "taking torch from $torch_folder"
    echo "$torch_folder" > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    echo "$torch_folder" > "$state/borrowed"
  fi
}

# Sets base to a Python of 3.10 or newer, the first with a torch that will do, and torch_folder to where that torch is.
find_base() {
  local candidate
  for candidate in python3 python python3.{13,12,11,10,14}; do
    candidate=$(command -v "$candidate") || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || continue
    base=${base:-$candidate}
    torch_folder=$(torch_of "$candidate") && base=$candidate && return
  done
  [ -n "$base" ] || die "there is no Python of 3.10 or newer. To install it:" "  $(install_line)"
}

torch_of() {
  (cd / && PYTHONPATH='' "$1" -W ignore -c '
from importlib.metadata import version
from pathlib import Path
assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 11)
import torch
print(Path(torch.__file__).parents[1])') 2> /dev/null
}

install_packages() {
  local extras=wandb,lowbit
  [ "$kind" = run ] || extras=dev,$extras
  touch "$state/making"
  if [ -e "$state/borrowed" ]; then
    grep -vE '^(torch|triton|nvidia-.*|cuda-.*)==' "$root/constraints.txt" > "$state/constraints.txt"
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> "$state/constraints.txt"
  else
    cp "$root/constraints.txt" "$state/constraints.txt"
    installed torch || say "there is no torch on this machine: it will be installed, which can mean 3 GB to download"
  fi
  say "installing titanlike[$extras]; this is done once"
  "$python" -m pip install -qq --disable-pip-version-check -e "${root}[$extras]" -c "$state/constraints.txt" ||
    die "the packages could not be installed; the next start begins anew"
  "$python" -c 'import torch, titanlike' || die "torch can't be imported from $venv"
  wanted > "$state/$kind"
  rm "$state/making"
}

# One maker at a time, on all the nodes that share the disk.
lock() {
  local waiting="another start is making $venv: waiting for it"
  if command -v flock > /dev/null; then
    exec 9> "$state/lock"
    flock -n 9 2> /dev/null && return
    if [ $? = 1 ]; then say "$waiting" && flock 9 && return; fi
  fi
  if ! mkdir "$state/lock.d" 2> /dev/null; then
    say "$waiting (if that start is dead, remove $state/lock.d)"
    until mkdir "$state/lock.d" 2> /dev/null; do sleep 2; done
  fi
  trap 'rmdir "$state/lock.d"' EXIT
}

unlock() {
  if [ -d "$state/lock.d" ]; then rmdir "$state/lock.d" && trap - EXIT; fi
  exec 9>&-
}

install_line() {
  if command -v apt-get > /dev/null; then
    echo "apt-get install python3-venv"
  else
    echo "${base:-python3} -m pip install --user virtualenv"
  fi
}

say() { printf 'titanlike: %s\n' "$@" >&2; }

die() {
  say "$@"
  exit 2
}
