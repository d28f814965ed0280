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
from quickbeam.models.text.tokenizer import CONTRACTIONS, QWEN2, REST, Tokenizer, split_by
from quickbeam.models.weights.gguf.file import GgufFile

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are found in a text before anything else
SPACE = "\u2581"
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # tokens that end an answer
NEEDED = ("bos", "eos", "unknown")  # what texts are read by, and answers ended
UNSET = (-1, 2**32 - 1)  # ids of no token
# keys of `tokenizer.ggml` beside ids, and those that change nothing for these kinds of tokenizers
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
_LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
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
    of = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = of.get("model"), of.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise NotDescribed("the file has no tokenizer: take the model's folder instead")
    _refuse_unknown(of)
    ids = {name: token_ids(file.metadata, key, len(tokens)) for name, key in NAMED.items()}
    named = {name: tokens[own[0]] if own else None for name, own in ids.items()}
    if kind == "gpt2":
        backend = _byte_level(of, tokens)
    elif kind in ("llama", "gemma4"):
        architecture = file.metadata["general.architecture"]
        backend = _sentence_piece(of, tokens, named["unk"], architecture)
    else:
        raise NotDescribed(
            f"the file has a tokenizer of kind {kind!r}, which is not known here: take the model's "
            "folder instead"
        )
    _add(backend, tokens, of.get("token_type"))
    first = of.get("add_bos_token", kind == "llama" or of.get("pre") in BEGIN)
    last = of.get("add_eos_token", False)
    _surround(backend, named["bos"] if first else None, named["eos"] if last else None)
    fields = {f"{name}_token": token for name, token in named.items() if token is not None}
    return Tokenizer(backend, fields, chat_templates(file.metadata))


def chat_templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """Return a file's chat template; several by name where it has others beside the default.

    Raises `InvalidInput` for a template that is no text.
    """
    named = {
        key.removeprefix(f"{TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    default = metadata.get(TEMPLATE)
    if isinstance(default, list):  # beside a list of their names
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
        for one in [] if value is None else values:
            if type(one) is int and 0 <= one < count:
                ids.append(one)
            elif one in UNSET or (type(one) is int and name not in NEEDED):
                logger.warning("%s is %d, which is no token, and is left out", key, one)
            else:
                raise InvalidInput(f"{key} is {one!r} of {count} tokens")
    return list(dict.fromkeys(ids))


def file_eos_ids(metadata: dict[str, Any], tokenizer: Any) -> set[int]:
    """Return the ids that end an answer, by a file's metadata and by its tokens' texts."""
    count = len(metadata["tokenizer.ggml.tokens"])
    named = (token_ids(metadata, name, count) for name in ENDS)
    return known_eos_ids(tokenizer).union(*named)


def _refuse_unknown(of: dict[str, Any]) -> None:
    """Raise `InvalidInput` naming keys that are set and are not read. Names what is left out."""
    if len(of.get("suppress_tokens", ())):
        logger.warning(
            "tokenizer.ggml.suppress_tokens is not heeded: these %d tokens may be in an answer",
            len(of["suppress_tokens"]),
        )
    unknown = {
        f"tokenizer.ggml.{key}"
        for key, value in of.items()
        if key not in READ | UNREAD and not key.endswith(("_token_id", "_token_ids"))
        if isinstance(value, np.ndarray | list) or value not in (0, "")
    }
    if unknown:
        raise InvalidInput(
            f"its tokenizer sets {', '.join(sorted(unknown))}, which is not known: take the "
            "model's folder instead"
        )


def _stored_merges(of: dict[str, Any]) -> list[Any]:
    return [tuple(one.split(" ", 1)) for one in of.get("merges", ())]


def _backend(vocab: dict[str, int], merges: list[Any], **how: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab, merges, **how))
    except Exception as error:  # the library raises nothing more exact
        raise InvalidInput(f"the tokenizer's merges can't be used: {error}") from error


def _byte_level(of: dict[str, Any], tokens: list[str]) -> Backend:
    if (pre := of.get("pre")) is None:
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
    backend = _backend(vocab, _stored_merges(of), ignore_merges=pre in WHOLE_WORDS)
    split, plain = SPLITS[pre], pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is None:
        backend.pre_tokenizer = plain
    elif split == DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    else:
        backend.pre_tokenizer = split_by(split)
    if split in (QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    of: dict[str, Any], tokens: list[str], unknown: str | None, architecture: str
) -> Backend:
    gemma = architecture.startswith("gemma")
    if gemma:  # several spaces are stored as such, and the order of tokens is that of merges
        tokens = [
            SPACE * len(one) if one[:1] == " " and not one.strip(" ") else one for one in tokens
        ]
        worth: Sequence[float] = range(0, -len(tokens), -1)
    else:
        worth = of["scores"].tolist() if "scores" in of else ()
        if len(worth) != len(tokens):
            raise InvalidInput(f"the tokenizer has {len(tokens)} tokens and {len(worth)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _stored_merges(of) if of["model"] == "gemma4" else _merges(vocab, worth)
    backend = _backend(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = of.get("add_space_prefix", not gemma)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    if prefix:
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    backend.normalizer = spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocab: dict[str, int], worth: Sequence[float]) -> list[tuple[str, str]]:
    """Return what joins to tokens, the best first: pairs of tokens that together are one."""
    best_first = sorted(vocab, key=lambda token: worth[vocab[token]], reverse=True)
    return [
        (left, right)
        for token in best_first
        for k in range(len(token) - 1, 0, -1)
        if (left := token[:k]) in vocab and (right := token[k:]) in vocab
    ]


def _add(backend: Backend, tokens: Sequence[str], kinds: Any) -> None:
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
    """Put a token before a text, and one behind it."""
    around = [one for one in (first, last) if one is not None]
    if not around:
        return

    def of(sequence: int, name: str) -> list[str]:
        before = [f"{first}:{sequence}"] if first else []
        return [*before, f"{name}:{sequence}", *([f"{last}:{sequence}"] if last else [])]

    backend.post_processor = processors.TemplateProcessing(
        single=of(0, "$A"),
        pair=of(0, "$A") + of(1, "$B"),
        special_tokens=[(one, backend.token_to_id(one)) for one in dict.fromkeys(around)],
    )
