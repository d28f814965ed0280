"""Checks what `--model` and `--drafter` name, before anything is loaded and without PyTorch."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from quickbeam.errors import InvalidInput
from quickbeam.hub import EMBEDDED

HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
PATIENCE = 8.0  # seconds after which the hub counts as out of reach
CONFIGS = ("config.json", "adapter_config.json")  # a model's folder holds one of them


def check_source(model: str) -> None:
    """Raise `InvalidInput` for a folder or file that is not there, or that holds no model.

    Any other name passes: an embedded model's, or what may be a Hugging Face id.
    """
    path = Path(model).expanduser()
    if model in EMBEDDED:
        return
    if path.is_dir():
        if not any((path / file).is_file() for file in CONFIGS):
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
    """Check that a Hugging Face id can be loaded; other names pass.

    Takes at most 10 seconds. Where the hub is out of reach and the model was downloaded before,
    this process goes on offline. Raises `InvalidInput` where there is nothing to load.
    """
    if model in EMBEDDED or Path(model).expanduser().exists():
        return
    from huggingface_hub import constants, try_to_load_from_cache

    kept = any(isinstance(try_to_load_from_cache(model, file), str) for file in CONFIGS)
    if constants.HF_HUB_OFFLINE:
        if not kept:
            raise InvalidInput(
                f"can't load {model!r}: HF_HUB_OFFLINE is set and it was not downloaded before; "
                f"unset it, give a folder, or take an embedded model: {', '.join(EMBEDDED)}"
            )
        return
    reason = _out_of_reach(model)
    if reason is None:
        return
    if not kept:
        raise InvalidInput(
            f"can't load {model!r}: no folder here has this name, and {constants.ENDPOINT} is out "
            f"of reach ({reason}). Give a folder, or take an embedded model: {', '.join(EMBEDDED)} "
            "(HF_HUB_OFFLINE=1 takes only what was downloaded, and doesn't try)"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def _out_of_reach(model: str) -> str | None:
    """Return why the hub can't be asked about `model`, None where it answers.

    Raises `InvalidInput` if it answers that it has no such model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    reasons: list[str | None] = []
    missing: list[Exception] = []

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=PATIENCE)
            reasons.append(None)
        except RepositoryNotFoundError as error:
            missing.append(error)
        except HfHubHTTPError:  # it answers; what it refuses shows when the model is loaded
            reasons.append(None)
        except Exception as error:
            reasons.append(str(error).strip().partition("\n")[0] or type(error).__name__)

    # a name's look-up has no time limit of its own, so another thread waits for it
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if missing:
        raise InvalidInput(
            f"can't load {model!r}: no folder here has this name, and the Hugging Face hub shows "
            "no such model; check the spelling, or log in if it is private (hf auth login)"
        ) from missing[0]
    return reasons[0] if reasons else f"no answer within {PATIENCE:.0f} s"
