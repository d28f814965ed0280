"""What hatch asks when it builds a wheel: the native kernels go in, compiled for every instruction
set of the platform.

`_PYTHON_HOST_PLATFORM=linux-aarch64` and a cross compiler in CXX make another platform's wheel.
Without a compiler, and on platforms without kernels, the wheel is the same for every platform and
holds the kernels' sources alone, which are compiled on first use. An editable install compiles on
first use too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "quickbeam/models/native"


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version != "standard":
            return
        build = load_build(Path(self.root))
        if not build.has_kernels():
            self.app.display_info("kernels: none for this platform; the wheel is the same for all")
            return
        self.folder = tempfile.TemporaryDirectory()
        tag = platform_tag(*build.target())
        results = build.build_all(build.platform_sets(), self.compile(build))
        built = [name for name, result in results.items() if isinstance(result, Path)]
        for name, result in results.items():
            if name in built:
                build_data["force_include"][str(result)] = f"{NATIVE}/lib/{result.name}"
            else:
                self.app.display_warning(f"kernels: {name} not built: {result}")
        if not built:
            self.app.display_warning(
                "kernels: the wheel is the same for all platforms and compiles them on first use"
            )
            return
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"
        self.app.display_info(f"kernels: {', '.join(built)} in the wheel")

    def compile(self, build: Any) -> Any:
        def make(name: str) -> Path:
            path = Path(self.folder.name) / build.file_name(name)
            build.compile_to(path, name)
            return path

        return make

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def platform_tag(system: str, machine: str) -> str:
    if system == "darwin":  # the compiler reads the variable, too
        oldest = os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "11.0")
        return f"macosx_{oldest.replace('.', '_')}_{machine}"
    return f"{'win' if system == 'win32' else system}_{machine}"


def load_build(root: Path) -> Any:
    """`build.py` by itself: what the package needs is not there when a wheel is made."""
    spec = importlib.util.spec_from_file_location(
        "kernels_build", root / "src" / NATIVE / "build.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
