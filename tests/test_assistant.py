"""Assistants of Gemma 4: transformers' own class is the reference; answers are plain decoding's,
whatever the assistant reads."""

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

import gguf_files
from answers import PROMPTS, answer, method_as_plain, request, run, same_as_plain
from cases import refuses, spread
from checkpoints import configure, rewrite
from drafters import DRAFTED
from features import Pair, held
from models import SIZES, tiny
from quickbeam import LLM
from quickbeam.drafters.assistant import OrderedHead, load_assistant
from quickbeam.drafters.layouts import ASSISTANT, BLOCK, is_kind
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.engine.engine import Engine
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import NoDraft
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams

VOCABULARY = 96  # whose tokens lie in 12 clusters
KINDS = ["sliding_attention", "full_attention"]
HEADS = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 6}
FIELDS = SIZES | HEADS | {"vocab_size": VOCABULARY}
PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
TARGETS: dict[str, dict[str, Any]] = {
    "shared": {"num_hidden_layers": 6, "layer_types": KINDS * 3, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "keys are values": {"num_hidden_layers": 4, "layer_types": KINDS * 2}
    | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | PLAIN,
}
SAME = ("num_global_key_value_heads", "attention_k_eq_v")
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
HEAD = {"all": {}, "ordered": ORDERED}
pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")


def randomised(model, seed):
    """Weights that tell places and tokens apart, norms and scalars that matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("layer_scalar"):
                one.fill_(0.8)
            elif one.is_floating_point() and one.dim() == 1 and "inv_freq" not in name:
                one.add_(torch.randn_like(one) * 0.2)
            elif one.dim() > 1 and "embed" not in name:
                one.copy_(torch.randn_like(one) * one.shape[-1] ** -0.5 * 1.5)
            elif one.dim() > 1:
                one.copy_(torch.randn_like(one) * 0.4)
    return model.eval().requires_grad_(False)


class Assisted(Pair):
    def __init__(self, target="shared", head="all"):
        self.model = randomised(tiny("", config=Gemma4TextConfig(**FIELDS | TARGETS[target])), 3)
        kept = {one: TARGETS[target][one] for one in SAME if one in TARGETS[target]}
        small = {"hidden_size": 16, "layer_types": KINDS[::-1] + KINDS[1:]}
        self.assist(Gemma4TextConfig(**FIELDS | PLAIN | kept | small), **HEAD[head])

    def assist(self, text, **options):
        width = self.model.config.hidden_size
        own = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width, **options)
        self.network = randomised(Gemma4AssistantForCausalLM(own), 5)
        if own.use_ordered_embeddings:
            self.network.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))

    def open(self, folder, dtype=torch.float32, **options):
        """Have a target and its drafter read what is written to `folder`."""
        for one in (self.model, self.network):
            one.to(dtype).float()
        copy.deepcopy(self.network).to(dtype).save_pretrained(folder)
        self.target = make_model(copy.deepcopy(self.model).to(dtype), chunk=6)
        self.drafter = load_assistant(folder, self.target, **options)
        return self

    @torch.inference_mode()
    def expected(self, ids, tree, nodes, temperature):
        """By transformers' class alone; tokens that it does not score have probability 0."""
        asked = dict(output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        read = self.model(torch.tensor([ids[:-1]]), **asked)
        states, kept = read.hidden_states[-1][:, -1:], dict(read.shared_kv_states)
        embed, distributions = self.model.get_input_embeddings(), []
        for node in nodes:
            hidden = states
            for below in tree.path(node):
                token = embed(torch.tensor([[tree.token[below]]]))
                out = self.network(
                    inputs_embeds=torch.cat([token, hidden], -1),
                    position_ids=torch.tensor([[len(ids) - 1]]),
                    shared_kv_states=kept,
                )
                hidden = out.last_hidden_state
            logits = out.logits[0, -1]
            if self.network.config.use_ordered_embeddings:
                logits = logits.masked_fill(logits == logits.min(), -torch.inf)
            distributions.append((logits / temperature).softmax(-1))
        return torch.stack(distributions)


def opened(folder, target="shared", head="all", **options):
    return Assisted(target, head).open(folder, **options)


@pytest.mark.parametrize(("target", "head"), spread(list(TARGETS), list(HEAD)))
def test_distributions_are_those_of_transformers_class(target, head, tmp_path):
    def scored(probs, right):
        probs = probs * (right > 0)  # what other nodes of the call asked for counts, too
        return probs / probs.sum(-1, keepdim=True), right

    pair = opened(tmp_path, target=target, head=head)
    assert max(pair.distances((9,), 3, VOCABULARY, scored)) < 1e-4


def test_the_kernels_score_the_clusters_that_fit_each_row():
    """In 8 bits, as nearly as that tells: what a row scores alone is among what a call scores."""
    torch.manual_seed(0)
    weight, centroids = torch.randn(VOCABULARY, 64), torch.randn(6, 64)
    layout = Layout(torch.randperm(VOCABULARY), 0, 16, VOCABULARY)
    rows = centroids[[1, 4]] + 0.3 * torch.randn(2, 64)  # each near a centroid
    plain, native = (
        OrderedHead(weight.to(dtype), layout, centroids.to(dtype), 1, library.kernels())(
            [rows.to(dtype)]
        )[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert native.tokens.tolist() == plain.tokens.tolist()
    assert {*plain.tokens.tolist()} == {*layout.scored(torch.tensor([1, 4])).tolist()}
    torch.testing.assert_close(plain.logits, rows @ weight[plain.tokens].T)
    torch.testing.assert_close(native.logits, plain.logits, atol=0.3, rtol=0.05)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = lambda: tmp_path_factory.mktemp("assistant")  # noqa: E731
    return cache(lambda *kind: opened(folder(), *kind, dtype=torch.bfloat16))


@pytest.mark.parametrize("target", TARGETS)
def test_a_gguf_file_holds_the_folders_assistant(target, tmp_path):
    pair = opened(tmp_path, target=target)
    file = gguf_files.assistant(tmp_path / "a.gguf", pair.network)
    assert is_kind(file, ASSISTANT) and not is_kind(file, BLOCK)
    pair.drafter = load_assistant(file, pair.target)
    assert max(pair.distances((9,), 3, VOCABULARY)) < 1e-4


def test_a_gguf_file_that_does_not_fit_is_refused_by_name(tmp_path):
    pair, file = opened(tmp_path), tmp_path / "a.gguf"
    for keys, why in (
        ({"embedding_length_out": 48}, "states 48 wide, the target's are 32"),
        ({"embedding_length_out": None}, "no gemma4-assistant.embedding_length_out"),
        ({"other": 3}, "its metadata sets gemma4-assistant.other"),
    ):
        gguf_files.assistant(file, pair.network, **keys)
        refuses(f"a.gguf.*{why}", load_assistant, file, pair.target)
    gguf_files.assistant(file, pair.network)
    eager = make_model(copy.deepcopy(pair.model), native=False)
    refuses("an assistant needs the native kernels", load_assistant, file, eager)
    refuses("of Gemma 4, the target is a llama", load_assistant, file, make_model(tiny("llama")))


def test_a_gguf_assistant_in_blocks_drafts(tmp_path):
    pair = opened(tmp_path, dtype=torch.bfloat16)
    q8 = gguf.GGMLQuantizationType.Q8_0
    pair.drafter = load_assistant(
        gguf_files.assistant(tmp_path / "a.gguf", pair.network, q8), pair.target
    )
    same_as_plain(pair.target, pair.drafter)


@pytest.mark.parametrize(("target", "head"), spread(list(TARGETS), list(HEAD)))
def test_answers_are_plain_decodings_alone_and_six_at_a_time(target, head, pairs):
    pair = pairs(target, head)
    same_as_plain(pair.target, pair.drafter)


def test_the_engine_has_it_draft_from_the_right_hidden_state(tmp_path):
    pair = opened(tmp_path, head="all")
    for prompt in PROMPTS[:3]:
        with held(pair.drafter, pair.expected):
            method_as_plain(pair.target, DRAFTED["dyspec"](pair.drafter), prompt)


def test_what_was_computed_of_a_beginning_is_shared(pairs):
    """The assistant reads no hidden state but the last: it drafts the same behind a cached text."""
    pair, prompt = pairs("shared", "all"), list(range(90)) * 2
    params, engine = SamplingParams(max_tokens=12, ignore_eos=True), Engine(pair.target)
    method = DRAFTED["dyspec"](pair.drafter)
    asked = pair.target, method, params, prompt
    first, second = (answer(*asked, engine=engine, budget=6) for _ in range(2))
    assert (first.statistics.cached_tokens, second.statistics.cached_tokens) == (0, 128)
    assert first.output.token_ids == second.output.token_ids
    assert first.statistics.steps == second.statistics.steps
    engine.close()


def test_a_sequence_that_was_preempted_goes_on_drafting(pairs):
    pair = pairs("shared", "all")
    params, engine = SamplingParams(max_tokens=40, ignore_eos=True), Engine(pair.target)
    plain = answer(pair.target, NoDraft(), params, PROMPTS[0]).output.token_ids
    method = DRAFTED["dyspec"](pair.drafter)
    one = engine.add(request(pair.target, method, params, PROMPTS[0], budget=6))
    while len(one.output.token_ids) < 12:
        engine.step()
    engine.scheduler.preempt(one)
    calls = one.statistics.drafter_calls
    run(engine, one)
    assert one.output.token_ids == plain and one.statistics.preemptions == 1
    assert one.statistics.drafter_calls > calls
    engine.close()


def test_it_is_named_like_any_drafter(toy_folder, tmp_path):
    vocab = json.loads((Path(toy_folder) / "config.json").read_text())["vocab_size"]
    small = FIELDS | PLAIN | {"num_hidden_layers": 2, "layer_types": KINDS, "vocab_size": vocab}
    pair = Assisted.__new__(Assisted)
    pair.model = randomised(tiny("", config=Gemma4TextConfig(**small)), 3)
    pair.assist(Gemma4TextConfig(**small))
    pair.open(tmp_path / "assistant", torch.bfloat16)
    shutil.copytree(toy_folder, tmp_path / "model")
    pair.model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    params, folder = SamplingParams(max_tokens=12, ignore_eos=True), str(tmp_path / "model")
    drafter = str(tmp_path / "assistant")
    with LLM(folder, drafter=drafter) as llm, LLM(folder, "ar") as plain:
        one = llm.generate("abc abc abc", params, method="dyspec", budget=8)
        assert one.statistics.sources["drafter"].drafted > 0
        assert one.token_ids == plain.generate("abc abc abc", params).token_ids
        with pytest.raises(InvalidInput, match=r"head of its own.*take --vocab full"):
            llm.generate("abc", params, method="dyspec", vocab="context")
    with pytest.raises(InvalidInput, match=r"draft_weights='int8': .* is a feature drafter"):
        LLM(folder, drafter=drafter, draft_weights="int8")


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    pair = opened(tmp_path / "a", target="shared")
    path = tmp_path / "a"
    assert is_kind(path, ASSISTANT) and not is_kind(tmp_path, ASSISTANT)
    with pytest.raises(InvalidInput, match="an assistant of Gemma 4, the target is a llama"):
        load_assistant(path, make_model(tiny("llama")))
    narrow = FIELDS | PLAIN | {"num_hidden_layers": 2, "layer_types": KINDS, "global_head_dim": 8}
    other = make_model(tiny("", config=Gemma4TextConfig(**narrow)))
    refuses(r"it has 4 heads of 16, the target", load_assistant, path, other)
    eager = make_model(copy.deepcopy(pair.model), native=False)
    refuses("an assistant needs the native kernels", load_assistant, path, eager)
    configure(path, backbone_hidden_size=48)
    refuses("states 48 wide, the target's are 32", load_assistant, path, pair.target)
    configure(path, backbone_hidden_size=32)
    rewrite(path, {"pre_projection.weight": torch.ones(3, 4)})
    with pytest.raises(InvalidInput, match=r"pre_projection.weight has shape \[3, 4\], expected"):
        load_assistant(path, pair.target)


def test_fields_of_another_kind_are_refused(tmp_path):
    pair, path = opened(tmp_path, head="ordered"), tmp_path / "config.json"
    whole = path.read_text()
    for part, field, value in (
        ("text_config", "rope_parameters", {}),
        ("text_config", "num_hidden_layers", 7),
        ("text_config", "num_hidden_layers", 1 << 31),
        ("text_config", "layer_types", True),
        ("text_config", "sliding_window", [6]),
        ("text_config", "rms_norm_eps", {}),
        ("text_config", "enable_moe_block", "x"),
        (None, "text_config", True),
        (None, "centroid_intermediate_top_k", -1),
    ):
        config = json.loads(whole)
        (config if part is None else config[part])[field] = value
        path.write_text(json.dumps(config))
        with pytest.raises(InvalidInput):
            load_assistant(tmp_path, pair.target)
