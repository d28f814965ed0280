"""llama.cpp measured beside our own passes.

A process holds the model and times one token after a context whenever it is asked. It runs
`llama_cpp_worker.py` in a Python interpreter that can import `llama_cpp`. That interpreter need not
be ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

import torch

from quickbeam.bench.passes import Pass, Took
from quickbeam.errors import InvalidInput, QuickbeamError

WORKER = Path(__file__).with_name("llama_cpp_worker.py")
REST = 0.02  # seconds in which the threads of the side measured last go to sleep


@contextmanager
def llama_cpp(model: Path, contexts: Sequence[int], python: str | None = None) -> Iterator[Pass]:
    """Give a pass over one token by llama.cpp, with as many threads as PyTorch has.

    `model` is a .gguf file, and `python` an interpreter: ours where it is None. The pass ignores
    its width; its context must be one of `contexts`. Raises `InvalidInput` where the file, the
    interpreter or `llama_cpp` is not there, and `QuickbeamError` where llama.cpp fails.
    """
    python = python or sys.executable
    if not model.is_file():
        raise InvalidInput(
            f"--llama-cpp {model}: no such file; give a .gguf file of the same model"
        )
    command = [
        python,
        str(WORKER),
        json.dumps(
            {"model": str(model), "threads": torch.get_num_threads(), "contexts": list(contexts)}
        ),
    ]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
            )
        except OSError as error:
            raise InvalidInput(f"--llama-cpp-python {python}: {error.strerror}") from error
        assert process.stdin is not None and process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def answer() -> str:
            if line := answers.readline().strip():
                return line
            said.seek(0)
            lines = [line.strip() for line in said if line.strip()]
            reason = lines[-1] if lines else f"it ended with code {process.wait()}"
            if "No module named 'llama_cpp'" in reason:
                raise InvalidInput(
                    f"--llama-cpp: {python} has no llama_cpp; name an interpreter "
                    "that has it with --llama-cpp-python"
                )
            raise QuickbeamError(f"llama.cpp failed: {reason}")

        def run(width: int, context: int) -> Took:
            sleep(REST)
            with suppress(OSError):  # the process has ended: `answer` says why
                ask.write(f"{context}\n")
                ask.flush()
            milliseconds = float(answer())
            sleep(REST)
            return Took(milliseconds)

        try:
            answer()  # wait until the worker is ready
            yield run
        finally:
            process.kill()
            process.wait()
            answers.close()
            with suppress(OSError):
                ask.close()
