"""`--drafter auto`: what is a candidate, which one is taken, and that answers stay the same."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cases import refuses
from checkpoints import LLAMA, eagle1
from checkpoints import write as write_head
from gguf_files import block_drafter, model_of
from gguf_files import write as write_gguf
from quickbeam import LLM, SamplingParams, hub, llm
from quickbeam.cli import doctor
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.candidates import Candidate, list_candidates
from quickbeam.engine import gain
from quickbeam.engine.gain import Trial, best_trial, measure_gain
from quickbeam.models.opening import open_model
from scripts import cli
from test_block_drafter import KINDS

CPU = torch.device("cpu")
WIDTH = 64  # of the large model; the toy's is 32


@pytest.fixture
def models(tmp_path, toy_folder, monkeypatch):
    """A folder with a large model; Hugging Face's cache is another one, and empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "models"
    model_like(toy_folder, folder / "large", width=WIDTH, layers=4)
    return folder


def model_like(toy_folder, folder, width, layers, seed=1):
    """A random model with the toy's tokenizer and float32 weights."""
    torch.manual_seed(seed)
    fields = json.loads((Path(toy_folder) / "config.json").read_text())
    fields |= dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers)
    fields["head_dim"] = width // 4
    shutil.copytree(toy_folder, folder)
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(folder)


def in_hub(folder, hub_cache, name):
    """Put a model's folder into a cache as Hugging Face's, and return the snapshot."""
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return snapshot


def found(model):
    loaded = open_model(str(model), None, CPU)
    return list_candidates(str(model), str(model), loaded.model, loaded.tokenizer)


def nearby(model):
    return {Path(one.name) for one in found(model) if one.name != hub.SELF}


def test_a_smaller_model_beside_the_model_and_in_the_hubs_cache(models, toy_folder, tmp_path):
    assert nearby(models / "large") == set()
    shutil.copytree(toy_folder, models / "small")
    cached = in_hub(toy_folder, tmp_path / "hub", "toys/small")
    assert nearby(models / "large") == {models / "small", cached}
    (one, *_) = found(models / "large")
    assert "smaller model, same tokens" in one.reason
    assert nearby(models / "small") == set()  # the large one is not smaller


def test_a_larger_model_and_another_tokenizer_are_no_candidates(models, toy_folder):
    shutil.copytree(models / "large", models / "as-large")
    other = models / "other-tokens"
    shutil.copytree(toy_folder, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert nearby(models / "large") == set()


def test_broken_neighbours_are_passed_over(models, toy_folder):
    for name, file, text in (
        ("no-tokenizer", "tokenizer.json", None),
        ("no-config", "config.json", "{"),
        ("list", "config.json", "[]"),
    ):
        shutil.copytree(toy_folder, models / name)
        path = models / name / file
        path.unlink() if text is None else path.write_text(text)
    (models / "junk.gguf").write_bytes(b"GGUF")
    (models / "empty").mkdir()
    assert nearby(models / "large") == set()


def test_a_head_of_the_models_width(models):
    head = {"vocab_size": 257, "hidden_size": 32}
    write_head(models / "head", LLAMA | head, eagle1())
    assert nearby(models / "large") == set()
    (models / "head" / "config.json").write_text(json.dumps(LLAMA | head | {"hidden_size": WIDTH}))
    (one, *_) = found(models / "large")
    assert one.name == str(models / "head") and "EAGLE" in one.reason


def test_gguf_files(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    large = tmp_path / "large.gguf"
    write_gguf(large, "llama", model_of("llama", num_hidden_layers=6))
    assert nearby(large) == set()
    write_gguf(tmp_path / "other-tokens.gguf", "llama", model_of("llama"), control=("<x>",))
    small = tmp_path / "small.gguf"
    write_gguf(small, "llama", model_of("llama", num_hidden_layers=1))
    sizes = {"hidden_size": 64, "target_size": 64, "vocab_size": 288, "mask_token": 287}
    for name, width in (("head", 64), ("narrow", 32)):
        config = replace(KINDS["confident"], **sizes | dict(target_size=width, hidden_size=width))
        block_drafter(tmp_path / f"{name}.gguf", BlockNetwork(config))
    assert nearby(large) == {small, tmp_path / "head.gguf"}


def test_a_copy_in_4_bits_for_bfloat16_alone(models):
    assert hub.SELF not in [one.name for one in found(models / "large")]
    path = models / "large" / "model.safetensors"
    tensors = {name: one.bfloat16() for name, one in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    config = models / "large" / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    loaded = open_model(str(models / "large"), None, CPU)
    names = [one.name for one in found(models / "large")]
    assert (hub.SELF in names) == loaded.model.describe().startswith("native")


def trial(name, gained, refusal=""):
    return Trial(Candidate(name, "a reason"), gained, refusal)


def test_the_one_that_gains_most_or_none():
    slow, fair, fast = trial("slow", 0.8), trial("fair", 1.2), trial("fast", 1.5)
    unfit = trial("unfit", 0.0, "made for another model")
    assert best_trial([slow, fair, fast, unfit], "auto") == fast
    assert best_trial([slow, unfit, trial("noise", 1.01)], "auto") is None
    assert best_trial([], "auto") is None
    assert best_trial([slow, unfit], "dyspec") == slow  # which can't do without a drafter
    assert best_trial([unfit], "dyspec") is None
    assert "1.20 times as fast" in str(fair) and "made for another" in str(unfit)


def test_a_gain_is_tokens_a_second_over_those_without():
    asked = []

    def answer(prompt, method):
        asked.append(method)
        return (30, 2.0) if method == "recycling" else (20, 1.0)

    assert measure_gain("auto", answer) == pytest.approx(20 / 15)
    assert asked == ["recycling", "auto"] * 4  # in turns, the first two not counted


def with_gains(monkeypatch, gains):
    """Measure these gains by the names of candidates' folders."""
    real = llm.try_drafter

    def measured(candidate, *arguments):
        done = real(candidate, *arguments, measure=lambda _: 1.0)
        assert not done.refusal
        return done._replace(gain=gains[Path(candidate.name).name])

    monkeypatch.setattr(llm, "try_drafter", measured)


@pytest.mark.parametrize("gained", [0.7, 1.3])
def test_what_pays_is_taken_and_answers_are_the_same(
    models, toy_folder, monkeypatch, caplog, gained
):
    shutil.copytree(toy_folder, models / "small")
    with_gains(monkeypatch, {"small": gained, "self": 0.5})
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    large, prompts = str(models / "large"), [[1, 2, 3, 4], [70, 71, 72, 70, 71]]
    with LLM(large, method="ar") as plain:
        right = [one.token_ids for one in plain.generate(prompts, params)]
    with caplog.at_level(logging.INFO), LLM(large, drafter="auto") as auto:
        answers = auto.generate(prompts, params)
        assert [one.token_ids for one in answers] == right
        assert auto.method == ("auto" if gained > 1 else "recycling")
        assert bool(auto.method_store.drafter) == (gained > 1)
        auto.reset()
        assert auto.model.pool.used == 0  # nothing of the trials is left
    assert "small" in caplog.text and f"{gained:.2f} times as fast" in caplog.text
    assert ("pays for this model: it drafts without one" in caplog.text) == (gained < 1)


def test_nothing_found_is_no_error(models, caplog):
    with LLM(str(models / "large"), drafter="auto", dtype="float32") as auto:
        assert auto.method == "recycling" and auto.drafter_trials == []
        assert auto.generate([1, 2, 3], SamplingParams(max_tokens=4)).token_ids
    assert "no drafter on this machine pays" in caplog.text
    options = dict(drafter="auto", dtype="float32", method="dyspec")
    refuses("drafts with a model", lambda: LLM(str(models / "large"), **options))


def test_what_looks_like_a_drafter_and_is_none_is_refused_by_its_trial(models, toy_folder):
    shutil.copytree(toy_folder, models / "small")
    path = models / "small" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with LLM(str(models / "large"), drafter="auto", dtype="float32") as auto:
        (one,) = auto.drafter_trials
        assert one.refusal and auto.method == "recycling"


def test_an_answer_that_is_slow_ends_early(toy_folder, monkeypatch):
    with LLM(toy_folder) as slow:
        most = gain.GREEDY.max_tokens
        tokens, seconds = gain.timed(lambda: slow.stream([1, 2, 3], gain.GREEDY))
        assert tokens == most and seconds > 0
        forward = slow.model.forward
        monkeypatch.setattr(slow.model, "forward", lambda batch: sleep(0.02) or forward(batch))
        monkeypatch.setattr(gain, "SECONDS", 0.0)
        tokens, _ = gain.timed(lambda: slow.stream([1, 2, 3], gain.GREEDY, method="ar"))
        assert 0 < tokens < most


def test_a_candidate_is_measured_on_this_machine(models, toy_folder):
    shutil.copytree(toy_folder, models / "small")
    with LLM(str(models / "large"), drafter="auto", dtype="float32") as auto:
        (one,) = auto.drafter_trials
        assert one.gain > 0 and not one.refusal


def test_doctor_names_what_fits_and_what_it_gains(models, toy_folder, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", [])
    large = str(models / "large")
    with_gains(monkeypatch, {"small": 1.4, "self": 0.5})
    shown = cli("doctor", "--model", large).stdout
    assert ("0.50 times" in shown or "none for this model" in shown) and "quickbeam train" in shown
    shutil.copytree(toy_folder, models / "small")
    record = json.loads(cli("doctor", "--json", "--model", large).stdout)
    (finding,) = record["findings"]
    assert finding["check"] == "drafter" and finding["status"] == "ok"
    assert "small" in finding["text"] and "1.40 times as fast" in finding["text"]
    assert f"--drafter {models / 'small'}" in finding["todo"]
