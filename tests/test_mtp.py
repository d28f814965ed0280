"""MTP heads: transformers' own class is the reference; answers are plain decoding's, whatever the
head reads."""

import copy
import json
import shutil
from functools import cache

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from answers import PROMPTS, answer, method_as_plain, same_as_plain
from cases import few, refuses
from drafters import DRAFTED
from features import Pair, held
from gguf_files import model_of, mtp_block, write
from models import table, tiny
from quickbeam import LLM, hub
from quickbeam.drafters.mtp import load_mtp
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import NoDraft
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import make_model, open_model
from quickbeam.params import SamplingParams

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

KINDS = table("mtp")
# transformers' names of a head's modules, and those of published checkpoints
PARTS = ("eh_proj", "enorm", "hnorm", "post_norm", "mtp_block")


def named(at, *own):
    return dict(zip(PARTS, (at + one for one in own), strict=True))


QWEN = named("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0")
DEEPSEEK = named("model.layers.3", ".eh_proj", ".enorm", ".hnorm", ".shared_head.norm", "")
OF_MIMO = (".input_proj", ".token_layernorm", ".hidden_layernorm", ".final_layernorm", "")
MIMO = named("model.mtp_layers.0", *OF_MIMO)
NAMES = {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "mimo": MIMO}
every_kind = pytest.mark.parametrize("kind", few(KINDS, ["qwen3_5", "deepseek_v3"]))


class Head(Pair):
    def __init__(self, kind, dtype=torch.float32, config=None):
        self.kind = kind
        self.model = tiny("", seed=3, config=config or KINDS[kind]).to(dtype).float()
        layers, config = self.model.model.layers, copy.deepcopy(self.model.config)
        config.mtp_hidden_states_first = kind == "mimo"
        place, norm = min(1, len(layers) - 1), type(self.model.model.norm)
        self.layer = MtpLayer(config, type(layers[place]), norm, place).eval().requires_grad_(False)
        torch.manual_seed(5)
        for name, parameter in self.layer.named_parameters():
            parameter.normal_(0, 0.2 if parameter.dim() > 1 else 0.3)
            if "norm" in name and not kind.startswith("qwen3_"):
                parameter.add_(1)
        for buffer in self.layer.buffers():
            buffer.zero_()
        self.layer.to(dtype).float()

    def stored(self):
        """The head's tensors by the names of published checkpoints, each expert's apart."""
        parts, tensors = NAMES.get(self.kind, QWEN), dict[str, torch.Tensor]()
        for name, tensor in self.layer.state_dict().items():
            module, _, rest = name.partition(".")
            name = f"{parts[module]}.{rest}"
            at, _, kind = name.rpartition(".experts.")
            if not at:
                tensors[name] = tensor
                continue
            for i, one in enumerate(tensor):
                halves = zip(("gate", "up"), one.chunk(2), strict=True)
                apart = dict(halves) if kind == "gate_up_proj" else {"down": one}
                tensors |= {f"{at}.experts.{i}.{part}_proj.weight": w for part, w in apart.items()}
        return tensors

    def open(self, folder, dtype=torch.float32, native=True, **options):
        """Have a target and its drafter read what is written to `folder`. `native`: as of
        `make_model`."""
        self.model.config.save_pretrained(folder)
        tensors = {name: one.to(dtype).contiguous() for name, one in self.stored().items()}
        save_file(tensors, folder / "model.safetensors")
        self.target = make_model(copy.deepcopy(self.model).to(dtype), native=native, chunk=6)
        self.normed = options.get("normed", True)
        self.drafter = load_mtp(folder, self.target, **options)
        return self

    def open_file(self, path, architecture, dtype=torch.float32, plus=1.0, kinds=None):
        """The same of a `.gguf` file. `plus`, `kinds`: as of `mtp_block` and `write`."""
        behind = mtp_block(architecture, self.model.config.num_hidden_layers, self.layer, plus)
        write(path, architecture, self.model, kinds, behind=behind)
        self.target = open_model(str(path), dtype, torch.device("cpu")).model
        self.normed, self.drafter = True, load_mtp(path, self.target)
        return self

    def run(self, hidden, tokens):
        """The equations over a whole text by transformers' class, `[n, d]` before the last norm."""
        n = len(tokens)
        embedded = self.model.get_input_embeddings()(torch.tensor([list(tokens)]))
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        angles = self.model.model.rotary_emb(embedded, positions)
        self.layer.use_post_norm = False
        return self.layer(embedded, hidden[None], angles, mask, positions, None)[0]

    def states(self, ids):
        """The model's hidden states, before or behind its last norm."""
        caught = list[torch.Tensor]()
        note = lambda _, given, out: caught.append(out if self.normed else given[0])  # noqa: E731
        hook = self.model.model.norm.register_forward_hook(note)
        self.model(torch.tensor([list(ids)]), use_cache=False)
        hook.remove()
        return caught[0][0]

    @torch.inference_mode()
    def expected(self, ids, tree, nodes, temperature):
        certain, distributions = self.states(ids[:-1]), []
        for node in nodes:
            tokens, hidden = ids[1:], certain
            out = self.run(hidden, tokens)
            for below in tree.path(node)[1:]:
                last = self.layer.post_norm(out[-1:]) if self.normed else out[-1:]
                tokens, hidden = [*tokens, tree.token[below]], torch.cat([hidden, last])
                out = self.run(hidden, tokens)
            logits = self.model.lm_head(self.layer.post_norm(out[-1]))
            distributions.append((logits / temperature).softmax(-1))
        return torch.stack(distributions)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    half = torch.bfloat16
    return cache(lambda kind: Head(kind, half).open(tmp_path_factory.mktemp(kind), half))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@every_kind
def test_distributions_are_those_of_transformers_class(kind, normed, native, tmp_path):
    head = Head(kind).open(tmp_path, native=native, normed=normed)
    assert isinstance(head.drafter.passes, NativePasses if native else TorchPasses)
    assert max(head.distances((9,), 2)) < 1e-4


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_heads_in_gguf_files_are_those_of_transformers_class(architecture, tmp_path):
    head = Head("qwen3_5", config=model_of(architecture).config)
    assert max(head.open_file(tmp_path / "x.gguf", architecture).distances((9,), 2)) < 1e-4
    wrong = head.open_file(tmp_path / "y.gguf", architecture, plus=0.0)
    assert max(wrong.distances((9,), 2)) > 1e-2


def test_a_head_in_a_gguf_file_drafts_by_itself(tmp_path):
    file, head = tmp_path / "x.gguf", Head("qwen3_5", config=model_of("qwen35").config)
    kinds = {"attn": gguf.GGMLQuantizationType.Q8_0, "ffn": gguf.GGMLQuantizationType.Q5_0}
    head.open_file(file, "qwen35", torch.bfloat16, kinds=kinds)
    same_as_plain(head.target, head.drafter)
    assert hub.drafter_of(str(file)) == "mtp"
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(file)) as llm:
        drafted, plain = (llm.generate("abc abc", params, method=one) for one in ("dyspec", "ar"))
        assert drafted.token_ids == plain.token_ids
        assert drafted.statistics.sources["drafter"].drafted > 0
    behind = mtp_block("qwen35", 3, head.layer)
    del behind["blk.3.ffn_up.weight"]
    write(tmp_path / "lacks.gguf", "qwen35", head.model, behind=behind)
    refuses(r"lack.*up_proj", LLM, str(tmp_path / "lacks.gguf"))
    write(tmp_path / "none.gguf", "qwen35", head.model)
    assert hub.drafter_of(str(tmp_path / "none.gguf")) is None
    refuses("no MTP head of a known layout", LLM, str(tmp_path / "none.gguf"), drafter="mtp")


@every_kind
def test_answers_are_plain_decodings_alone_and_six_at_a_time(kind, heads):
    head = heads(kind)
    same_as_plain(head.target, head.drafter)


@every_kind
def test_the_engine_has_it_draft_from_the_right_hidden_states(kind, tmp_path):
    head = Head(kind).open(tmp_path)
    for prompt in PROMPTS[:3]:
        for name in ("dyspec", "chain"):
            with held(head.drafter, head.expected):
                method_as_plain(head.target, DRAFTED[name](head.drafter), prompt)


def test_weights_in_8_bits_and_numbers_that_are_not_finite_change_no_answer(tmp_path, heads):
    params, target = SamplingParams(max_tokens=12, ignore_eos=True), heads("qwen3_5").target
    plain = answer(target, NoDraft(), params, [3, 1]).output.token_ids
    for weights, value in ((BFLOAT16, 1.0), (None, float("nan"))):
        head = Head("qwen3_5", torch.bfloat16)
        head.layer.eh_proj.weight[0, 0] = value
        drafter = head.open(tmp_path, torch.bfloat16, weights=weights).drafter
        drafted = answer(head.target, DRAFTED["dyspec"](drafter), params, [3, 1], budget=8)
        assert drafted.output.token_ids == plain
        assert (drafted.statistics.sources["drafter"].drafted > 0) == (weights is not None)


def with_head(folder, source, **changes):
    """A copy of a Llama's folder whose files hold a head of DeepSeek's layout besides."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    stored, config = load_file(path), json.loads((folder / "config.json").read_text())
    layers, size = config["num_hidden_layers"], config["hidden_size"]
    last, at = f"model.layers.{layers - 1}.", f"model.layers.{layers}"
    head = {n.replace(last, f"{at}."): t.clone() for n, t in stored.items() if n.startswith(last)}
    head |= {f"{at}.{n}.weight": torch.ones(size) for n in ("enorm", "hnorm", "shared_head.norm")}
    head[f"{at}.eh_proj.weight"] = torch.randn(size, 2 * size)
    head |= {name.replace("@", at): tensor for name, tensor in changes.items()}
    kept = {n: t for n, t in (stored | head).items() if t is not None}
    save_file(kept, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def test_a_head_in_the_models_own_files_drafts_by_itself(toy_folder, tmp_path):
    assert hub.drafter_of(toy_folder) is None
    folder = with_head(tmp_path / "model", toy_folder)
    assert hub.drafter_of(str(folder)) == "mtp"
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(folder)) as llm, LLM(toy_folder, "ar") as plain:
        assert llm.method == "auto" and "dyspec" in llm.methods
        one = llm.generate("abc abc abc", params, method="dyspec", budget=8)
        assert one.statistics.sources["drafter"].drafted > 0
        assert one.token_ids == plain.generate("abc abc abc", params).token_ids
    with LLM(str(folder), dtype="float32", drafter="mtp") as llm:
        assert llm.generate("abc", params, method="dyspec").statistics.drafter_calls > 0


def test_what_is_no_head_is_refused_by_name(toy_folder, tmp_path):
    refuses("no MTP head of a known layout", LLM, toy_folder, drafter="mtp")
    missing = with_head(tmp_path / "a", toy_folder, **{"@.mlp.up_proj.weight": None})
    refuses(r"lack .*mlp\.up_proj.*download it again", LLM, str(missing))
    odd = with_head(tmp_path / "b", toy_folder, **{"@.enorm.weight": torch.ones(3)})
    refuses(r"enorm.weight has shape \[3\]", LLM, str(odd), drafter="mtp")
    with pytest.raises(InvalidInput, match="draft_weights='int8': mtp is a feature drafter"):
        LLM(str(with_head(tmp_path / "c", toy_folder)), drafter="mtp", draft_weights="int8")


def test_a_head_drafts_where_pytorch_runs_the_model(toy_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    folder = str(with_head(tmp_path / "model", toy_folder))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(folder, dtype="float32") as llm:
        drafted, plain = (llm.generate("abc abc", params, method=one) for one in ("dyspec", "ar"))
        assert drafted.token_ids == plain.token_ids
        assert drafted.statistics.sources["drafter"].drafted > 0


def test_a_head_in_a_gguf_file_drafts_where_pytorch_runs_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    head = Head("qwen3_5", config=model_of("qwen35").config)
    head.open_file(tmp_path / "x.gguf", "qwen35")
    assert isinstance(head.drafter.passes, TorchPasses)
    assert max(head.distances((9,), 2)) < 1e-4
