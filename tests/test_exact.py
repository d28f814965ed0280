"""Bit-identity: over the native kernels, a tree's logits are those of one token at a time, to the
last bit."""

import pytest
import torch

from models import VOCAB
from quickbeam.models.loading import load_model
from quickbeam.models.native import library
from quickbeam.tree import TokenTree
from target import Target

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")


def one_at_a_time(target, prompt, tokens):
    """`[len(tokens), vocab]` logits after each of `tokens`, verified alone."""
    target.reset()
    target.prefill(prompt)
    rows = []
    for token in tokens:
        tree = TokenTree(token)
        rows.append(target.verify(tree)[0].clone())
        target.commit(tree, [0])
    return torch.stack(rows)


def rows_that_differ(target, prompt, tokens, expected, seed):
    """Verify `tokens` in trees where each has random siblings stored before and after it, nephews
    included; count rows with other bits."""
    generator = torch.Generator().manual_seed(seed)

    def below(high):
        return int(torch.randint(high, (1,), generator=generator))

    target.reset()
    target.prefill(prompt)
    done = wrong = 0
    while done < len(tokens):
        tree, path = TokenTree(tokens[done]), [0]
        deepest, most = min(below(14), len(tokens) - done - 1), below(40)
        for token in tokens[done + 1 : done + 1 + deepest]:
            parent = path[-1]
            for _ in range(below(4) if len(tree) < most else 0):
                other = below(VOCAB)
                if other != token and tree.child(parent, other) is None:
                    tree.add(tree.add(parent, other, "noise"), below(VOCAB), "noise")
            path.append(tree.add(parent, token, "text"))
        logits = target.verify(tree)
        wrong += sum(
            not torch.equal(logits[node], expected[done + i]) for i, node in enumerate(path)
        )
        target.commit(tree, path)
        done += len(path)
    return wrong


@pytest.mark.parametrize(
    ("begins", "count", "seeds"),
    [((374,), 20, 1), pytest.param((37, 748, 1100), 40, 3, marks=pytest.mark.long)],
)
def test_the_embedded_model_gives_the_same_bits(smollm2, begins, count, seeds):
    model, tokenizer = load_model(str(smollm2), torch.bfloat16, torch.device("cpu"))
    target = Target(model)
    text = (
        "In the beginning there was a small model that answered slowly, so its friends drafted "
        "ahead and it only had to agree. "
    ) * 50
    ids = tokenizer(text)["input_ids"]
    for begin in begins:
        prompt, tokens = ids[:begin], ids[begin : begin + count]
        expected = one_at_a_time(target, prompt, tokens)
        wrong = [rows_that_differ(target, prompt, tokens, expected, seed) for seed in range(seeds)]
        assert wrong == [0] * seeds
