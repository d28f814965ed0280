"""What training owes a GPU: no waiting in a step, few launches, hidden states in its memory."""

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cases import before
from quickbeam.train import muon, recipes
from quickbeam.train.block import BlockTraining, new_block_network
from quickbeam.train.muon import Muon
from quickbeam.train.recipes import HIDDEN_FOLDER
from quickbeam.train.shards import collate
from quickbeam.train.states import StateCache, StateFiles
from quickbeam.train.trainer import Trainer
from test_train_block import CONFIG, SMALL, D, frozen, model, own_text
from test_train_shortlist import written

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
KEPT = {"memory": lambda folder: {}, "files": StateFiles}


def target(device="cpu"):
    return frozen(model().to(device), (*CONFIG.aux_layers, 3))


def trainer(folder, of, states=None):
    text, out = folder / "text", folder / "out"
    written(text, own_text(model(), 20))
    drafter = BlockTraining(new_block_network(CONFIG, of, 0), SMALL.spacing)
    return Trainer(drafter, of, text, SMALL, 10**6, out, 1e9, 1e9, states=states)


def test_a_step_asks_nothing_of_what_the_device_computed(tmp_path, monkeypatch):
    """From the target's pass on, tensors have no values that the host could wait for."""
    run, read = trainer(tmp_path, of := target()), of.read
    run._states = StateCache(of, {}, 10**6)
    with ExitStack() as stack:

        def valueless(batch):
            hidden = read(batch)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            return hidden

        monkeypatch.setattr(of, "read", valueless)
        figures = run._step(next(run.batches()))
        assert figures.shape == (2,)
        with pytest.raises(DataDependentOutputException):
            figures.tolist()


def test_a_step_has_the_learning_rate_of_the_models_width(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "HIGHEST_RATE", 1.0)
    run = trainer(tmp_path, target())
    run.recipe = replace(SMALL, lr=None)
    run._step(next(run.batches()))
    groups = [group for one in run._optimizers for group in one.param_groups]
    assert {group["lr"] for group in groups} == {run.recipe.rate(0, 0.0, D)}


@CUDA
def test_on_cuda_steps_do_not_wait(tmp_path):
    run = trainer(tmp_path, target("cuda"))
    for conversation in run.shards:  # each is read once, and the target's pass may wait
        run._states.read(collate([conversation]))
    batches = run.batches()
    figures = [run._step(next(batches)) for _ in range(3)]  # what is made once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        figures += [run._step(next(batches)) for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(figures).isfinite().all()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.1)])
def test_muon_makes_the_steps_of_pytorchs(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(muon, "fast_bfloat16", lambda device: dtype == "bfloat16")
    if dtype == "float32":  # PyTorch's computes in bfloat16 alone
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (12, 8), (8, 8), (8, 12), (8, 20)]

    def random():
        return [torch.randn(shape, generator=generator) for shape in shapes]

    begin, gradients = random(), [random() for _ in range(6)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in begin] for _ in range(2))
    plain = torch.optim.Muon(theirs, lr=0.1, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    batched = Muon(ours, 0.1)
    for number, step in enumerate(gradients):
        for one, other, gradient in zip(ours, theirs, step, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        batched.step()
        plain.step()
        for one, other, p in zip(ours, theirs, begin, strict=True):
            assert (one - other).norm() < tolerance * (other - p).norm()
        if number == 2:  # a checkpoint that PyTorch's wrote is read
            batched = Muon(ours, 0.1)
            batched.load_state_dict(deepcopy(plain.state_dict()))


def test_muon_steps_a_large_matrix_block_by_block(monkeypatch):
    """Each block of rows, or of columns where they are fewer, makes the step of its own matrix."""
    monkeypatch.setattr(muon, "BLOCK_ROWS", 5)
    generator = torch.Generator().manual_seed(0)
    wide, gradient = (torch.randn(12, 20, generator=generator) for _ in range(2))
    for dim, (matrix, slope) in enumerate(((wide, gradient), (wide.T, gradient.T))):
        whole = torch.nn.Parameter(matrix.clone())
        parts = [torch.nn.Parameter(part.clone()) for part in matrix.split(4, dim)]
        whole.grad = slope.clone()
        for part, its in zip(parts, slope.split(4, dim), strict=True):
            part.grad = its.clone()
        Muon([whole], 0.1).step()
        Muon(parts, 0.1).step()
        torch.testing.assert_close(torch.cat(parts, dim), whole)
        assert not torch.allclose(whole, matrix)


def test_hidden_states_of_another_target_are_not_taken(tmp_path):
    texts = collate(own_text(model(), 2, seed=4))
    StateCache.of(target(), tmp_path).read(texts)
    other = model()
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)
    for of in (
        frozen(other, (*CONFIG.aux_layers, 3)),
        frozen(model(), (*CONFIG.aux_layers, 2)),
    ):
        right = of.read(texts).hidden
        assert torch.equal(StateCache.of(of, tmp_path).read(texts).hidden, right)


def test_a_new_training_takes_what_was_recorded_before_it_began(tmp_path, monkeypatch):
    """What it reads itself it keeps beside that, and what another target left goes."""
    of, reads, hidden = target(), list[int](), tmp_path / "out" / HIDDEN_FOLDER
    StateCache.of(frozen(model(), (1, 3)), hidden).read(collate(own_text(model(), 2)))
    states = StateCache.of(of, hidden)
    for one in own_text(model(), 20)[1:]:
        states.add(one.tokens, of.read(collate([one])).hidden[0, :-1])
    run = trainer(tmp_path, of, states)
    before(monkeypatch, of, "read", lambda batch: reads.append(len(batch.tokens)))
    first = collate([run.shards[0]])
    for batch in (first, first, collate(run.shards[1:])):
        states.read(batch)
    assert reads == [1]
    assert [one.name for one in hidden.iterdir()] == [of.digest()]


@pytest.mark.parametrize("where", KEPT)
def test_hidden_states_are_kept_as_far_as_they_fit(where, tmp_path, monkeypatch):
    of, reads, texts = target(), list[int](), own_text(model(), 4, seed=4)
    size = collate(texts)
    hidden = of.read(size).hidden
    bytes_of = [hidden[0, :n].nbytes for n in size.lengths.tolist()]
    before(monkeypatch, of, "read", lambda batch: reads.append(len(batch.tokens)))
    cache = StateCache(of, KEPT[where](tmp_path / "all"), sum(bytes_of))
    cache.read(size)
    for chosen in ([0, 1, 2, 3], [2, 0]):
        batch = cache.read(collate([texts[i] for i in chosen]))
        for i, row, n in zip(chosen, batch.hidden, batch.lengths.tolist(), strict=True):
            assert torch.equal(row[:n], hidden[i, :n])
    assert reads == [4]
    new = own_text(model(), 2, seed=9)
    batch = cache.read(collate([new[0], texts[1], new[1]]))
    assert torch.equal(batch.hidden[1, : batch.lengths[1]], hidden[1, : batch.lengths[1]])
    right = of.read(batch).hidden  # the new ones are read without the other one
    torch.testing.assert_close(batch.hidden, right)
    assert reads == [4, 2, 3]
    reads[:] = [4]
    kept = KEPT[where](tmp_path / "half")
    cache = StateCache(of, kept, bytes_of[0] + bytes_of[1] - 1)
    for i in (0, 1, 0, 1):
        cache.read(collate([texts[i]]))
    assert reads == [4, 1, 1, 1]


def test_text_whose_hidden_states_are_damaged_is_read_again(tmp_path):
    of, batch = target(), collate(own_text(model(), 1))
    cache = StateCache(of, StateFiles(tmp_path), 10**6)
    wanted = cache.read(batch).hidden
    next(tmp_path.iterdir()).write_bytes(b"damaged")
    assert torch.equal(cache.read(batch).hidden, wanted)


def test_hidden_states_leave_steps_their_memory(monkeypatch):
    of, texts, left = target(), own_text(model(), 3), [2**30]
    of.device = torch.device("cuda")
    monkeypatch.setattr("quickbeam.train.target.to_device", lambda numbers, device: numbers)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (left[0], 2**30))
    cache, reads = StateCache.of(of, None), list[int]()
    before(monkeypatch, of, "read", lambda batch: reads.append(len(batch.tokens)))
    for i, left[0] in ((0, 2**30), (1, 2**28 - 1), (0, 0), (1, 2**28), (1, 0)):
        cache.read(collate([texts[i]]))
    assert reads == [1, 1, 1]
