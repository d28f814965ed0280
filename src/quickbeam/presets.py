"""The table of methods: for each, its sources, its tree policy and its budget."""

from __future__ import annotations

from dataclasses import dataclass

from quickbeam.errors import InvalidInput

FULL, FREQUENCY, BESIDE = "full", "frequency", "+context"
# the parts of the vocabulary that a drafter may score (`drafters/vocabulary.py`)
VOCABS = (FULL, FREQUENCY, FREQUENCY + BESIDE, "context", "clusters", "router")
# `frequency+context` where the drafter comes with a list of frequent tokens, else the full
# vocabulary
SHORTENED = "shortened"


@dataclass(frozen=True)
class Preset:
    """A combination that `--method` names.

    - `sources`: names of the sources that propose tokens.
    - `tree`: the name of the tree policy.
    - `budget`: the most nodes of a draft tree, the root included; 0 leaves it to the measured cost
      model.
    - `summary`: one line about the method.
    - `vocab`: what the drafter scores, one of `VOCABS` or `SHORTENED`.
    - `without`: the preset that is used instead where there is no drafter.
    """

    sources: tuple[str, ...]
    tree: str
    budget: int
    summary: str
    vocab: str = "full"
    without: str | None = None


PRESETS: dict[str, Preset] = {
    "ar": Preset((), "none", 1, "plain decoding, one token a step: the reference"),
    "pld": Preset(
        ("ngram",), "chain", 0, "prompt lookup: the continuation of the longest n-gram seen before"
    ),
    "logitspec": Preset(
        ("ngram", "last_logits"),
        "logitspec",
        0,
        "LogitSpec: the last logits guess the token after next, n-grams continue both",
    ),
    "dyspec": Preset(
        ("drafter",),
        "greedy",
        16,
        "DySpec: a tree grown from a drafter, always where a token is most likely to be reached",
    ),
    "dyspec-printed": Preset(
        ("drafter",),
        "greedy-printed",
        16,
        "DySpec as printed: assumes that acceptance probability equals draft probability",
    ),
    "dyspec-threshold": Preset(
        ("drafter",),
        "threshold",
        16,
        "DySpec with one call of the drafter a layer: all places above a threshold",
    ),
    # 5 drafted tokens, as is usual. Each costs a call of the drafter, and at an acceptance rate of
    # 0.6 the fifth is reached only 1 time in 10.
    "chain": Preset(
        ("drafter",),
        "drafted-chain",
        6,
        "speculative decoding as first published: one chain of 5 tokens from a drafter",
    ),
    "specinfer": Preset(("drafter",), "specinfer", 16, "SpecInfer: three branches from a drafter"),
    "sequoia": Preset(
        ("drafter",),
        "sequoia",
        16,
        "Sequoia: the best tree of a fixed shape, filled from a drafter",
    ),
    "eagle2": Preset(
        ("drafter",),
        "eagle2",
        16,
        "EAGLE-2: the drafter's likeliest tokens layer by layer, then "
        "the likeliest paths of all layers",
    ),
    "frspec": Preset(
        ("drafter",),
        "greedy",
        16,
        "FR-Spec: DySpec's tree, the drafter scoring only the most frequent tokens",
        "frequency",
    ),
    "dynaspec": Preset(
        ("drafter",),
        "greedy",
        16,
        "DynaSpec: DySpec's tree, the drafter scoring only frequent tokens and the context's; with "
        "`--vocab router`, what a router picks",
        FREQUENCY + BESIDE,
    ),
    "auto": Preset(
        ("ngram", "drafter"),
        "merged",
        0,
        "one tree of n-grams and drafted tokens, each added only if it pays; LogitSpec where there "
        "is no drafter",
        SHORTENED,
        without="logitspec",
    ),
}


def preset(method: str) -> Preset:
    """Return the preset of a method. Raises `InvalidInput` for an unknown name and lists the known
    ones."""
    if method not in PRESETS:
        raise InvalidInput(f"unknown method {method!r}; known: {', '.join(PRESETS)}")
    return PRESETS[method]


def stand_in(method: str, drafter: bool) -> str:
    """Return the name of the preset to use: `method`, or without a `drafter` the one that stands
    in.

    Without a drafter, raises `InvalidInput` for an unknown method, and for one that needs a
    drafter.
    """
    if drafter:
        return method
    chosen = preset(method)
    if chosen.without is None and "drafter" in chosen.sources:
        raise InvalidInput(
            f"method {method!r} drafts with a model: name a smaller model with the same "
            "vocabulary, or a feature drafter, with --drafter (in Python: drafter=…)"
        )
    return chosen.without or method


def plain_vocab(vocab: str) -> str:
    """Return the one of `VOCABS` that `vocab` means.

    `+context` may follow any of their names. An unknown word comes back as it is.
    """
    base = vocab.removesuffix(BESIDE)
    if base in (vocab, FREQUENCY) or base not in VOCABS:
        return vocab
    return "router" if base == "clusters" else base  # the others score the context anyway


def check_vocab(vocab: str, size: int | None = None) -> None:
    """Raise `InvalidInput` for a name that means none of `VOCABS` and is not `SHORTENED`.

    Also raises it for a shortlist `size` where the full vocabulary is scored.
    """
    if plain_vocab(vocab) not in (*VOCABS, SHORTENED):
        raise InvalidInput(
            f"unknown vocabulary {vocab!r} of the drafter; known: {', '.join(VOCABS)}"
        )
    if plain_vocab(vocab) == FULL and size is not None:
        raise InvalidInput(
            f"a shortlist of {size} tokens, where the drafter scores its full "
            "vocabulary: take --vocab router or another"
        )
