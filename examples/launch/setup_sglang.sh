#!/usr/bin/env bash
# Makes a virtual environment that runs SGLang on a CPU, for `prefixroute demo --engine sglang`.
#
#   examples/launch/setup_sglang.sh VENV
#
# Takes about 2.7 GB and a few minutes, and may be repeated. PYTHON names the interpreter, which must be 3.11: the
# engine's wheel is.
set -euo pipefail

engine=sglang label=SGLang version=0.5.23 made=bin/python
. "$(dirname "$0")/setup_common.sh"
begin "$@"
here=$(cd "$(dirname "$0")" && pwd)

# --- what must be there before 3 GB are fetched
[ "$(uname -sm)" = "Linux x86_64" ] || die "SGLang's wheel is for Linux on x86-64"
wants_python 'v == (3, 11)' "SGLang $version's wheel is for Python 3.11" python3.11
"$PYTHON" -c 'import os; v = os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."); exit([*map(int, v)] < [2, 34])' ||
  die "SGLang's wheel needs glibc 2.34 or newer"

# --- 1. the environment and torch
make_environment

# --- 2. the engine, and of its requirements what serving a text model on a CPU imports
if [ "$(installed sglang)" != "$version" ]; then
  say "SGLang $version and its requirements"
  "$py" -m pip install --quiet \
    apache-tvm-ffi==0.1.11 openai==2.8.0 sentencepiece==0.2.1 tokenizers==0.23.2 transformers==5.19.0 xgrammar==0.2.7 \
    aiohttp dill distro einops fastapi gguf interegular IPython jsonschema msgspec ninja numpy nvidia-ml-py orjson \
    packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq regex \
    requests setproctitle soundfile tqdm triton uvicorn uvloop watchfiles xxhash zstandard
  "$py" -m pip install --quiet --no-deps compressed-tensors==0.18.0 loguru
  "$py" -m pip install --quiet --no-deps "sglang==$version"
fi

# --- 3. stand-ins for two packages that the engine imports but does not use on a CPU
site=$(site_packages)
cat >"$site/prefixroute_stand_ins.py" <<'PYTHON_END'
"""Importable nothing for packages that are not installed, so that a CPU engine gets past its imports.

Whoever imports one of ABSENT, or a name from it, gets `Nothing`; whoever asks `importlib.util.find_spec` whether
it is there is told the truth. An installed package is found first and wins.
"""

import importlib.machinery
import importlib.util
import sys
import types

ABSENT = ("sgl_kernel", "torchvision")


def covers(name):
    return name.partition(".")[0] in ABSENT


def attribute(name):
    # protocols (__iter__, __path__, ...) are looked up to learn what an object can do: Nothing can do none
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing


class NothingType(type):
    def __getattr__(cls, name):
        return attribute(name)

    def __call__(cls, *args, **kwargs):
        if cls is not Nothing:
            return super().__call__(*args, **kwargs)
        return args[0] if len(args) == 1 and callable(args[0]) else Nothing  # as a decorator it changes nothing

    def __or__(cls, other):
        return other

    __ror__ = __or__


class Nothing(metaclass=NothingType):
    """A class, a function, a decorator and a value, as asked."""


class StandIn(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        return attribute(name)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, Finder, is_package=True) if covers(name) else None

    @staticmethod
    def create_module(spec):
        return StandIn(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def install():
    really = importlib.util.find_spec

    def find_spec(name, package=None):
        found = really(name, package)
        return None if found is not None and found.loader is Finder else found

    importlib.util.find_spec = find_spec
    sys.meta_path.append(Finder)
PYTHON_END
echo 'import prefixroute_stand_ins; prefixroute_stand_ins.install()' >"$site/prefixroute_stand_ins.pth"

# --- 4. the made-up models, the same ones as vLLM's
for preset in small tiny; do
  model=$venv/prefixroute-models/$preset
  [ -e "$model/config.json" ] || { say "model $preset"; "$py" "$here/prefixroute_launch/build_model.py" "$model" --preset "$preset" >/dev/null; }
done

said=$(CUDA_VISIBLE_DEVICES='' SGLANG_USE_CPU_ENGINE=1 "$py" -m sglang.launch_server --help 2>&1) ||
  die "the engine does not start: $(printf '%s' "$said" | tail -n 3)"
case $said in *--kv-events-config*) ;; *) die "this SGLang has no --kv-events-config" ;; esac
finish
