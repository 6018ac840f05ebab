# What setup_vllm.sh and setup_sglang.sh share; each sources this file after it has set
#
#   engine=vllm  label=vLLM  version=0.32.0  made=bin/vllm     (a file that only a whole environment has)
#
# Rules: safe to repeat (a finished environment is left alone, a half-made one is completed); packages come from
# wherever pip is configured to look (PIP_* variables and pip.conf hold); nothing outside VENV is touched.
TORCH=2.13.0+cpu

say() { printf 'setup_%s: %s\n' "$engine" "$*"; }
die() { printf 'setup_%s: %s\n' "$engine" "$*" >&2; exit 1; }

# begin "$@": reads the folder of the environment, and ends the script where that is whole already.
begin() {
  [ $# -eq 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] ||
    die "usage: setup_$engine.sh VENV   (a folder to make, or to complete)"
  venv=$1
  py=$venv/bin/python
  done_mark=$venv/.$engine-$version-ready
  if [ -e "$done_mark" ] && [ -x "$venv/$made" ]; then
    say "$venv already holds $label $version"
    exit 0
  fi
}

# wants_python "EXPRESSION OF sys.version_info" WHY NAME...: PYTHON, or the first of the programs named, must fit.
wants_python() {
  local fits=$1 why=$2 name
  shift 2
  if [ -z "${PYTHON:-}" ]; then
    for name in "$@"; do PYTHON=$(command -v "$name") && break; done || die "no $1 found; set PYTHON"
  fi
  "$PYTHON" -c "import sys; v = sys.version_info[:2]; sys.exit(not ($fits))" || die "$why, $PYTHON is not; set PYTHON"
}

installed() {
  "$py" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true
}

# The environment and torch, whose CPU build is asked for by name: a CUDA build is never fetched.
make_environment() {
  [ -x "$py" ] || { say "making $venv"; "$PYTHON" -m venv "$venv"; }
  if [ "$(installed torch)" != "$TORCH" ]; then
    say "torch $TORCH"
    "$py" -m pip install --quiet "torch==$TORCH" ||
      die "pip found no torch $TORCH: set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to a place that holds torch's CPU wheels"
  fi
}

site_packages() { "$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

# finish: from now on the environment counts as whole.
finish() {
  : >"$done_mark"
  say "ready. Now:  export PREFIXROUTE_$(printf %s "$engine" | tr a-z A-Z)_ENV=$(cd "$venv" && pwd)"
}
