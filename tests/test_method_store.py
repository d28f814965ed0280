"""The methods that an `LLM` lists are those that generate, whatever drafts for it."""

import pytest
import torch

from docs import save_drafter
from quickbeam import LLM, InvalidInput, SamplingParams
from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.shortlist import FIELDS, TENSORS, Artefact
from quickbeam.methods import METHODS
from quickbeam.models.native import library
from test_mtp import with_head

VOCAB = 257  # of the toy model
# methods that need no drafter
NONE = {name for name, entry in METHODS.items() if entry.without or not entry.uses_drafter}
ALL = set(METHODS)


def feature(folder, source):
    save_drafter(folder, VOCAB, 32, 2)
    return {"drafter": str(folder)}


def feature_without_router(folder, source):
    feature(folder, source)
    order = torch.randperm(VOCAB)
    Artefact(Layout(order, VOCAB, 1, VOCAB), order).save(folder)
    return {"drafter": str(folder)}


def feature_without_list(folder, source):
    feature(folder, source)
    (folder / FIELDS).unlink()
    (folder / TENSORS).unlink()
    return {"drafter": str(folder)}


def feature_of_other_router(folder, source):
    save_drafter(folder, VOCAB, 32, 2)
    other = folder.with_name("other")
    save_drafter(other, VOCAB, 16, 2)
    for name in (FIELDS, TENSORS):
        (other / name).replace(folder / name)
    return {"drafter": str(folder)}


def block(folder, source):
    torch.manual_seed(0)
    BlockNetwork(BlockConfig(32, 64, 4, 2, 8, 1, (1,), 32, VOCAB, 4, 256)).save(folder)
    return {"drafter": str(folder)}


def block_with_list(folder, source):
    block(folder, source)
    order = torch.randperm(VOCAB)
    Artefact(Layout(order, VOCAB, 1, VOCAB), order).save(folder)
    return {"drafter": str(folder)}


def mtp(folder, source):
    if library.kernels() is None:
        pytest.skip("no native kernels here")
    return {"model": str(with_head(folder, source))}


NO_LIST = ALL - {"frspec", "dynaspec"}
# of a smaller model, whose head is scored in parts by the native kernels alone
LISTS_IDS = library.kernels() is not None
# by name: what makes the options of `LLM`, and the methods that it can use
KINDS = {
    "none": (lambda folder, source: {}, NONE),
    "model": (
        lambda folder, source: {"drafter": source},
        ALL - {"dynaspec"} if LISTS_IDS else NO_LIST,
    ),
    "feature": (feature, ALL),
    "feature without router": (feature_without_router, ALL - {"dynaspec"}),
    "feature without list": (feature_without_list, NO_LIST),
    "feature with another's router": (feature_of_other_router, ALL - {"dynaspec"}),
    "block": (block, NO_LIST),
    "block with list": (block_with_list, ALL - {"dynaspec"}),
    "mtp": (mtp, NO_LIST),
    # what the drafter scores is the model's setting, too
    "model, context": (
        lambda folder, source: {"drafter": source, "vocab": "context"},
        ALL if LISTS_IDS else NONE - {"auto"},
    ),
    "feature, full": (lambda *given: {**feature(*given), "vocab": "full"}, ALL),
    "feature, few": (lambda *given: {**feature(*given), "shortlist": 3}, ALL - {"dynaspec"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_listed_method_generates_and_no_other_does(kind, toy_folder, tmp_path):
    make, usable = KINDS[kind]
    options = {"model": toy_folder, "method": "ar"} | make(tmp_path / "drafter", toy_folder)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(**options) as llm:  # whose own method has no drafter loaded
        assert set(llm.methods) == usable
        plain = llm.generate("abc abc", params).token_ids
        for method in METHODS:
            if method in llm.methods:
                answer = llm.generate("abc abc", params, method=method, budget=6)
                assert answer.token_ids == plain
            else:
                with pytest.raises(InvalidInput):
                    llm.generate("abc abc", params, method=method)
