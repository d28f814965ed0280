"""Small tokenizers laid out like published ones, with their kinds of added tokens."""

from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    'The quick brown fox jumps over the lazy dog. {"name": "Tom", "kind": "cat", "age": 12}',
    "im_start im_end tool_call table code think file_sep  <b>bold</b>  <|x|> \n\n\n\t end of text",
    "Straße, naïve café, 日本語 and more: https://example.com/a?b=c&d=e (1, 2, 3) [4, 5] 0.5e-3",
]
SPACE = "\u2581"


def byte_level(special, text, split=None, normalizer=None, ignore_merges=False, end=0):
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = plain
    if split is not None:
        parts = [pre_tokenizers.Split(Regex(split), behavior="isolated"), plain]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return finished(backend, special, text, end)


def sentence_piece(special, text, gemma, end):
    """The special tokens stand in the vocabulary, too, as pieces do in such models."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    if not gemma:
        trained.pre_tokenizer = pre_tokenizers.Split(SPACE, behavior="merged_with_next")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*special, *bytes_, *text, *pieces]))}
    merges = [
        (piece[:at], piece[at:])
        for piece in [*special, *text, *pieces]
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    stripped = [] if gemma else [decoders.Strip(" ", 1, 0)]
    backend.normalizer = (
        spaces if gemma else normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return finished(backend, special, text, end)


def finished(backend, special, text, end):
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    backend.add_tokens([AddedToken(one, normalized=False) for one in text])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[end])


@cache
def alike(name):
    """The tokenizer that is laid out like those of a family of models."""
    words = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    match name:
        case "llama3":
            special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|python_tag|>"]
            return byte_level(special, [], words, ignore_merges=True, end=2)
        case "qwen":
            special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>"]
            text = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|file_sep|>"]
            return byte_level(special, text, words, normalizers.NFC(), end=2)
        case "phi":
            text = [" " * n for n in range(8, 1, -1)] + ["\t" * n for n in range(4, 1, -1)]
            return byte_level(["<|endoftext|>", "<|end|>"], text)
        case "gemma":
            special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
            text = ["<b>", "</b>", "<table>", "<code>", "<unused0>", "[multimodal]"]
            text += ["\n" * n for n in range(4, 1, -1)] + [SPACE * n for n in range(4, 1, -1)]
            return sentence_piece(special, text, True, 1)
        case "mistral":
            special = [
                "<unk>",
                "<s>",
                "</s>",
                "[INST]",
                "[/INST]",
                "[TOOL_CALLS]",
                "[/TOOL_RESULTS]",
            ]
            return sentence_piece(special, [], False, 2)
    raise ValueError(name)


ALIKE = ("llama3", "qwen", "phi", "gemma", "mistral")
