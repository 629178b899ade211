# shellcheck shell=bash disable=SC2034
# What ./quickstart, ./test and .ci/run share: Debian packages, the Python environment, the build.
# Sourced with the repository as the current directory. Set install=0 to use what is present.
install=${install:-1}
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

cxx_packages=(g++ cmake ninja-build libhwy-dev libgtest-dev libdnnl-dev libcli11-dev
  nlohmann-json3-dev libfmt-dev libre2-dev libedit-dev libssl-dev libpcre2-dev libutf8proc-dev python3)
python_packages=(python3-dev python3-venv)
mpi_packages=(libopenmpi-dev openmpi-bin)
clang_packages=(clang libclang-rt-14-dev libomp-14-dev llvm)

say() { printf '\n== %s\n' "$*"; }

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "cannot install packages: neither root nor sudo; as root, run: $*"
  fi
}

# The Debian packages given, installed unless they are there.
need_packages() {
  local package missing=()
  for package; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  [[ ${#missing[@]} == 0 ]] && return
  [[ $install == 1 ]] ||
    die "missing Debian packages: ${missing[*]}; leave out --no-install, or: apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  # A third-party source that does not answer must not stop us; the install says what is missing.
  as_root apt-get -q update || true
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends \
    "${missing[@]}"
}

# Sets $python to an interpreter that has what the requirements file lists: that of .venv, made anew
# when the file changes. With --no-install: of .venv, of the active environment, or Debian's.
need_python() {
  local requirements=$1 stamp links=()
  if [[ $install == 0 ]]; then
    python=/usr/bin/python3
    [[ -n ${VIRTUAL_ENV:-} ]] && python=$VIRTUAL_ENV/bin/python
    [[ -x .venv/bin/python ]] && python=$PWD/.venv/bin/python
    "$python" tools/check_requirements.py "$requirements" || exit 1
  else
    python=$PWD/.venv/bin/python
    stamp=.venv/$(basename "$requirements").$(cat tests/requirements-*.txt | sha256sum | cut -c1-16)
    if [[ ! -e $stamp ]]; then
      say "Python packages of $requirements, into .venv"
      # Debian's own interpreter: one found on PATH may have no headers.
      "$python" -m pip --version >/dev/null 2>&1 || /usr/bin/python3 -m venv --clear .venv
      if grep -q '^llama-cpp-python' "$requirements"; then
        # Comes as source and compiles for minutes: its wheel is kept.
        mkdir -p .cache/wheels
        links=(--find-links .cache/wheels)
        "$python" -m pip wheel -q --no-deps "${links[@]}" --wheel-dir .cache/wheels \
          "$(grep '^llama-cpp-python' "$requirements")"
      fi
      "$python" -m pip install -q "${links[@]}" -r "$requirements"
      touch "$stamp"
    fi
  fi
  PATH=$(dirname "$python"):$PATH
}

# Finds nvcc, or says what goes without it. A CI run must have it.
find_nvcc() {
  PATH=$PATH:/usr/local/cuda/bin
  command -v nvcc >/dev/null && return
  [[ ${CI:-} == true ]] && die "no nvcc on PATH or in /usr/local/cuda/bin, and CI must build the plug-in"
  say "no nvcc: the CUDA plug-in is not built, its tests are skipped"
}

# build PRESET [TARGET [cmake flags]]
build() {
  say "building the $1 preset"
  mkdir -p build
  cmake --preset "$1" "${@:3}" >"build/$1.log" 2>&1 || {
    cat "build/$1.log" >&2
    die "cmake --preset $1 failed"
  }
  cmake --build --preset "$1" ${2:+--target "$2"}
}
