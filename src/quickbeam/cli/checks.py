"""What can be checked before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

from quickbeam import hub
from quickbeam.cache import cache_folder
from quickbeam.errors import InvalidInput
from quickbeam.presets import PRESETS, check_vocab, preset, stand_in

# how many tokens a chat template may take away where it joins a prompt's ends
SLACK = 16


def check_loading(
    model: str | None,
    method: str,
    drafter: str | None = None,
    vocab: str | None = None,
    shortlist: int | None = None,
) -> None:
    """Raise `InvalidInput` for an unknown method, for names of models that can't be loaded, and for
    a drafter or its settings where the method doesn't use one."""
    given = {"--drafter": drafter, "--vocab": vocab, "--shortlist": shortlist}
    if "drafter" not in preset(method).sources and (
        useless := [f"{name} {value}" for name, value in given.items() if value is not None]
    ):
        users = ", ".join(name for name, entry in PRESETS.items() if "drafter" in entry.sources)
        raise InvalidInput(
            f"{useless[0]}: method {method!r} drafts without a model; add --method "
            f"with one of {users}"
        )
    check_vocab(vocab or preset(method).vocab, shortlist)
    stand_in(method, (drafter or hub.shipped_drafter(model)) is not None)
    check_models(model, drafter)


def check_models(*names: str | None) -> None:
    """Raise `InvalidInput` for a name of a model or drafter that can't be loaded."""
    for check in (hub.check_source, hub.check_hub):
        for name in names:
            if name is not None:
                check(name)


def check_length(model: str | None, text: str, max_tokens: int) -> None:
    """Raise `InvalidInput` for a prompt that is clearly too long for a model on this machine.

    What this can't tell, the model's own check tells after loading.
    """
    folder = cache_folder() / model if model in hub.EMBEDDED else Path(model or hub.DEFAULT)
    if model is None:
        folder = cache_folder() / hub.DEFAULT
    files = [folder.expanduser() / name for name in ("config.json", "tokenizer.json")]
    if not all(file.is_file() for file in files):
        return
    try:
        config = json.loads(files[0].read_text(encoding="utf-8"))
        context = (config.get("text_config") or config).get("max_position_embeddings")
        if not isinstance(context, int) or len(text.encode()) + max_tokens <= context:
            return  # a token takes a byte at least
        from tokenizers import Tokenizer

        tokens = len(Tokenizer.from_file(str(files[1])).encode(text.strip()).ids)
    except Exception:  # a folder that is broken is the loader's to report
        return
    if tokens + max_tokens > context + SLACK:
        raise InvalidInput(
            f"a prompt of {tokens} tokens and max_tokens={max_tokens} exceed the model's context "
            f"of {context}: shorten the prompt, or lower max_tokens"
        )
