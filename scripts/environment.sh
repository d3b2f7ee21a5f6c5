# Makes or reuses .venv with this project in it. Sourced by serve, test and check; not a program.
#
#   root                    the folder of the project, an absolute path
#   python                  the interpreter inside .venv
#   prepare [EXTRA]         makes both true, with an extra of pyproject.toml such as `dev`
#
# What has been installed is remembered by a stamp inside .venv: the folder and the pyproject.toml
# it was installed from. An equal stamp means there is nothing to do, so a warm start costs a few
# milliseconds. A marker lies in .venv while an installation runs; finding one means that the last
# one was cut short and nothing in the folder can be trusted, so it is made again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }

# Succeeds if $1 is a Python that runs, is new enough, and can make virtual environments. Version
# managers put shims on PATH that exist and fail, so only running it tells. Free-threaded builds
# are passed over: not every dependency has wheels for them.
usable() {
  "$1" -c 'import ensurepip, sys, sysconfig, venv
sys.exit(sys.version_info < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' \
    >/dev/null 2>&1
}

# Prints the first usable Python, or nothing.
find_python() {
  local version candidate
  for version in 3.12 3.13 3.14 3.15; do
    for candidate in "python$version" \
      "$HOME"/.pyenv/versions/"$version"*/bin/python3 \
      "$HOME"/.local/share/uv/python/cpython-"$version"*/bin/python3 \
      "$HOME"/.local/share/mise/installs/python/"$version"*/bin/python3 \
      "$HOME"/.asdf/installs/python/"$version"*/bin/python3 \
      /opt/homebrew/bin/"python$version" /usr/local/bin/"python$version"; do
      usable "$candidate" && command -v "$candidate" && return
    done
  done
  for candidate in python3 python \
    "$HOME"/{miniforge3,mambaforge,miniconda3,anaconda3}/bin/python3 \
    "$HOME"/{miniforge3,mambaforge,miniconda3,anaconda3}/envs/*/bin/python3 \
    /opt/conda/bin/python3; do
    usable "$candidate" && command -v "$candidate" && return
  done
  return 0
}

make_venv() {
  local found
  found=$(find_python)
  rm -rf "$venv"
  if [ -n "$found" ]; then
    say "Making $venv with $found"
    "$found" -m venv "$venv"
  elif command -v uv >/dev/null 2>&1; then
    say "Making $venv with uv, which brings its own Python"
    uv venv --seed --python '>=3.12' "$venv"
  else
    say "Python 3.12 or newer with its venv module is needed. None was found on PATH, nor in"
    say "pyenv, uv, mise, asdf or conda. Install one of these and run this again:"
    say "  Debian 13, Ubuntu 24.04 or newer:  apt install python3 python3-venv"
    say "  macOS:                             brew install python@3.13"
    say "  anywhere:                          pyenv (pyenv install 3.13) or uv"
    exit 1
  fi
}

stamp_text() { printf '%s\n' "$root" && cat "$root/pyproject.toml"; }

is_stamped() { [ -e "$venv/installed-$1" ] && stamp_text | cmp -s - "$venv/installed-$1"; }

# Succeeds if $1 (`core` or an extra) is installed. What holds the tools for development also
# holds what serving needs.
is_installed() {
  [ -x "$python" ] && [ ! -e "$venv/installing" ] || return 1
  is_stamped "$1" || { [ "$1" = core ] && is_stamped dev; }
}

has_pip() { "$python" -m pip --version >/dev/null 2>&1; }

# Leaves a .venv whose Python and pip run.
repair_venv() {
  if [ -e "$venv/installing" ]; then
    say "The last installation was interrupted; starting again."
  elif usable "$python"; then
    has_pip || "$python" -m ensurepip --upgrade >/dev/null 2>&1 || true
    has_pip && return
  fi
  make_venv
}

prepare() {
  local extra=${1:-core} target=$root status=0
  [ "$extra" = core ] || target="$root[$extra]"
  is_installed "$extra" && return
  # Two first starts at once wait for each other, where the system has flock.
  if command -v flock >/dev/null 2>&1; then
    exec 9<"$root"
    flock 9
  fi
  if ! is_installed "$extra"; then
    repair_venv
    say "Installing deepinfer-jax and what it needs into $venv (a minute or two)"
    # The marker survives Ctrl-C and a crash, but not an orderly failure such as no network, which
    # leaves what was there before as it was.
    trap 'exit 130' INT TERM
    : >"$venv/installing"
    "$python" -m pip install --disable-pip-version-check --editable "$target" >&2 || status=$?
    trap - INT TERM
    if [ "$status" -ne 0 ]; then
      [ "$status" -gt 128 ] || rm -f "$venv/installing"
      say "The installation failed; the reason stands above."
      exit 1
    fi
    stamp_text >"$venv/installed-$extra"
    rm -f "$venv/installing"
  fi
  exec 9<&-
}
