"""Models larger than an accelerator's memory: copies that come as early or as late as they may give
what the whole model does."""

import pytest
import torch

from cases import refuses
from models import tiny
from quickbeam.llm import LLM
from quickbeam.models.compile import native_model
from quickbeam.models.families import describe
from quickbeam.models.opening import make_model
from quickbeam.models.torch import pinned as of_pinned
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.torch.network import Network
from quickbeam.models.torch.pinned import BUFFERS, Copies, PinnedLayers, layer_bytes, pin_layers
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams
from streaming import bush, ids, saved
from target import Target

CPU = torch.device("cpu")
LAYOUTS = ("llama", "qwen2", "qwen3", "mistral-window", "gpt2", "gemma2-softcap-window", "phi3")
DEEP = 7  # layers


class Late(Copies):
    """Copies when somebody waits for them, and no sooner."""

    def __init__(self):
        super().__init__(CPU)
        self.asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(self, slot, target, source):
        target.fill_(255)  # from now on the buffer may hold anything
        self.asked[slot] = target, source

    def wait(self, slot):
        if slot in self.asked:
            super().start(slot, *self.asked.pop(slot))


def deep(layout="llama", dtype=torch.float32):
    return tiny(layout, dtype, layers=DEEP)


def whole(layout="llama"):
    return outputs(Target(make_model(deep(layout), native=False)))


def network(model):
    return Network(ModelParameters(model), describe(model), CPU, model.dtype)


def limits(layout="llama", dtype=torch.float32):
    return limits_of(deep(layout, dtype))


def limits_of(model):
    """Memory for no layer that stays, one, … and all but three."""
    made = network(model)
    piece = max(map(layer_bytes, made.blocks))
    fixed = sum(one.nbytes for one in made.parameters())
    fixed -= sum(one.nbytes for one in made.blocks.parameters())
    return [fixed + (BUFFERS + held) * piece for held in range(DEEP - BUFFERS)]


def pinned(layout, held, copies=None, device=CPU, dtype=torch.float32):
    limit = limits(layout, dtype)[held]
    made = deep(layout, dtype)
    model = TorchModel(ModelParameters(made), describe(made), device, memory=limit, copies=copies)
    assert isinstance(model.streamed, PinnedLayers)
    return Target(model)


def outputs(target):
    tree = bush(9)
    logits = [target.prefill(ids(40)), *map(target.verify, (bush(1), bush(5), tree))]
    target.commit(tree, tree.path(len(tree) - 1))
    return [*logits, target.verify(bush(3))]


def same(one, other):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("copies", [None, Late])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_come_and_go_compute_what_the_whole_model_does(layout, copies):
    assert same(outputs(pinned(layout, 1, copies and copies())), whole(layout))


@pytest.mark.parametrize("held", range(DEEP - BUFFERS))
def test_every_division_of_the_memory_gives_the_same_bits(held):
    early, late = (pinned("qwen2", held, copies) for copies in (None, Late()))
    first = pinned("qwen2", 0)
    for a, b, c in zip(outputs(early), outputs(late), outputs(first), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    streamed = early.model.streamed
    assert isinstance(streamed, PinnedLayers)
    piece = max(map(layer_bytes, network(deep("qwen2")).blocks))
    record, limit = streamed.record(), limits("qwen2")[held]
    assert record["streamed_bytes"] == (DEEP - held) * piece
    assert record["buffer_bytes"] == BUFFERS * piece
    assert record["resident_bytes"] + record["buffer_bytes"] <= limit
    assert "a pass from host memory" in streamed.in_words


class Hasty(PinnedLayers):
    """Wrong: takes the next layer before this one is computed."""

    def _before(self, number):
        super()._before(number)
        super()._after(number)

    def _after(self, number):
        pass


class Trusting(PinnedLayers):
    """Wrong: computes without waiting for the copy."""

    def _before(self, number):
        if self._layer_in_slot[number % BUFFERS] != number:
            self._fetch(number)


@pytest.mark.parametrize(("wrong", "copies"), [(Hasty, lambda: Copies(CPU)), (Trusting, Late)])
def test_wrong_orders_of_copies_are_caught(wrong, copies, monkeypatch):
    monkeypatch.setattr(of_pinned, "PinnedLayers", wrong)
    assert not same(outputs(pinned("llama", 1, copies())), whole())


def test_a_pass_that_ends_midway_leaves_nothing_wrong():
    target = pinned("llama", 1)
    handle = target.model._network.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.prefill(ids(10))
    handle.remove()
    target.reset()
    assert same(outputs(target), whole())


def test_what_fits_is_left_alone_and_what_can_t_is_refused():
    assert pin_layers(network(deep()), 1 << 30, CPU) is None
    least = limits()[0]
    refuses(r"needs at least \d+MB on cpu", pin_layers, network(deep()), least - 1, CPU)


@pytest.mark.parametrize("method", ["ar", "logitspec", "dyspec"])
def test_an_llm_gives_the_answers_of_the_whole_model(method, tmp_path, toy_folder, monkeypatch):
    big = saved("qwen2", tmp_path / "big", toy_folder, layers=DEEP)
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True)
    plain = LLM(big, dtype="float32", method="ar").generate([[3, 4, 5, 3, 4], [7, 8]], params)
    limit = limits_of(tiny("qwen2", wide=True, layers=DEEP))[1]

    monkeypatch.setattr(native_model, "no_kernels_for", lambda *_: "as on a GPU")
    drafter = big if method == "dyspec" else None
    llm = LLM(big, dtype="float32", method=method, drafter=drafter, memory=limit, budget=0)
    assert isinstance(llm.model.streamed, PinnedLayers) and "from host memory" in llm.describe()
    answers = llm.generate([[3, 4, 5, 3, 4], [7, 8]], params)
    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
    llm.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_copies_beside_the_passes_give_the_same_bits(dtype):
    device = torch.device("cuda")
    everything = Target(make_model(deep("llama", dtype).to(device)))
    target = pinned("llama", 0, device=device, dtype=dtype)
    for _ in range(5):
        assert all(map(torch.equal, outputs(target), outputs(everything)))
        target.reset()
        everything.reset()
