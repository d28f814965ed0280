"""The tokenizer that a `.gguf` file holds, as the library `tokenizers` has it, and its template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.text.eos import known_eos_ids
from quickbeam.models.text.tokenizer import CONTRACTIONS, OTHER_TEXT, QWEN2, Tokenizer, split_by
from quickbeam.models.weights.gguf.file import GgufFile

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are found in a text before anything else
SPACE = "\u2581"
SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
EOS_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # tokens that end an answer
NEEDED = ("bos", "eos", "unknown")  # what texts are read by, and answers ended
UNSET = (-1, 2**32 - 1)  # ids of no token
# keys of `tokenizer.ggml` that are no ids, and those that change nothing here
READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "suppress_tokens"),
}
UNREAD = {
    *("add_sep_token", "precompiled_charsmap", "remove_extra_whitespaces", "token_type_count"),
}
TEMPLATE = "tokenizer.chat_template"

# How a byte-level vocabulary's text is split (`tokenizer.ggml.pre`).
_QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
_LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{OTHER_TEXT}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}|{_SLASHES}"
_GPT4O = rf"{_WORDS[0]}{CONTRACTIONS}?|{_WORDS[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"
DIGITS = "digits"  # GPT-2's, digits one by one
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jina-v2-code"), None),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de"), None),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone", "codeshell"), DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), QWEN2),
    "kormo": QWEN2,
    "qwen35": _QWEN35,
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "smaug-bpe", "falcon-h1"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "chatglm-bpe", "glm4", "pixtral", "midm-2.0"), _LLAMA3),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token stays whole
BEGIN = ("llama-bpe", "llama3", "llama-v3")  # texts begin with a token where a file doesn't say


def load_tokenizer(file: GgufFile) -> Tokenizer:
    """Return a file's tokenizer.

    Raises `NotDescribed` for kinds that are not known here, and `InvalidInput` for a way to split
    texts that is not known, and for metadata that contradicts itself.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = fields.get("model"), fields.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise NotDescribed("the file has no tokenizer: take the model's folder instead")
    _refuse_unknown(fields)
    special: dict[str, str | None] = {}
    for name, key in SPECIAL_KEYS.items():
        ids = token_ids(file.metadata, key, len(tokens))
        special[name] = tokens[ids[0]] if ids else None
    if kind == "gpt2":
        backend = _byte_level(fields, tokens)
    elif kind in ("llama", "gemma4"):
        architecture = file.metadata["general.architecture"]
        backend = _sentence_piece(fields, tokens, special["unk"], architecture)
    else:
        raise NotDescribed(
            f"the file has a tokenizer of kind {kind!r}, which is not known here: take the model's "
            "folder instead"
        )
    _add(backend, tokens, fields.get("token_type"))
    with_bos = fields.get("add_bos_token", kind == "llama" or fields.get("pre") in BEGIN)
    with_eos = fields.get("add_eos_token", False)
    _surround(backend, special["bos"] if with_bos else None, special["eos"] if with_eos else None)
    named = {f"{name}_token": token for name, token in special.items() if token is not None}
    return Tokenizer(backend, named, chat_templates(file.metadata))


def chat_templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """Return a file's chat template; several by name where it has more than the default.

    Raises `InvalidInput` for a template that is no text.
    """
    named = {
        key.removeprefix(f"{TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    default = metadata.get(TEMPLATE)
    if isinstance(default, list):  # another list has their names
        names = metadata.get("tokenizer.chat_templates")
        if not isinstance(names, list) or len(names) != len(default):
            names = ["default", *(str(i) for i in range(1, len(default)))]
        named |= dict(zip(names, default, strict=True))
    elif default is not None:
        named["default"] = default
    for name, template in named.items():
        if not isinstance(template, str):
            raise InvalidInput(f"its chat template {name!r} is no text, but {str(template)[:80]}")
    return named.get("default") if named.keys() <= {"default"} else named


def token_ids(metadata: dict[str, Any], name: str, count: int) -> list[int]:
    """Return the tokens that metadata names as `tokenizer.ggml.NAME_token_id`: none, one or more.

    `count`: how many tokens there are. An id of no token is left out, and the log says so. Raises
    `InvalidInput` for another value than a token.
    """
    ids = []
    for key in (f"tokenizer.ggml.{name}_token_id", f"tokenizer.ggml.{name}_token_ids"):
        value = metadata.get(key)
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        for token_id in [] if value is None else values:
            if type(token_id) is int and 0 <= token_id < count:
                ids.append(token_id)
            elif token_id in UNSET or (type(token_id) is int and name not in NEEDED):
                logger.warning("%s is %d, which is no token, and is left out", key, token_id)
            else:
                raise InvalidInput(f"{key} is {token_id!r} of {count} tokens")
    return list(dict.fromkeys(ids))


def file_eos_ids(metadata: dict[str, Any], tokenizer: Any) -> set[int]:
    """Return the ids that end an answer, by a file's metadata and by its tokens' texts."""
    count = len(metadata["tokenizer.ggml.tokens"])
    named = (token_ids(metadata, name, count) for name in EOS_KEYS)
    return known_eos_ids(tokenizer).union(*named)


def _refuse_unknown(fields: dict[str, Any]) -> None:
    """Raise `InvalidInput` naming keys that are set and not known."""
    if len(fields.get("suppress_tokens", ())):
        logger.warning(
            "tokenizer.ggml.suppress_tokens is not heeded: these %d tokens may be in an answer",
            len(fields["suppress_tokens"]),
        )
    unknown = {
        f"tokenizer.ggml.{key}"
        for key, value in fields.items()
        if key not in READ | UNREAD and not key.endswith(("_token_id", "_token_ids"))
        if isinstance(value, np.ndarray | list) or value not in (0, "")
    }
    if unknown:
        raise InvalidInput(
            f"its tokenizer sets {', '.join(sorted(unknown))}, which is not known: take the "
            "model's folder instead"
        )


def _stored_merges(fields: dict[str, Any]) -> list[Any]:
    return [tuple(pair.split(" ", 1)) for pair in fields.get("merges", ())]


def _backend(vocab: dict[str, int], merges: list[Any], **options: Any) -> Backend:
    """Return a tokenizer of byte-pair encoding. `options`: those of `models.BPE`."""
    try:
        return Backend(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises nothing more exact
        raise InvalidInput(f"the tokenizer's merges can't be used: {error}") from error


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> Backend:
    pre = fields.get("pre")
    if pre is None:
        pre = "default"
        logger.warning(
            "the file doesn't say how its tokenizer splits texts (tokenizer.ggml.pre): they are "
            "split like GPT-2's, which gives other tokens for most models. Convert it again, or "
            "take another"
        )
    if pre not in SPLITS:
        raise InvalidInput(
            f"its tokenizer splits texts like {pre!r} (tokenizer.ggml.pre), which is not known; "
            f"known: {', '.join(sorted(SPLITS))}. Take the model's folder instead"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _backend(vocab, _stored_merges(fields), ignore_merges=pre in WHOLE_WORDS)
    split, byte_level = SPLITS[pre], pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is None:
        backend.pre_tokenizer = byte_level
    elif split == DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = split_by(split)
    if split in (QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    fields: dict[str, Any], tokens: list[str], unknown: str | None, architecture: str
) -> Backend:
    gemma = architecture.startswith("gemma")
    if gemma:  # several spaces are stored as such, and the first tokens are merged first
        tokens = [token.replace(" ", SPACE) if not token.strip(" ") else token for token in tokens]
        scores: Sequence[float] = range(0, -len(tokens), -1)
    else:
        scores = fields["scores"].tolist() if "scores" in fields else ()
        if len(scores) != len(tokens):
            raise InvalidInput(f"the tokenizer has {len(tokens)} tokens and {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _stored_merges(fields) if fields["model"] == "gemma4" else _merges(vocab, scores)
    backend = _backend(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = fields.get("add_space_prefix", not gemma)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    if prefix:
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    backend.normalizer = spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that together are a token, those of the best token first."""
    merges = []
    for token in sorted(vocab, key=lambda token: scores[vocab[token]], reverse=True):
        for length in range(len(token) - 1, 0, -1):
            left, right = token[:length], token[length:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges


def _add(backend: Backend, tokens: Sequence[str], kinds: Any) -> None:
    """Add the tokens that are found in a text before anything else."""
    if kinds is None:
        return
    if len(kinds) != len(tokens):
        raise InvalidInput(f"the tokenizer has {len(tokens)} tokens and {len(kinds)} kinds of them")
    for kind in (CONTROL, USER_DEFINED):
        added = [
            AddedToken(tokens[i], normalized=False, special=kind == CONTROL)
            for i in (kinds == kind).nonzero()[0]
            if backend.token_to_id(tokens[i]) is not None
        ]
        backend.add_tokens(added)


def _surround(backend: Backend, first: str | None, last: str | None) -> None:
    """Have texts begin with the token `first` and end with `last`; None for no token."""
    special = [token for token in dict.fromkeys((first, last)) if token is not None]
    if not special:
        return

    def surrounded(name: str, sequence: int) -> list[str]:
        parts = [part for part in (first, name, last) if part]
        return [f"{part}:{sequence}" for part in parts]

    backend.post_processor = processors.TemplateProcessing(
        single=surrounded("$A", 0),
        pair=surrounded("$A", 0) + surrounded("$B", 1),
        special_tokens=[(token, backend.token_to_id(token)) for token in special],
    )
