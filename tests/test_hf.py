"""`model.generate` with our loop gives what it gives without, or says why not."""

import copy
import gc
import inspect
import re
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM
from transformers.generation import logits_process as processing
from transformers.generation import stopping_criteria as stopping
from transformers.generation.streamers import BaseStreamer

from answers import answer
from cases import few, refuses
from models import CONFIGS, VOCAB, tiny
from quickbeam.hf import engine_of, generate, generator, params_of
from quickbeam.methods import make_method
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler

PAD, END = 0, 2
TEXT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
ROWS = torch.tensor([TEXT, [PAD] * 5 + [11, 12, 13, 11, 12, 13, 11], [PAD] * 9 + [40, 41, 42]])
MASK = (ROWS != PAD).long()
# not in older versions of transformers
COUNTS_NO_PADDING = "padding_lengths" in inspect.getsource(LlamaForCausalLM._get_logits_processor)
# the name of the argument in older versions is past_key_values
FORWARD = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in FORWARD else "past_key_values"
GREEDY = dict(do_sample=False, max_new_tokens=40, eos_token_id=END, pad_token_id=PAD)
SAMPLED = dict(do_sample=True, max_new_tokens=2, eos_token_id=None, pad_token_id=PAD)
TOP_P = processing.TopPLogitsWarper(0.9)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def pair(model, ids=ROWS, how=generate, **wanted):
    """What `model.generate` gives without our loop, and with it."""
    if ids is ROWS:
        wanted["attention_mask"] = MASK
    return [model.generate(ids, **wanted), model.generate(ids, **wanted, custom_generate=how)]


@pytest.mark.parametrize(("layout", "method"), few([(one, "auto") for one in CONFIGS] + [("llama",
    "ar"), ("gpt2", "pld")], [
    ("llama", "auto"), ("llama", "ar"), ("gpt2", "pld"), ("gemma3-window", "auto"),
    ("qwen2-window", "auto"),
]))  # fmt: skip
def test_greedy_rows_are_those_of_transformers(layout, method):
    model = tiny(layout)
    expected, ours = pair(model, how=generator(method=method), **GREEDY)
    assert torch.equal(ours, expected)
    # the model is as it was
    assert torch.equal(model.generate(ROWS, attention_mask=MASK, **GREEDY), expected)


def test_bfloat16_rows_are_those_of_plain_decoding():
    model = tiny("llama", torch.bfloat16)
    params = SamplingParams(max_tokens=40, stop_token_ids=(END,), ignore_eos=True)
    ours = make_model(copy.deepcopy(model))
    rows = []
    for row in ROWS.tolist():
        prompt = [token for token in row if token != PAD]
        rows.append(answer(ours, make_method("ar"), params, prompt).output.token_ids)
    generated = model.generate(ROWS, attention_mask=MASK, **GREEDY, custom_generate=generate)
    filled = [row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows]
    assert generated[:, ROWS.shape[1] :].tolist() == filled


def test_rows_that_end_early_are_padded_and_the_widest_gives_the_width(llama):
    wanted = {**GREEDY, "eos_token_id": None}
    plain = llama.generate(ROWS, attention_mask=MASK, **wanted)[:, ROWS.shape[1] :]
    # the last one is in no vocabulary, and never comes
    ends = [int(plain[0, 3]), int(plain[1, 9]), int(plain[2, 20]), 10**6]
    expected, ours = pair(llama, **{**GREEDY, "eos_token_id": ends, "pad_token_id": 96})
    assert (expected == 96).any() and expected.shape[1] < ROWS.shape[1] + 40
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("asked", [
    dict(max_length=20), dict(repetition_penalty=1.7), dict(min_new_tokens=7), dict(min_length=30),
    dict(suppress_tokens=[5, 11]),
    dict(bad_words_ids=[[5], [12]]), dict(sequence_bias={(6,): 3.0, (7,): -5.0},
        repetition_penalty=1.3), dict(renormalize_logits=True),
    dict(max_time=60.0), dict(use_cache=False), dict(return_dict_in_generate=True),
    dict(cache_implementation="static"),
], ids=lambda asked: ",".join(asked))  # fmt: skip
def test_settings_that_have_their_like(llama, asked):
    wanted = {**GREEDY, **asked}
    if "repetition_penalty" in asked and not COUNTS_NO_PADDING:
        more = dict(attention_mask=MASK, **wanted, custom_generate=generate)
        refuses("rows of one length", llama.generate, ROWS, **more)
        assert torch.equal(*pair(llama, ROWS[:1], **wanted))
        return
    if "max_length" in asked:
        del wanted["max_new_tokens"]
    if "min_length" in asked or "min_new_tokens" in asked:
        plain = llama.generate(ROWS, attention_mask=MASK, **GREEDY)
        wanted["eos_token_id"] = plain[:, -40:].unique().tolist()[1:20]
    expected, ours = pair(llama, **wanted)
    if "return_dict_in_generate" in asked:
        assert type(ours) is type(expected)
        expected, ours = expected.sequences, ours.sequences
    assert torch.equal(ours, expected)


class Recorder(BaseStreamer):
    def __init__(self):
        self.events: list[Any] = []

    def put(self, value):
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_the_prompt_each_token_and_the_end(llama, rows):
    both = []
    for how in ({}, {"custom_generate": generator(method="logitspec", budget=6)}):
        both.append(Recorder())
        llama.generate(ROWS[:rows], attention_mask=MASK[:rows], **GREEDY, streamer=both[-1], **how)
    assert both[0].events == both[1].events and len(both[0].events) > 10


class Until(stopping.StoppingCriteria):
    """Ends a row once one of its last tokens is among `tokens`; remembers what it was shown."""

    def __init__(self, tokens):
        self.tokens, self.shown = torch.tensor(tokens), list[list[list[int]]]()

    def __call__(self, input_ids, scores, **_):
        assert scores is None
        self.shown.append(input_ids.tolist())
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("end", [END, None])
def test_stopping_criteria_are_asked_after_each_token(llama, end):
    wanted = {**GREEDY, "eos_token_id": end}
    plain = llama.generate(ROWS, attention_mask=MASK, **wanted)
    ends, seen, rows = [int(plain[0, 15]), int(plain[1, 25]), int(plain[2, 30])], [], []
    for how in ({}, {"custom_generate": generate}):
        seen.append(Until(ends))
        more = dict(stopping_criteria=stopping.StoppingCriteriaList([seen[-1]]), **how)
        rows.append(llama.generate(ROWS, attention_mask=MASK, **wanted, **more))
    assert torch.equal(*rows) and seen[0].shown == seen[1].shown
    assert rows[0].shape[1] < ROWS.shape[1] + 40


@pytest.fixture
def toy(toy_folder):
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    ids = tokenizer("abc abc", return_tensors="pt")["input_ids"]
    return AutoModelForCausalLM.from_pretrained(toy_folder), tokenizer, ids


def test_stop_strings_and_time(toy):
    model, tokenizer, ids = toy
    wanted = dict(do_sample=False, max_new_tokens=24, pad_token_id=PAD, repetition_penalty=1.7)
    text = tokenizer.decode(model.generate(ids, **wanted)[0, ids.shape[1] :])
    stop = stopping.StopStringCriteria(tokenizer, [re.search(r"[!-~]{2}", text)[0]])
    ends = stopping.StoppingCriteriaList([stop])
    expected, ours = pair(model, ids, **wanted, stopping_criteria=ends)
    assert torch.equal(ours, expected) and expected.shape[1] < ids.shape[1] + 24
    short = model.generate(ids, **wanted, max_time=0.0, custom_generate=generate)
    assert short.shape[1] == ids.shape[1] + 1


def test_a_smaller_model_drafts(toy, toy_folder):
    model, tokenizer, ids = toy
    wanted = dict(do_sample=False, max_new_tokens=24, pad_token_id=PAD)
    for more in ({"tokenizer": tokenizer}, {}):
        how = generator(method="dyspec", drafter=toy_folder, **more)
        assert torch.equal(*pair(model, ids, how, **wanted))
    refuses("drafter", model.generate, ids, **wanted, custom_generate=generate, method="dyspec")
    model.config._name_or_path = model.name_or_path = "/nowhere"
    more = dict(custom_generate=generate, drafter=toy_folder)
    refuses("tokenizer", model.generate, ids, **wanted, **more)


@pytest.mark.parametrize("asked", [
    dict(top_k=0), dict(temperature=0.6), dict(top_k=7, temperature=1.4), dict(top_p=0.8, top_k=0),
    dict(min_p=0.1, top_k=0, temperature=0.7),
    dict(top_k=20, top_p=0.9, min_p=0.05, temperature=0.8, repetition_penalty=1.4,
        suppress_tokens=[7], sequence_bias={(8,): 2.0}),
], ids=lambda asked: ",".join(asked))  # fmt: skip
def test_the_probs_of_a_token_is_that_of_the_processors(llama, asked):
    taken = {}
    note = lambda model, input_ids, **given: taken.update(given)  # noqa: E731
    llama.generate(ROWS[:1], **SAMPLED, **asked, custom_generate=note)
    processors, config = taken["logits_processor"], taken["generation_config"]
    params = params_of(processors, taken["stopping_criteria"], config, ROWS.shape[1], [TEXT])
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(VOCAB, generator=generator) * 3
        expected = processors(ROWS[:1], logits[None].clone())[0].softmax(0)
        probs = Sampler(params, TEXT, VOCAB).probs(logits)
        torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-6)


def test_torchs_seed_repeats_a_sampled_call_by_every_method(llama):
    def rows(seed, method):
        torch.manual_seed(seed)
        wanted = {**SAMPLED, "max_new_tokens": 24, "num_return_sequences": 3}
        how = dict(custom_generate=generate, method=method)
        return llama.generate(ROWS, attention_mask=MASK, **wanted, **how)[:, -24:].tolist()

    first = rows(1, "ar")
    assert rows(1, "ar") == rows(1, "logitspec") == rows(1, "pld") == first != rows(2, "ar")
    assert len({tuple(row) for row in first}) == 9  # each row has noise of its own
    state = torch.get_rng_state()
    llama.generate(ROWS, attention_mask=MASK, **GREEDY, custom_generate=generate)
    assert torch.equal(torch.get_rng_state(), state)


def with_list(processor, **more):
    return dict(logits_processor=processing.LogitsProcessorList([processor]), **more)


@pytest.mark.parametrize(("asked", "named"), [
    (dict(num_beams=2), "beam_search"), (dict(prompt_lookup_num_tokens=3), "assisted"),
    (dict(no_repeat_ngram_size=2), "NoRepeatNGram"),
    (dict(guidance_scale=1.5), "ClassifierFreeGuidance"),
    (dict(do_sample=True, typical_p=0.5), "TypicalLogitsWarper"),
    (dict(sequence_bias={(5, 6): 1.0}), r"SequenceBias.*\[5, 6\]"),
    (dict(prefix_allowed_tokens_fn=lambda row, ids: [5]), "PrefixConstrained"),
    (dict(synced_gpus=True), "synced_gpus"),
    (dict(return_dict_in_generate=True, output_scores=True), "output_scores"),
    (dict(return_dict_in_generate=True, output_hidden_states=True), "output_hidden_states"),
    (dict(method="dypsec"), "dypsec"),
    (dict(position_ids=torch.arange(12)[None] + 3), "position_ids"),
    ({CACHE: DynamicCache()}, CACHE),
    (dict(attention_mask=torch.tensor([[1] * 11 + [0]])), "attention_mask"),
    (dict(attention_mask=torch.tensor([[1, 0] + [1] * 10])), "left"),
    (with_list(processing.RepetitionPenaltyLogitsProcessor(1.2, 3)), "prompt_ignore_length"),
    (with_list(processing.TopPLogitsWarper(0.9, min_tokens_to_keep=3)), "min_tokens_to_keep"),
    (with_list(TOP_P, do_sample=True, top_k=5), "TopKLogitsWarper.*put it first"),
    (with_list(TOP_P, do_sample=True, top_k=0, top_p=0.5), "TopP.*twice"),
    (with_list(processing.MinLengthLogitsProcessor(20, 7)), "eos_token_id"),
    (with_list(processing.MinNewTokensLengthLogitsProcessor(4, 14, 7)), "to_skip must be 12"),
    (dict(max_new_tokens=5000), "context"),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else None)  # fmt: skip
def test_what_has_no_like_is_refused_by_name(llama, asked, named):
    refuses(named, llama.generate, ROWS[:1], **{**GREEDY, **asked}, custom_generate=generate)


def test_models_that_are_refused(llama):
    ask = dict(**GREEDY, custom_generate=generate)
    refuses("assisted", llama.generate, ROWS[:1], assistant_model=tiny("llama"), **ask)
    refuses("inputs_embeds", llama.generate, inputs_embeds=torch.zeros(1, 4, 32), **ask)
    refuses(r"model\.eval", copy.deepcopy(llama).train().generate, ROWS[:1], **ask)
    adapted = copy.deepcopy(llama)
    adapted.model.layers[0].mlp.get_base_layer = nn.Identity()
    refuses("merge_and_unload", adapted.generate, ROWS[:1], **ask)


def test_an_engine_is_kept_until_weights_change_and_goes_with_its_model():
    model = tiny("llama")
    made = [engine_of(model, None, None)]
    model.generate(ROWS[:1], **GREEDY, custom_generate=generate)
    assert engine_of(model, None, None) is made[0]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    for change in (lambda: None, model.double):
        change()
        assert torch.equal(*pair(model, ROWS[:1], **GREEDY))
        made.append(engine_of(model, None, None))
    hook = model.model.norm.register_forward_hook(lambda module, given, out: 2 * out.roll(1, -1))
    refuses(r"model\.norm has a forward of its own", engine_of, model, None, None)
    hook.remove()
    assert torch.equal(*pair(model, ROWS[:1], **GREEDY))
    made.append(engine_of(model, None, None))
    assert len(set(made)) == 4
    engine = weakref.ref(made[-1].engine)
    made.clear()
    del model, change
    gc.collect()
    for _ in range(300):  # its thread ends a moment later
        if engine() is None:
            break
        time.sleep(0.1)
    assert engine() is None


def test_a_failure_leaves_nothing_open():
    class Broken(stopping.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            if input_ids.shape[1] > 20:
                raise RuntimeError("broken")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model = tiny("llama")
    more = dict(stopping_criteria=stopping.StoppingCriteriaList([Broken()]), **GREEDY)
    given = dict(attention_mask=MASK, custom_generate=generate, **more)
    refuses("broken", model.generate, ROWS, **given, error=RuntimeError)
    assert not engine_of(model, None, None).engine.busy
    assert torch.equal(*pair(model, ROWS[:1], **GREEDY))
