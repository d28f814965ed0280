"""A model's tokenizer as transformers has it, mostly without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quickbeam.errors import InvalidInput, first_line
from quickbeam.models.text.chat_template import render
from quickbeam.models.weights.checkpoint import read_json

# how a byte-level vocabulary's text is split: the expressions are those of the models' tokenizers
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHER_TEXT = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{OTHER_TEXT}"


def split_by(expression: str) -> pre_tokenizers.PreTokenizer:
    """Return what splits a text by a regular expression, for a byte-level vocabulary."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# classes of transformers that read `tokenizer.json` as it is
READ_AS_IT_IS = {"TokenizersBackend", "PreTrainedTokenizer"}
# classes that read it, but have another normaliser, maybe another way to split texts, and special
# tokens where none are named
CHANGED: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "Qwen2Tokenizer": (
        normalizers.NFC(),
        split_by(QWEN2),
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    ),
    "GemmaTokenizer": (
        normalizers.Replace(" ", "\u2581"),
        None,
        {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
    ),
}
# classes that transformers takes for models of these types, whatever their files name
BY_MODEL_TYPE = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
}
# types of models that have a tokenizer class of their own
SPECIAL_TYPES = ("glm4v", "got_ocr2", "llava", "llava_next", "smolvlm", "vipllava")
SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# fields of tokenizer_config.json that transformers alone heeds
REFUSED_FIELDS = (
    "add_prefix_space",
    "auto_map",
    "clean_up_tokenization_spaces",
    "fast_tokenizer_files",
    "model_specific_special_tokens",
    "split_special_tokens",
)


def refuse_unconverted(folder: Path) -> None:
    """Raise `InvalidInput` for a tokenizer that can't be converted for want of a library.

    transformers converts a `tokenizer.model` where there is nothing else. It needs the library that
    wrote the file: sentencepiece, or tiktoken, whose files are lines of text.
    """
    model = folder / "tokenizer.model"
    others = (folder / "tokenizer.json", folder / "vocab.json")
    if not model.is_file() or any(path.is_file() for path in others):
        return
    with open(model, "rb") as file:
        pieces = file.read(1) == b"\n"
    needed = ("sentencepiece", "protobuf") if pieces else ("tiktoken",)
    if not all(map(_installed, needed)):
        raise InvalidInput(
            f"can't load {str(folder)!r}: it has a tokenizer.model and no tokenizer.json, and what "
            f"converts it is missing here: pip install {' '.join(needed)}"
        )


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def load_tokenizer(folder: Path, config: Any) -> Any:
    """Return a folder's tokenizer: a `Tokenizer`, or that of transformers where it has other rules.

    `config`: the model's. Raises `InvalidInput` where it is missing or can't be read.
    """
    refuse_unconverted(folder)
    try:
        return _load(folder, config)
    except InvalidInput:
        raise
    except Exception as error:  # tokenizers and transformers raise any
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        if not any((folder / name).exists() for name in names):
            raise InvalidInput(
                f"can't load {str(folder)!r}: it has no tokenizer.json: download it again, with "
                "all of its files"
            ) from error
        raise InvalidInput(
            f"can't load {str(folder)!r}: its tokenizer can't be read ({first_line(error)}): "
            "download it again"
        ) from error


def _load(folder: Path, config: Any) -> Any:
    fields = read_json(folder / "tokenizer_config.json")
    kind = str(fields.get("tokenizer_class") or "").removesuffix("Fast")
    model_type = str(getattr(config, "whole_type", None) or getattr(config, "model_type", ""))
    kind = BY_MODEL_TYPE.get(model_type, kind)
    # transformers corrects the tokenizers of Mistral's models
    special = model_type in SPECIAL_TYPES or "stral" in model_type
    readable = kind in READ_AS_IT_IS or kind in CHANGED
    if readable and not special and _is_plain(folder, fields):
        normalizer, split, defaults = CHANGED.get(kind, (None, None, {}))
        tokenizer = read_tokenizer(folder, defaults | fields)
        if normalizer is not None:
            tokenizer.backend_tokenizer.normalizer = normalizer
        if split is not None:
            tokenizer.backend_tokenizer.pre_tokenizer = split
        return tokenizer
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    loaded.chat_template = loaded.chat_template or _templates(folder, None)
    return loaded


def _is_plain(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Whether the files hold nothing that transformers alone knows how to read."""
    if not (folder / "tokenizer.json").is_file():
        return False
    if any(fields.get(name) for name in REFUSED_FIELDS):
        return False
    if isinstance(fields.get("extra_special_tokens"), dict):
        return False
    for name, value in fields.items():
        special = name.endswith("_token") and value and not isinstance(value, bool)
        if special and name.removesuffix("_token") not in SPECIAL_NAMES:
            return False
    older_files = ("added_tokens.json", "special_tokens_map.json")
    older = any((folder / name).exists() for name in older_files)
    return "added_tokens_decoder" in fields or not older


def read_tokenizer(folder: Path, fields: Mapping[str, Any]) -> Tokenizer:
    """Read a folder's `tokenizer.json` and chat templates."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    return Tokenizer(backend, fields, _templates(folder, fields.get("chat_template")))


class Tokenizer:
    """From text to token ids and back. Names and meanings are those of transformers' tokenizers.

    `backend_tokenizer`: the library's. `special_tokens_map`: special tokens by their names
    (`eos_token`). `chat_template`: a template, several by name, or None.
    """

    def __init__(
        self,
        backend: Backend,
        fields: Mapping[str, Any],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        """`fields`: as of `tokenizer_config.json`; what they add is added to `backend`."""
        self.backend_tokenizer = backend
        named = {f"{name}_token": fields.get(f"{name}_token") for name in SPECIAL_NAMES}
        extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
        self.special_tokens_map = {name: _text(token) for name, token in named.items() if token}
        special = [*self.special_tokens_map.values(), *map(_text, extra)]
        self.all_special_tokens = list(dict.fromkeys(special))
        self._add(fields.get("added_tokens_decoder") or {})
        self.chat_template = chat_template
        self.response_template = fields.get("response_template")

    def _add(self, decoder: Mapping[str, Any]) -> None:
        """Add tokens that `tokenizer.json` lacks, or has with other properties.

        `decoder`: the properties of tokens by id.
        """
        present = {repr(token) for token in self.added_tokens_decoder.values()}
        tokens = [AddedToken(**decoder[i]) for i in sorted(decoder, key=int)]
        added = [token for token in tokens if repr(token) not in present]
        texts = {*self.get_added_vocab(), *(token.content for token in added)}
        for text in self.all_special_tokens:
            if text not in texts:
                added.append(AddedToken(text, special=True))
        for token in added:
            token.special = token.special or token.content in self.special_tokens_map.values()
        if added:
            self.backend_tokenizer.add_tokens(added)

    # --- tokens ---

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text; None where there is none."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that were added to the vocabulary, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of the tokens that were added to the vocabulary, by text."""
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, by text."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the token of an id, or a list of them; None for an id without a token."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token)) for token in ids]

    # --- texts ---

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Unlike in `Backend.encode`, other threads run meanwhile."""
        (encoding,) = self.backend_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return the ids of a text as `input_ids`, or a list of them for a list of texts."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(item, add_special_tokens) for item in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the template for a conversation. Raises `ValueError` where there is none."""
        template = self.chat_template
        if isinstance(template, dict):
            if chat_template in template:
                return template[chat_template]
            for_tools = template.get("tool_use") if tools is not None else None
            template = for_tools or template.get("default")
        template = chat_template or template
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        return template

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Return a conversation's ids; its text without `tokenize`.

        Raises as `chat_template.render` does. `return_dict` has no other value.
        """
        if return_dict:
            raise ValueError("return_dict: only token ids are returned")
        text = render(
            self.get_chat_template(chat_template, tools),
            conversation,
            tools,
            add_generation_prompt,
            continue_final_message,
            {**self.special_tokens_map, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _templates(folder: Path, field: Any) -> str | dict[str, str] | None:
    """Return the chat template, or several by name. Files come before the configuration's `field`.

    Models that read images as well may have a file `chat_template.json`.
    """
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if not templates:
        field = field or read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(field, list):
            return {entry["name"]: entry["template"] for entry in field}
        return field if isinstance(field, str | dict) else None
    return templates["default"] if templates.keys() == {"default"} else templates
