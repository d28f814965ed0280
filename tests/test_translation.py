"""A smaller model with another tokenizer drafts: tokens are mapped by their bytes."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from answers import PROMPTS, answer, same_as_plain
from cases import refuses
from drafters import DRAFTED
from features import context_of
from models import VOCAB, tiny
from quickbeam import LLM
from quickbeam.drafters.base import DraftRequest
from quickbeam.drafters.draft_model import LMDrafter, Translation
from quickbeam.grammar.token_texts import BYTES
from quickbeam.methods.base import NoDraft
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(characters):
    backend = Tokenizer(models.BPE({one: i for i, one in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def pair(shift=0, own=10, seed=7):
    """A model, and itself with other ids as its drafter, which lacks its first `own` tokens.
    `shift`: by how much the drafter's ids are mapped wrongly."""
    source, ours = tiny("llama", torch.bfloat16, seed=3), tokenizer(ALPHABET[:VOCAB])
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)).tolist()
    named = [ALPHABET[i] if i >= own else ALPHABET[VOCAB + i] for i in order]
    twin = tiny("llama", torch.bfloat16, seed=3)
    for module in (twin.model.embed_tokens, twin.lm_head):
        module.weight.data.copy_(module.weight.data[order])
    translation = Translation(ours, tokenizer(named), (VOCAB, VOCAB))
    if shift:
        translation.columns = translation.columns.roll(shift)
    return make_model(source), LMDrafter(make_model(twin), VOCAB, translation=translation)


def steps(target, drafter, **more):
    """The steps of some answers, each of which is plain decoding's."""
    total, params = 0, SamplingParams(max_tokens=30, ignore_eos=True, seed=2, **more)
    for prompt in PROMPTS:
        one = answer(target, DRAFTED["chain"](drafter), params, prompt, budget=5)
        assert one.output.token_ids == answer(target, NoDraft(), params, prompt).output.token_ids
        total += one.statistics.steps
    return total


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wrong_mapping_loses_acceptance_and_no_answer(temperature):
    right = steps(*pair(own=0), temperature=temperature)
    some = steps(*pair(own=10), temperature=temperature)
    wrong = steps(*pair(own=0, shift=1), temperature=temperature)
    assert right <= some < wrong and right < wrong / 1.5, (right, some, wrong)


def test_many_answers_in_one_call_are_plain_decodings():
    same_as_plain(*pair())


def test_what_the_model_lacks_has_no_distribution_nor_what_is_beyond_its_context():
    _, drafter = pair(own=10)
    partner = drafter.translation.partner
    lacked, known = next(i for i in range(VOCAB) if i not in partner), min({*partner} - {5})
    values = []
    for tokens in ((lacked, known), (known,)):
        context, tree = context_of([7, 5]), TokenTree(5)
        context.states["drafter"] = drafter.begin(context.ids)
        drafter.answer([DraftRequest(context, tree, [0])])
        nodes = [tree.add(0, token, "x") for token in tokens]
        values += drafter.answer([DraftRequest(context, tree, nodes)])[0].values
    assert not values[0].any() and torch.equal(values[1], values[2]) and values[1].any()
    _, drafter = pair(own=0)
    drafter.context_length, context = 24, context_of([5] * 22)
    state = context.states["drafter"] = drafter.begin(context.ids)
    (probs,) = drafter.answer([DraftRequest(context, TokenTree(5), [0])])
    assert float(probs.values.sum()) == pytest.approx(1) and probs.dense().shape == (1, VOCAB)
    context.extend([6, 7])
    (probs,) = drafter.answer([DraftRequest(context, TokenTree(7), [0])])
    drafter.read([state])
    assert not probs.values.any() and state.waiting


def test_too_few_shared_tokens_are_told():
    refuses(r"shares 40 of 97 tokens with the target \(41%\)", pair, own=57)
    assert {character: byte for byte, character in bytes_to_unicode().items()} == BYTES


def test_a_drafter_with_another_tokenizer_is_loaded_by_name(toy_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(toy_folder, other)
    stored = json.loads((other / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(toy_folder, "dyspec", drafter=str(other)) as llm:
        one = llm.generate("abc cba", params)
        assert one.statistics.sources["drafter"].drafted > 0
        assert one.token_ids == llm.generate("abc cba", params, method="ar").token_ids
