"""What hatch asks when it builds a wheel: on Linux on x86-64 the native kernels go in, compiled for
every instruction set.

Without a compiler, and elsewhere, the wheel is the same for every platform and holds the kernels'
sources alone, which are compiled on first use. An editable install compiles on first use too.
"""

from __future__ import annotations

import importlib.util
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
        results = build.build_all(list(build.SETS), self.compile(build))
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
        build_data["pure_python"], build_data["tag"] = False, "py3-none-linux_x86_64"
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
