"""The build hook of the compiled wheel: mypyc turns the modules that pyproject.toml lists into C extensions.

Rules:
1. Opt-in: it runs with HATCH_BUILD_HOOKS_ENABLE=1 in the environment; a plain build never reads this file.
2. The sources stay as they are and nothing is written beside them: extensions go from a temporary folder into the
   wheel, next to the Python files, which say the same and serve whoever reads them.
3. The wheel is tagged for the interpreter that builds it.

hatch-mypyc (0.16) does not fit: it takes all packages to lie in one folder, moves pyproject.toml away while it
compiles, and leaves extensions in the source tree, where they would hide every later change.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GROUP = "prefixroute"
"""All modules go into one extension, so that they call each other directly; this is its name, less "__mypyc"."""


class CompiledBuildHook(BuildHookInterface[Any]):
    """Compile `modules` of the hook's table, and put what comes out into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the extensions. An editable install stays Python: its source is about to change."""
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="prefixroute-build-"))
        extensions = compiled(Path(self.root), self.config["modules"], self._folder)
        build_data["force_include"].update({str(path): name for name, path in extensions.items()})
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built, now that it is in the wheel."""
        if version != "editable":
            shutil.rmtree(self._folder)


def compiled(root: Path, modules: list[str], folder: Path) -> dict[str, Path]:
    """Compile "package/module.py" files of `root`; return where each extension is, by its path in a wheel."""
    from mypyc.build import mypycify  # only a build that was asked for needs a compiler
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    before = Path.cwd()
    os.chdir(root)
    try:
        # Types were checked by `make check`; here the installed packages may be other versions, or lack their stubs.
        options = ["--config-file=", "--ignore-missing-imports", f"--cache-dir={folder / 'cache'}"]
        extensions = mypycify([*options, *modules], target_dir=str(folder / "c"), debug_level="0", group_name=GROUP)
        command = build_ext(Distribution({"name": GROUP, "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    built = [path for path in (folder / "lib").rglob("*") if path.is_file()]
    return {path.relative_to(folder / "lib").as_posix(): path for path in built}
