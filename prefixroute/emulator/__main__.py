"""``python -m prefixroute.emulator``; see `prefixroute.emulator.command`."""

from __future__ import annotations

import sys


def _main() -> int:
    try:
        from prefixroute.emulator.command import main
    except ModuleNotFoundError as error:
        print(f"prefixroute.emulator needs {error.name}: pip install 'prefixroute[demo]'", file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(_main())
