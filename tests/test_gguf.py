"""A `.gguf` file is converted once, into the cache. `pytest tests/test_gguf.py`"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quickbeam import hub
from quickbeam.cache import is_complete
from quickbeam.conversion import Reader, read_once
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.models.loading import load_model
from test_hub_convert import write_gguf

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_it_is_converted_once_and_again_when_it_changes(file: Path) -> None:
    told = list[tuple[str, float | None]]()

    def hear(stage: str, fraction: float | None) -> None:
        told.append((stage, fraction))

    folder = hub.converted(file, hear)
    assert folder == Path(hub.resolve(str(file))) and is_complete(folder)
    fractions = [fraction for _, fraction in told]
    assert (
        {stage for stage, _ in told} == {"converting tiny.gguf, once"}
        and fractions == sorted(fractions)
        and fractions[-1] > 0.9
    )
    told.clear()
    assert hub.converted(file, hear) == folder and not told
    os.utime(file, ns=(1, 1))
    other = hub.converted(file, hear)
    assert other != folder and told
    assert not list(folder.parent.glob(".*.tmp"))


def test_what_is_loaded_is_the_file(file: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    model, tokenizer = load_model(str(file), torch.bfloat16, CPU)
    source = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    given = torch.tensor([tokenizer("a\n\n12\n\nb")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(given).logits, source(given).logits)
    assert model.generation_config.eos_token_id == 2 and not hasattr(
        model.config, "quantization_config"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == ["1", "2"]


def test_a_file_that_is_none_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no such file: .*none\.gguf"):
        hub.resolve(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(
        b"GGUF is not what follows, but it is long enough for a header"
    )
    with pytest.raises(InvalidInput, match=r"can't load .*bad\.gguf"):
        hub.resolve(str(tmp_path / "bad.gguf"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(InvalidInput, match=r"can't load .*cut\.gguf"):
        hub.resolve(str(cut))
    assert list((tmp_path / "cache" / "gguf").glob("*/")) == []


def test_a_full_disk_is_an_error_in_words(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quickbeam.conversion.convert", full)
    with pytest.raises(
        QuickbeamError, match=r"can't keep tiny\.gguf .*No space left on device; .*QUICKBEAM_CACHE"
    ):
        hub.converted(file)


def test_the_library_is_left_as_it_was(file: Path) -> None:
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize
    with pytest.raises(RuntimeError), read_once():
        assert gguf.GGUFReader is not before[0] and gguf.GGUFReader(file) is gguf.GGUFReader(
            str(file)
        )
        raise RuntimeError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize) == before
    ours, theirs = Reader(file), gguf.GGUFReader(file)
    assert list(ours.fields) == list(theirs.fields) and [one.name for one in ours.tensors] == [
        one.name for one in theirs.tensors
    ]
    assert all(
        ours.fields[name].contents() == theirs.fields[name].contents()
        for name in ours.fields
        if not name.startswith("GGUF.")
    )
    assert all((a.data == b.data).all() for a, b in zip(ours.tensors, theirs.tensors, strict=True))
