"""Compiles a grammar in a process that may crash, before it is compiled where a crash matters.

Run as `python -I -S trial.py PATH < GRAMMAR`, with the path of llguidance's extension module. It
imports nothing else, so that it takes about 20 ms.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

SECONDS = 5  # of processor time
MEMORY = 2 << 30  # bytes
STACK = 256 << 20  # bytes; the thread that compiles a grammar for use has twice as much
STEPS = 8  # tokens that are read


def failure(grammar: str) -> str | None:
    """Return why a grammar in llguidance's form can't be compiled here; None if it can.

    Errors that llguidance reports are not failures.
    """
    from llguidance import _lib

    command = [sys.executable, "-I", "-S", __file__, str(_lib.__file__)]
    process = subprocess.run(command, input=grammar.encode(), capture_output=True)
    if process.returncode == 0:
        return None
    return (
        f"it nests too deep, or compiling it takes more than {SECONDS} seconds or "
        f"{MEMORY >> 30} GiB: make it smaller"
    )


def main(path: str) -> None:
    """Compile the grammar from stdin, and read a few tokens by it."""
    from importlib.util import module_from_spec, spec_from_file_location

    with suppress(ImportError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    spec = spec_from_file_location("_lib", path)
    assert spec is not None and spec.loader is not None
    llguidance = module_from_spec(spec)
    spec.loader.exec_module(llguidance)
    grammar = sys.stdin.buffer.read().decode()

    def compile_and_step() -> None:
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
        for _ in range(STEPS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            lowest_token = (allowed & -allowed).bit_length() - 1
            if not allowed or not matcher.consume_token(lowest_token):
                break

    threading.stack_size(STACK)
    thread = threading.Thread(target=compile_and_step)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
