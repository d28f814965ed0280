"""The tokens that end an answer: those that a model's files name, and those of known texts.

Many files name a single token, or the wrong one: a chat model's configuration may lack the token
that ends a document, a base model's the one that ends a message. The known texts are those at which
llama.cpp ends an answer (`llama-vocab.cpp`). They end the answers of every model, so a model ends
at the same tokens from a folder and from a `.gguf` file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

# of a message
MESSAGE_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|eom_id|>", "<|eot|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("<end_of_utterance>", "<|tool_response>", "[e~["),
)
# of a text
TEXT_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# behind what a model fills in, and between files and repositories
FILE_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
KNOWN_ENDS = {*MESSAGE_ENDS, *TEXT_ENDS, *FILE_ENDS}
CONTROL = ("<|", "<\uff5c")  # how the texts of control tokens begin
# tokens that don't end an answer where a vocabulary holds all of the others
INNER = (
    ("<|end|>", {"<|return|>", "<|call|>"}),  # gpt-oss ends each part of a message with it
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),  # Gemma 4 writes HTML with it
)


def known_eos_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens whose text is a known end.

    An added token is special if it is marked so, if it is written like a control token, or if the
    chat template writes it. Other tokens of these texts are text, such as Gemma's `</s>`.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    template = template if isinstance(template, str) else " ".join(template.values())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ids = {}
    for token_id, token in added.items():
        text = token.content
        if text in KNOWN_ENDS and (token.special or text.startswith(CONTROL) or text in template):
            ids[text] = int(token_id)
    inner = {text for text, others in INNER if others <= ids.keys()}
    return {token_id for text, token_id in ids.items() if text not in inner}


def eos_ids(*owners: Any) -> set[int]:
    """Return every id that owners name as `eos_token_id`: one, or a list.

    Each owner is an object or a mapping, or None: a generation config, a config, a tokenizer.
    """
    ids = set[int]()
    for owner in owners:
        if isinstance(owner, Mapping):
            named = owner.get("eos_token_id")
        else:
            named = getattr(owner, "eos_token_id", None)
        values = named if isinstance(named, list | tuple) else [named]
        for value in values:
            if type(value) is int and value >= 0:
                ids.add(value)
            elif named is not None:
                logger.warning("eos_token_id %r: no number of a token, and left out", named)
    return ids


def model_eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return every id that ends an answer of a model of transformers."""
    config = model.config.get_text_config()
    named = eos_ids(getattr(model, "generation_config", None), config, tokenizer)
    return named | known_eos_ids(tokenizer)
