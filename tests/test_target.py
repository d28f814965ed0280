"""Against transformers: logits and hidden states of every layout, trees, prefill in chunks, any
commit."""

import copy

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig

from cases import refuses
from models import CONFIGS, SIZES, VOCAB, path_logits, random_tree, tiny
from quickbeam.models.opening import make_model
from target import Target

PREFIX = [5, 9, 13, 44, 2, 71, 9, 13, 60, 33, 8]


def close(got, expected):
    got, expected = got.detach().clone(), expected.detach().clone()
    scale = expected.abs().max()
    torch.testing.assert_close(got / scale, expected / scale, atol=5e-5, rtol=0)


@torch.inference_mode()
def states(model, ids, layers):
    """Hidden states after `layers`; one more than there are is that after the final norm."""
    count, into = model.config.num_hidden_layers, []
    norm = next(
        getattr(model.base_model, name)
        for name in ("norm", "ln_f", "final_layer_norm")
        if hasattr(model.base_model, name)
    )
    handle = norm.register_forward_pre_hook(lambda module, args: into.append(args[0]))
    asked = dict(output_hidden_states=True, use_cache=False)
    every = model(torch.tensor([list(ids)]), **asked).hidden_states
    handle.remove()
    return torch.cat([(into[0] if i == count else every[min(i, count)])[0] for i in layers], -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_trees_in_one_pass_or_two_are_separate_paths(name):
    reference = tiny(name)
    count = reference.config.num_hidden_layers
    watched = (count + 1, *range(1, count + 1))
    target, generator = Target(copy.deepcopy(reference), chunk=4), torch.Generator().manual_seed(1)
    target.model.set_aux_layers(watched)
    target.prefill([*PREFIX[:6], 3, 4])
    right = reference(input_ids=torch.tensor([PREFIX])).logits[0, -1]
    close(target.prefill(PREFIX, keep=6), right)
    ids, taken = list(PREFIX), 6
    for nodes in (1, 2, 9, 17):
        tree = random_tree(generator, nodes)
        right, half = path_logits(reference, ids, tree), nodes // 3
        if half:
            close(target.verify(tree.first(half)), right[:half])
        close(target.verify(tree, half), right[half:])
        path = tree.path(int(torch.randint(len(tree), (1,), generator=generator)))
        target.commit(tree, path)
        ids += [tree.token[node] for node in path]
        assert (target.ids, target.taken) == (ids, taken)
        if nodes != 2:
            close(target.take_hidden(), states(reference, ids, watched)[taken:])
            taken = len(ids)


@pytest.mark.parametrize("native", (False, True))
def test_watching_anew_ends_the_watch_before(native):
    model = tiny("gpt2")
    target = Target(make_model(copy.deepcopy(model), native=native))
    target.prefill(PREFIX)
    assert len(target.take_hidden()) == 0
    target.model.set_aux_layers((1, 2))
    target.model.set_aux_layers((2,))
    target.prefill(PREFIX)
    close(target.take_hidden(), states(model, PREFIX, (2,)))
    for layers in ((), (0,), (1, 5), (-1,)):
        refuses(
            r"the model has 1 to 3, and 4 for the final norm", target.model.set_aux_layers, layers
        )


def test_layers_that_share_keys_and_values_read_those_of_all_rows():
    kinds = ["sliding_attention", "full_attention"] * 2
    shared = dict(num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2, head_dim=8)
    small = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8)
    reference = tiny("", config=Gemma4TextConfig(**SIZES | shared | small, sliding_window=6))
    target = Target(make_model(copy.deepcopy(reference), native=False, chunk=4))
    close(target.prefill(PREFIX), reference(input_ids=torch.tensor([PREFIX])).logits[0, -1])
    tree = random_tree(torch.Generator().manual_seed(1), 9)
    close(target.verify(tree), path_logits(reference, PREFIX, tree))


def test_bad_calls_name_what_is_wrong_and_the_context_is_the_models():
    target = Target(tiny("llama"))
    refuses("empty prompt", target.prefill, [])
    refuses(f"token id {VOCAB} is outside", target.prefill, [1, VOCAB])
    for length in (4096, 32):
        config = LlamaConfig(**SIZES | {"max_position_embeddings": length})
        assert make_model(tiny("", config=config)).context_length == length
