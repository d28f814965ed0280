"""The tokenizer that a `.gguf` file holds, as the library `tokenizers` has it, and its template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.tokenizer import CONTRACTIONS, QWEN2, REST, Tokenizer, split_by

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are found in a text before anything else
SPACE = "\u2581"
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}

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
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone", "codeshell"), DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "smaug-bpe", "falcon-h1"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "chatglm-bpe", "glm4", "pixtral"), _LLAMA3),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token stays whole
BEGIN = ("llama-bpe", "llama3", "llama-v3")  # texts begin with a token where a file doesn't say
# Tokens that end a turn where a chat template writes them. Files that were made from a base model's
# configuration name none, and llama.cpp knows them by these texts as well.
TURN_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|eom_id|>", "<EOT>", "<|eot|>", "<|end_of_text|>"),
)


def turn_ends(tokenizer: Any) -> set[int]:
    """Return the tokens that end a turn by a tokenizer's chat template."""
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else " ".join(template.values())
    known = {one.content: token for token, one in tokenizer.added_tokens_decoder.items()}
    ends = {one for one in TURN_ENDS if one in text and one in known}
    if "<|return|>" in ends:  # of gpt-oss, which ends each message of a turn with the other
        ends.discard("<|end|>")
    return {known[one] for one in ends}


def load_tokenizer(file: GgufFile) -> Tokenizer:
    """Return a file's tokenizer.

    Raises `NotDescribed` for kinds that are not known here, and `InvalidInput` for metadata that
    contradicts itself.
    """
    of = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = of.get("model"), of.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise NotDescribed("it has no tokenizer")
    if kind == "gpt2":
        backend = _byte_level(of, tokens)
    elif kind in ("llama", "gemma4"):
        backend = _sentence_piece(of, tokens, file.metadata["general.architecture"])
    else:
        raise NotDescribed(f"a tokenizer of kind {kind!r}")
    _add(backend, tokens, of.get("token_type"))
    named = {name: _token(of, tokens, key) for name, key in NAMED.items()}
    first = of.get("add_bos_token", kind == "llama" or of.get("pre") in BEGIN)
    last = of.get("add_eos_token", False)
    _surround(backend, named["bos"] if first else None, named["eos"] if last else None)
    fields = {f"{name}_token": token for name, token in named.items() if token is not None}
    return Tokenizer(backend, fields, file.metadata.get("tokenizer.chat_template"))


def _token(of: dict[str, Any], tokens: Sequence[str], key: str) -> str | None:
    index = of.get(f"{key}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise InvalidInput(f"tokenizer.ggml.{key}_token_id is {index!r} of {len(tokens)} tokens")
    return tokens[index]


def _stored_merges(of: dict[str, Any]) -> list[Any]:
    return [tuple(one.split(" ", 1)) for one in of.get("merges", ())]


def _backend(vocab: dict[str, int], merges: list[Any], **how: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab, merges, **how))
    except Exception as error:  # the library raises nothing more exact
        raise InvalidInput(f"the tokenizer's merges can't be used: {error}") from error


def _byte_level(of: dict[str, Any], tokens: list[str]) -> Backend:
    pre = of.get("pre", "default")
    if pre not in SPLITS:
        raise NotDescribed(f"a tokenizer whose text is split like {pre!r}")
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


def _sentence_piece(of: dict[str, Any], tokens: list[str], architecture: str) -> Backend:
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
    unknown = _token(of, tokens, "unknown")
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
