"""Prompts with images: logits and tokens as transformers has them, the same answers with drafts,
from the prefix cache and in a batch."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Gemma4AssistantConfig, Gemma4AssistantForCausalLM
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from cases import refuses
from checkpoints import configure, rewrite
from docs import save_drafter
from models import spread_out, tiny
from quickbeam.engine import scheduler
from quickbeam.engine.sequence import SequenceState
from quickbeam.llm import LLM
from quickbeam.models.base import Batch, Chain, ImageRows, end_of_chunk, images_between
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native import library
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.program import Program
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.vision import base, reader
from quickbeam.models.vision.base import Grid
from quickbeam.models.vision.positions import ImagePositions, PlacedGrid
from quickbeam.models.vision.reader import PromptIds, processor_settings, runs_of
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.params import SamplingParams
from quickbeam.serve.fingerprint import fingerprint_of
from running import braked
from test_families import each
from test_mtp import Head as MtpHead

pytest.importorskip("PIL", reason="images need Pillow")
pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

from vision import KINDS, MARK, MARKS, asked, picture, vision_folder  # noqa: E402

MARKS_BY_ID = dict(enumerate(MARKS, 257))  # behind the bytes and the end of a text

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
DRAWN = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def models(toy_folder, tmp_path_factory):
    """By kind, a folder and transformers' model, made when they are asked for."""
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, vision_folder(kind, toy_folder, folder)
        return made[kind]

    return of


@pytest.fixture(scope="module")
def llm(models):
    """One that reads images in tiles."""
    folder, _ = models("smolvlm")
    with LLM(str(folder), "auto", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def stacked(models):
    """One that adds to an image's rows after the first layers, and has M-RoPE."""
    folder, _ = models("qwen3_vl")
    with LLM(str(folder), "auto", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def per_layer(models):
    """One whose images have other per-layer inputs than their tokens."""
    folder, _ = models("gemma4")
    with LLM(str(folder), "auto", dtype="float32") as llm:
        yield llm


@pytest.fixture(params=["llm", "stacked", "per_layer"])
def any_llm(request):
    return request.getfixturevalue(request.param)


def two_images(first=1, second=2):
    return asked("see ", picture(first, 60, 34), " and ", picture(second), " or not?")


def inputs_of(kind, folder, images):
    """What transformers' own image processor makes of images, for its model's `forward`."""
    settings = processor_settings(folder)
    if kind == "lfm2_vl":  # whose processor needs torchvision
        config = SimpleNamespace(image_token_id=0)
        family = reader.IMAGE_FAMILIES[kind](config, settings, lambda token: MARK, None)
        return given_to_tower(family, [one for image in images for one in family.cut(image).tiles])
    if kind == "internvl":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil as Processor,
        )

        inputs = Processor(**settings, crop_to_patches=True)(images, return_tensors="pt")
        return {"pixel_values": inputs["pixel_values"]}
    if kind == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import (
            Gemma3ImageProcessorPil as Processor,
        )

        inputs = Processor(**settings)(images, return_tensors="pt")
        return {"pixel_values": inputs["pixel_values"]}
    if kind.startswith("gemma4"):
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            Gemma4ImageProcessorPil as Processor,
        )

        inputs = Processor(**settings)(images, return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
    if kind.startswith("qwen"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )

        return dict(Processor(**settings)(images, return_tensors="pt"))
    if kind == "llava":
        from transformers.models.llava.image_processing_pil_llava import (
            LlavaImageProcessorPil as Processor,
        )

        return dict(Processor(**settings)(images, return_tensors="pt"))
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil as Processor,
    )

    return dict(Processor(**settings)([[*images]], return_tensors="pt"))


def given_to_tower(family, tiles):
    given = {}

    def get_image_features(**inputs):
        given.update(inputs)
        return SimpleNamespace(pooler_output=[torch.empty(0)])

    family.features(SimpleNamespace(get_image_features=get_image_features), tiles)
    return given


def images_of(conversation):
    parts = conversation[0]["content"]
    return [part["image"] for part in parts if part["type"] == "image"]


def logits_of(model, ids, chunk, images=None, positions=None):
    """`[n, vocab]` of a prompt that is read in chunks."""
    images = ids.images if images is None else images
    store, logits = model.pool.new(), []
    store.positions = positions or ids.positions
    begin = 0
    while begin < len(ids):
        end = end_of_chunk(images, begin, min(begin + chunk, len(ids)))
        rows = images_between(images, begin, end)
        text = Chain(store, ids[begin:end], end - begin, rows)
        (passed,) = model.forward(Batch([text]))
        store.commit(range(end - begin))
        logits.append(passed.logits.clone())
        begin = end
    store.release()
    return torch.cat(logits)


def reference(model, ids, inputs):
    """transformers' logits `[n, vocab]`."""
    ids = torch.tensor([ids])
    of_images = (ids == model.config.image_token_id).int()
    if "image_grid_thw" in inputs or "image_position_ids" in inputs:
        inputs = inputs | {"mm_token_type_ids": of_images}
    if model.config.model_type == "gemma3":  # they see one another
        inputs = inputs | {"token_type_ids": of_images}
    return model(input_ids=ids, **inputs, use_cache=False).logits[0]


def wrong_deepstack(images, layers):
    """By what is wrong, `images` whose rows are added to after the first layers."""
    if not layers:
        return {}

    def changed(change):
        parts = [image.rows.chunk(1 + layers, 1) for image in images]
        rows = [torch.cat(change(first, added), 1) for first, *added in parts]
        return [image._replace(rows=new) for image, new in zip(images, rows, strict=True)]

    wrong = {
        "nothing added": changed(lambda row, added: [row, *(0 * one for one in added)]),
        "a layer early": changed(lambda row, added: [row + added[0], *added[1:], 0 * row]),
    }
    if layers > 1:
        wrong["of other layers"] = changed(lambda row, added: [row, *added[::-1]])
    return wrong


def off(ours, right):
    return float((ours - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_transformers(kind, models):
    folder, model = models(kind)
    conversation = two_images()
    with LLM(str(folder), "ar", dtype="float32") as llm:
        ids = llm.encode_chat(conversation)
        assert len({image.key >> reader.KEY_BITS for image in ids.images}) == 2
        inputs = inputs_of(kind, folder, images_of(conversation))
        right = reference(model, ids, inputs)
        for chunk in (512, 7):
            assert off(logits_of(llm.model, ids, chunk), right) < 5e-5
        late = [image._replace(first=image.first + 1) for image in ids.images]
        assert off(logits_of(llm.model, ids, 512, late), right) > 0.01, "rows off by one"
        swapped = [ImageRows(image.first, image.rows.flip(0), 1) for image in ids.images]
        assert off(logits_of(llm.model, ids, 512, swapped), right) > 0.01, "rows in another order"

        if kind.startswith("gemma"):
            whole = [image._replace(whole=not image.whole) for image in ids.images]
            assert off(logits_of(llm.model, ids, 512, whole), right) > 0.01
        if kind == "gemma4":
            assert llm.images._tower.audio_tower is None, "what reads sound is not loaded"
            own_token = [image._replace(token=None) for image in ids.images]
            assert off(logits_of(llm.model, ids, 512, own_token), right) > 0.01
        if kind == "gemma4 experts":
            checkpoint = Checkpoint(folder, torch.float32)
            stack = each("attention", causal_images=False)(checkpoint.stack)
            everywhere = NativeModel(checkpoint, stack, library.kernels())
            assert off(logits_of(everywhere, ids, 512), right) > 0.01
        if ids.positions is not None:
            plain = ImagePositions(len(ids), [])
            assert off(logits_of(llm.model, ids, 512, positions=plain), right) > 0.01
        wrong = wrong_deepstack(ids.images, llm.model.stack.deepstack)
        assert bool(wrong) == kind.startswith("qwen3_vl")
        for name, images in wrong.items():
            assert off(logits_of(llm.model, ids, 512, images), right) > 0.01, name

        # and its tokens
        text, answer = [*ids], []
        for _ in range(GREEDY.max_tokens):
            answer.append(int(reference(model, text, inputs)[-1].argmax()))
            text.append(answer[-1])
        assert llm.chat(conversation, GREEDY).token_ids == answer

    if model.config.model_type in reader.NATIVE_ALONE:
        return
    checkpoint = Checkpoint(folder, torch.float32)
    pytorch = TorchModel(checkpoint, checkpoint.stack, torch.device("cpu"))
    for chunk in (512, 7):
        assert off(logits_of(pytorch, ids, chunk), right) < 5e-5


@pytest.mark.parametrize(
    "kind",
    [
        *("smolvlm", "lfm2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_moe"),
        *("gemma3", "gemma4", "gemma4 experts"),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_drafts_change_no_answer(kind, params, models, toy_folder, tmp_path):
    folder, _ = models(kind)
    with LLM(str(folder), "ar", dtype="float32") as llm:
        right = llm.chat(two_images(), params).token_ids
        for method in ("auto", "pld", "recycling", "logitspec"):
            answer = llm.chat(two_images(), params, method=method)
            assert answer.token_ids == right, method
        vocab = llm.model.vocab_size

    # a smaller model that reads text alone, and a head that reads the target's hidden states
    small = tmp_path / "small"
    shutil.copytree(folder, small)
    (small / "model.safetensors").unlink()
    config = tiny("llama").config
    config.vocab_size = vocab
    tiny("llama", config=config).save_pretrained(small)
    (small / "preprocessor_config.json").unlink()
    AutoTokenizer.from_pretrained(folder).save_pretrained(small)
    head = tmp_path / "head"
    save_drafter(head, vocab, 32, 3)
    for drafter in (small, head):
        with LLM(str(folder), "dyspec", dtype="float32", drafter=str(drafter)) as llm:
            for _ in range(2):  # the second from the prefix cache
                answer = llm.chat(two_images(), params)
                assert answer.token_ids == right
                assert answer.statistics.sources["drafter"].drafted > 0
            other = llm.chat(two_images(2, 1), params)
        with LLM(str(folder), "ar", dtype="float32") as llm:
            assert other.token_ids == llm.chat(two_images(2, 1), params).token_ids


def test_a_models_own_head_drafts_behind_images(models, tmp_path):
    """The head of Qwen3.5 reads the images' tokens, at plain positions."""
    folder, model = models("qwen3_5")
    shutil.copytree(folder, tmp_path / "model")
    head = MtpHead("qwen3_5", config=model.config.get_text_config())
    rewrite(tmp_path / "model", {name: one.contiguous() for name, one in head.stored().items()})
    with LLM(str(folder), "ar", dtype="float32") as llm:
        right = [llm.chat(two_images(), params).token_ids for params in (GREEDY, DRAWN)]
    with LLM(str(tmp_path / "model"), "dyspec", dtype="float32") as llm:
        for params, ids in zip((GREEDY, DRAWN), right, strict=True):
            answer = llm.chat(two_images(), params)
            assert answer.token_ids == ids
            assert answer.statistics.sources["drafter"].drafted > 0


@pytest.mark.parametrize("kind", ["gemma4", "gemma4 experts"])
def test_an_assistant_drafts_behind_images(kind, models, tmp_path):
    """It reads keys and values of the images' rows."""
    folder, _ = models(kind)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"hidden_size": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    text |= {"vocab_size_per_layer_input": 0, "enable_moe_block": False}
    text["per_layer_config"] = {"1": text["per_layer_config"]["2"]}  # the first full layer's
    torch.manual_seed(1)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    spread_out(Gemma4AssistantForCausalLM(config)).save_pretrained(tmp_path)
    with LLM(str(folder), "ar", dtype="float32") as llm:
        right = [llm.chat(two_images(), params).token_ids for params in (GREEDY, DRAWN)]
    with LLM(str(folder), "dyspec", dtype="float32", drafter=str(tmp_path)) as llm:
        for params, ids in zip((GREEDY, DRAWN), right, strict=True):
            answer = llm.chat(two_images(), params)
            assert answer.token_ids == ids
            assert answer.statistics.sources["drafter"].drafted > 0


def long_conversation(seed):
    return asked("Say what there is in this picture: ", picture(seed, 60, 34), " and " + "x" * 90)


def test_positions_behind_an_image_go_on_after_its_largest():
    """As transformers has them, for prompts that begin and end with images, too."""
    grids = [PlacedGrid(3, Grid(4, 2)), PlacedGrid(12, Grid(1, 5)), PlacedGrid(20, Grid(2, 2))]
    for images, tokens in ((grids, 24), (grids[:2], 17), ([PlacedGrid(0, Grid(3, 3))], 9), ([], 4)):
        kinds = torch.zeros(1, tokens, dtype=torch.int)
        for first, grid in images:
            kinds[0, first : first + grid.tiles] = 1
        config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
        config.vision_config.tokens_per_second = 2
        model = SimpleNamespace(config=config)
        model.get_vision_position_ids = lambda *given, **more: (
            Qwen2_5_VLModel.get_vision_position_ids(None, *given, **more)
        )
        sizes = [[1, 2 * grid.rows, 2 * grid.columns] for _, grid in images]
        right, behind = Qwen2_5_VLModel.get_rope_index(
            model, kinds.long(), kinds, torch.tensor(sizes) if sizes else None
        )
        positions = ImagePositions(tokens, images)
        assert positions.at(range(tokens)) == [tuple(axes) for axes in right[:, 0].T.tolist()]
        later = int(behind) + tokens + 5
        assert positions.at([tokens + 5]) == [(later, later, later)]


def test_images_share_no_prefix(any_llm, monkeypatch):
    """Images with the same placeholders, one after the other and side by side."""
    llm = any_llm
    size = llm.engine.prefixes.size
    alone = {}
    for seed in range(4):
        llm.reset()
        alone[seed] = llm.chat(long_conversation(seed), GREEDY).token_ids
    assert len(set(map(tuple, alone.values()))) > 1
    prompts = [llm.encode_chat(long_conversation(seed)) for seed in range(4)]
    assert all([*prompt] == [*prompts[0]] for prompt in prompts)
    first_row = prompts[0].images[0].first

    def one_by_one():
        llm.reset()
        return [llm.chat(long_conversation(seed), GREEDY) for seed in (0, 1, 2, 3, 0)]

    answers = one_by_one()
    assert [answer.token_ids for answer in answers] == [alone[seed] for seed in (0, 1, 2, 3, 0)]
    cached = [answer.statistics.cached_tokens for answer in answers]
    assert cached[:4] == [0, *[first_row // size * size] * 3]
    assert cached[4] == (len(prompts[0]) - 1) // size * size
    llm.reset()
    together = llm.generate([*prompts, prompts[0]], GREEDY)
    assert [answer.token_ids for answer in together] == [alone[s] for s in (0, 1, 2, 3, 0)]

    monkeypatch.setattr(SequenceState, "prefix_key", property(lambda self: self.ids))
    wrong = one_by_one()
    assert [answer.token_ids for answer in wrong] != [answer.token_ids for answer in answers]


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "gemma4 experts"])
def test_kept_prefixes_know_their_images(kind, models, tmp_path):
    """Another process goes on behind an image, not behind another one or one of other rows."""
    folder, _ = models(kind)

    def answer(seed, keep, max_pixels=None):
        with LLM(str(folder), dtype="float32", keep=keep, max_pixels=max_pixels) as llm:
            completion = llm.chat(long_conversation(seed), GREEDY)
        return completion.token_ids, completion.statistics.cached_tokens

    kept = tmp_path / "kept"
    first, cached = answer(1, kept)
    assert cached == 0
    again, cached = answer(1, kept)
    assert again == first and cached > 0
    other, shared = answer(2, kept)
    assert other == answer(2, None)[0] and shared < cached
    assert answer(1, kept, max_pixels=32 * 32)[1] == 0


def test_an_image_that_was_read_is_read_no_more(any_llm, monkeypatch):
    """And the next turn of a conversation begins with what is cached of the first."""
    llm = any_llm
    calls = []
    tower = type(llm.images)._run_tower
    monkeypatch.setattr(
        reader.ImageReader, "_run_tower", lambda self, cut: calls.append(1) or tower(self, cut)
    )
    turn = long_conversation(11)
    first = llm.chat(turn, GREEDY)
    assert len(calls) == 1
    answered = {"role": "assistant", "content": first.text}
    turns = [*turn, answered, *asked("and here? ", picture(12))]
    second = llm.chat(turns, GREEDY)
    assert len(calls) == 2 and second.statistics.cached_tokens > 0
    llm.reset()
    assert llm.chat(turns, GREEDY).token_ids == second.token_ids
    assert len(calls) == 2
    monkeypatch.setattr(reader, "CACHED_BYTES", 1)
    assert llm.chat(turns, GREEDY).token_ids == second.token_ids
    assert llm.chat(turns, GREEDY).token_ids == second.token_ids
    assert len(calls) == 4, "the first time they were still kept"


@pytest.mark.parametrize(
    "kind",
    ["smolvlm", "lfm2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "gemma4 experts"],
)
def test_images_among_texts(kind, models):
    folder, _ = models(kind)
    texts = ["abc abc", "the cat sat on the cat"]
    with LLM(str(folder), "auto", dtype="float32") as llm:
        ids = [llm.tokenizer(text)["input_ids"] for text in texts]
        shown = [llm.encode_chat(two_images()), llm.encode_chat(long_conversation(5))]
        prompts = [ids[0], shown[0], ids[1], shown[1]]
        for params in (GREEDY, DRAWN):
            alone = []
            for prompt in prompts:
                llm.reset()
                alone.append(llm.generate(prompt, params, method="ar").token_ids)
            llm.reset()
            together = llm.generate(prompts, params)
            assert [answer.token_ids for answer in together] == alone


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "gemma4", "gemma4 experts"])
def test_a_preempted_sequence_reads_its_images_again(kind, models):
    folder, _ = models(kind)
    params = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0)
    with LLM(str(folder), "ar", dtype="float32", share_prefixes=False) as llm:
        prompts = [llm.encode_chat(long_conversation(seed)) for seed in (1, 2)]
        alone = [llm.generate(prompt, params).token_ids for prompt in prompts]
        pages = -(-(len(prompts[0]) + params.max_tokens) // llm.model.pool.page)
        llm.model.pool.limit = 2 * pages - 1
        with braked(llm.engine):  # until both are asked, however fast one is answered
            streams = [llm.stream(prompt, params) for prompt in prompts]
        answers = [stream.result() for stream in streams]
        assert [answer.token_ids for answer in answers] == alone
        assert sum(answer.statistics.preemptions for answer in answers) > 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma4"])
def test_some_images_need_the_native_kernels(kind, models):
    folder, _ = models(kind)
    with LLM(str(folder), "ar", dtype="float16") as llm:
        assert llm.chat("abc", GREEDY).token_ids
        refuses(f"images of {kind} .* native kernels", llm.chat, two_images())


def test_a_text_alone_is_read_as_before(llm):
    text = [{"role": "user", "content": "abc"}]
    assert not isinstance(llm.encode_chat(text), PromptIds)
    ids = llm.tokenizer(f"user: {MARK}\n> ", add_special_tokens=False)["input_ids"]
    assert llm.encode_chat([{"role": "user", "content": MARK}]) == ids
    refuses("1 images, and 2 times <image>", llm.chat, asked(f"an {MARK} ", picture(1)))
    no_images = {"chat_template": "x"}
    refuses("1 images, and 0 times", llm.chat, asked("", picture(1)), template=no_images)


def test_a_mark_of_rows_in_a_text_is_refused(models):
    """Gemma's templates write another token for an image."""
    folder, _ = models("gemma3")
    with LLM(str(folder), "ar", dtype="float32") as llm:
        refuses("leave <image> out of the text", llm.chat, asked(f"an {MARK} ", picture(1)))
        refuses("2 times <img> in the prompt", llm.chat, asked("an <img> ", picture(1)))


def test_a_vision_tower_that_cannot_be_read(models, tmp_path):
    folder, _ = models("llava")
    projector = "multi_modal_projector.linear_1.weight"

    def asks(name, tensors, words):
        shutil.copytree(folder, tmp_path / name)
        rewrite(tmp_path / name, tensors)
        with LLM(str(tmp_path / name), "ar", dtype="float32") as llm:
            assert llm.chat("abc", GREEDY).token_ids
            refuses(words, llm.chat, asked(picture(1)))

    asks("lacks", {projector: None}, "lack multi_modal_projector.linear_1.weight, which reads im")
    for number, before in enumerate(("", "model.")):
        scale = {f"{before}{projector}_scale_inv": torch.ones(1)}
        asks(f"scaled{number}", scale, "weight_scale_inv beside the weights that read images")
    asks("wide", {projector: torch.ones(3, 3)}, "reads images can't be read")
    family = family_of("llava", models)
    family.config = SimpleNamespace(vision_config=SimpleNamespace(model_type="pixtral"))
    refuses("vision tower is pixtral", family.cut, picture(1))


def test_a_configuration_that_lacks_what_images_need(models, tmp_path):
    folder, _ = models("qwen3_vl")
    fields = json.loads((folder / "config.json").read_text())

    def asks(name, part, changes, tensors, words):
        shutil.copytree(folder, tmp_path / name)
        rewrite(tmp_path / name, tensors)
        configure(tmp_path / name, **{part: fields[part] | changes})
        with LLM(str(tmp_path / name), "ar", dtype="float32") as llm:
            assert llm.chat("abc", GREEDY).token_ids
            refuses(words, llm.chat, asked(picture(1)))

    rope = dict(fields["text_config"]["rope_parameters"])
    del rope["mrope_interleaved"]
    asks("plain", "text_config", {"rope_parameters": rope}, {}, "lack mrope_interleaved")
    narrow = {}
    for tensor, weight in load_file(folder / "model.safetensors").items():
        if "visual" in tensor and "linear_fc2" in tensor and "blocks" not in tensor:
            narrow[tensor] = weight[:16].clone()
    words = "rows of images have 48 elements, and the language part reads 96"
    asks("narrow", "vision_config", {"out_hidden_size": 16}, narrow, words)


def test_a_gemma4_without_a_vision_tower(models, tmp_path):
    folder, _ = models("gemma4")
    shutil.copytree(folder, tmp_path / "model")
    configure(tmp_path / "model", vision_config=None)
    with LLM(str(tmp_path / "model"), "ar", dtype="float32") as llm:
        assert llm.chat("abc", GREEDY).token_ids
        refuses("no vision_config", llm.chat, asked(picture(1)))


@pytest.mark.parametrize("token", [None, -1, 10**6])
def test_a_padding_token_that_is_none(token, models, tmp_path):
    """Its row of the per-layer inputs would be read from outside their table."""
    folder, _ = models("gemma4")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    shutil.copytree(folder, tmp_path / "model")
    configure(tmp_path / "model", text_config=text | {"pad_token_id": token})
    with LLM(str(tmp_path / "model"), "ar", dtype="float32") as llm:
        assert llm.chat("abc", GREEDY).token_ids
        refuses(f"pad_token_id {token}, .* must be 0 to", llm.chat, asked(picture(1)))


def test_the_fingerprint_tells_how_much_of_an_image_is_read(models):
    folder, _ = models("smolvlm")
    prints = set()
    for max_pixels in (None, 6000):
        with LLM(str(folder), "ar", dtype="float32", max_pixels=max_pixels) as llm:
            prints.add(fingerprint_of(llm))
            rows = llm.encode_chat(asked("", picture(1, 90, 50))).images
            assert sum(len(image.rows) for image in rows) == (28 if max_pixels is None else 20)
    assert len(prints) == 2


def test_runs():
    assert [*runs_of([])] == []
    assert [*runs_of([4])] == [range(1)]
    assert [*runs_of([4, 5, 9, 10, 11, 13])] == [range(2), range(2, 5), range(5, 6)]


def test_a_template_that_takes_texts_alone(llm):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}> "
    conversation = asked("see", picture(1))
    ids = llm.encode_chat(conversation, chat_template=template)
    text = llm.tokenizer.decode(ids)
    assert text.startswith("user: see\n<fake_token_around_image>") and text.endswith("\n> ")
    assert len(ids.images) == len(llm.encode_chat(conversation).images)


def test_a_prompt_with_too_many_images_is_refused_before_they_are_read(llm, monkeypatch):
    monkeypatch.setattr(reader.ImageReader, "_run_tower", lambda self, cut: 1 / 0)
    images = [picture(seed, 8, 8) for seed in range(400, 440)]
    limit = llm.room(0)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model.pool, "limit", 8)
        refuses("40 images have more rows than", llm.chat, asked(*images))
        refuses("images included: at most .* fit", llm.chat, asked(images[0], "x" * 600))
    assert llm.room(0) == limit


@pytest.mark.parametrize("kind", ["gemma3", "gemma4 experts"])
def test_a_chunk_holds_a_whole_image(kind, models, monkeypatch):
    """Where its rows see one another: in a batch, from the prefix cache and after a preemption."""
    folder, _ = models(kind)
    lengths, params = [], replace(GREEDY, logprobs=0)

    def outcome(answer):
        return answer.token_ids, [one.logprob for one in answer.logprobs]

    with LLM(str(folder), "ar", dtype="float32") as llm:
        size = llm.engine.prefixes.size
        # an image that begins before a chunk of the prefix cache ends
        before = size - 2 - llm.encode_chat(asked("", picture(1))).images[0].first
        prompts = [
            llm.encode_chat(asked("x" * before, picture(seed), "y" * size, picture(3), more))
            for seed in (1, 2)
            for more in ("", " why?")
        ]
        assert prompts[0].images[0].first < size < prompts[0].images[0].end
        alone = []
        for prompt in prompts:
            llm.reset()
            alone.append(outcome(llm.generate(prompt, params)))
        forward = type(llm.model).forward

        def noting(model, batch):
            for part in batch.parts:
                if isinstance(part, Chain):
                    lengths.extend(len(image.rows) for image in part.images)
            return forward(model, batch)

        monkeypatch.setattr(type(llm.model), "forward", noting)
        monkeypatch.setattr(llm.model, "mixed_chunk", 3)
        llm.reset()
        assert [*map(outcome, llm.generate(prompts, params))] == alone
        allowed = set()
        for image in prompts[0].images:
            allowed.add(len(image.rows))
            cached = range(image.first // size * size + size, image.end, size)
            allowed.update(image.end - tokens for tokens in cached)
        assert lengths and {*lengths} <= allowed, "whole, or behind what is cached of it"
        again = llm.generate(prompts[0], params)
        assert outcome(again) == alone[0] and again.statistics.cached_tokens > 0
        monkeypatch.setattr(scheduler, "end_of_chunk", lambda images, first, end: end)
        llm.reset()
        assert [*map(outcome, llm.generate(prompts, params))] != alone


def test_where_chunks_end():
    rows = torch.zeros(4, 1)
    images = [ImageRows(3, rows, 1, whole=True), ImageRows(9, rows, 2)]
    for first in range(3):
        ends = [end_of_chunk(images, first, end) for end in range(3, 14)]
        assert ends == [3, 3, 3, 3, 7, 8, 9, 10, 11, 12, 13]
    assert [end_of_chunk(images, 3, end) for end in range(4, 9)] == [7, 7, 7, 7, 8]
    assert [end_of_chunk(images, 5, end) for end in range(6, 9)] == [7, 7, 8]


def test_rows_of_images_between_tokens():
    rows = torch.arange(6.0)[:, None]
    images = [ImageRows(2, rows[:3], 7), ImageRows(8, rows[3:], 9)]
    for first in range(12):
        for end in range(first, 14):
            right = {index - first for index in (2, 3, 4, 8, 9, 10) if first <= index < end}
            between = images_between(images, first, end)
            assert {i for image in between for i in range(image.first, image.end)} == right
            for image in between:
                index = image.first + first
                assert image.rows[0, 0] == (index - 2 if index < 8 else index - 5)


# what images are cut into


def family_of(kind, models, max_pixels=None):
    folder, model = models(kind)
    settings = processor_settings(folder)
    family = reader.IMAGE_FAMILIES[model.config.model_type]
    return family(model.config, settings, MARKS_BY_ID.get, max_pixels)


SHAPES = [(60, 34), (34, 60), (32, 32), (33, 31), (200, 40), (9, 14), (640, 480), (96, 96)]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"lfm2_vl"}))
def test_pixels_are_those_of_transformers(kind, models):
    family = family_of(kind, models)
    folder, _ = models(kind)
    for width, height in SHAPES:
        image = picture(width, width, height)
        ours = given_to_tower(family, family.cut(image).tiles)
        right = inputs_of(kind, folder, [image])
        if kind.startswith("gemma4"):  # transformers pads all images to as many patches
            padding = (right["image_position_ids"] == -1).all(-1)
            right = {name: values[~padding][None] for name, values in right.items()}
        for name in ("pixel_values", "image_grid_thw", "image_position_ids"):
            none = torch.empty(0)
            assert torch.equal(ours.get(name, none), right.get(name, none)), (name, width, height)


def test_rows_of_gemma4_are_those_of_transformers(models):
    """In the shape that its processor finds, with as many rows as the model was trained for."""
    of_row = 12 * 12  # pixels
    pixels = {None: 70, 1: 70, 140 * of_row - 1: 70, 140 * of_row: 140, 600 * of_row: 560}
    for max_pixels, most in (pixels | {10**9: 1120}).items():
        family = family_of("gemma4", models, max_pixels)
        for width, height in (*SHAPES, (900, 4), (3, 700), (1, 1), (2000, 30)):
            cut = family.cut(picture(1, width, height))
            size = get_aspect_ratio_preserving_size(height, width, 4, 9 * most, 3)
            assert [*cut.tiles[0].shape] == [3, *size]
            rows = size[0] * size[1] // of_row
            assert cut.text == MARKS_BY_ID[261] + MARK * rows + MARKS_BY_ID[262]
    settings = {"max_soft_tokens": 1120, "patch_size": 4}
    family = type(family)(family.config, settings, MARKS_BY_ID.get, None)
    rows = family.cut(picture(1)).text.count(MARK)
    assert 140 < rows <= 280, "as there are 512 at most where no more are asked for"


def text_of_tiles(kind, columns, rows, tile, whole):
    """What transformers' processor writes for an image; `tile`, `whole`: rows of these."""
    own = dict(image_token=MARK, fake_image_token="<fake_token_around_image>")
    own |= dict(global_image_tag="<global-img>", image_seq_len=tile)
    own |= dict(image_start_token="<|image_start|>", image_end_token="<|image_end|>")
    own |= dict(image_thumbnail_token="<|img_thumbnail|>", image_seq_length=tile)
    own |= dict(start_image_token="<img>", end_image_token="</img>")
    if kind == "lfm2_vl":
        from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

        build = Lfm2VlProcessor._build_image_tokens
        return build(SimpleNamespace(**own), rows, columns, tile, whole, True, True)
    if kind == "internvl":
        from transformers.models.internvl.processing_internvl import InternVLProcessor

        tiles = columns * rows + (columns * rows > 1)
        given = {"num_patches": [tiles]}
        return InternVLProcessor.replace_image_token(SimpleNamespace(**own), given, 0)
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    split = columns * rows > 1
    given = {"rows": [[rows * split]], "cols": [[columns * split]]}
    return Idefics3Processor.replace_image_token(SimpleNamespace(**own), given, 0)


@pytest.mark.parametrize(
    "kind, grids",
    [
        ("smolvlm", {(60, 34): (3, 2), (34, 60): (2, 3), (32, 32): (3, 3), (300, 9): (3, 1)}),
        ("internvl", {(60, 34): (2, 1), (34, 60): (1, 2), (32, 32): (1, 1), (300, 9): (4, 1)}),
        ("lfm2_vl", {(120, 68): (4, 2), (68, 120): (2, 4), (60, 34): (1, 1), (300, 9): (10, 1)}),
    ],
)
def test_texts_are_those_of_transformers(kind, grids, models):
    family = family_of(kind, models)
    for size, (columns, rows) in grids.items():
        cut = family.cut(picture(1, *size))
        text = cut.text
        whole = text.rpartition("|img_thumbnail|" if "thumbnail" in text else "|image_start|")[2]
        whole_rows = whole.count(MARK)
        assert text == text_of_tiles(kind, columns, rows, 4, whole_rows), size
        assert text.count(MARK) == 4 * (len(cut.tiles) - 1) + (
            whole_rows if kind == "lfm2_vl" else 4
        )


@pytest.mark.parametrize("kind", ["smolvlm", "internvl", "lfm2_vl", "qwen2_5_vl"])
def test_fewer_pixels_are_fewer_rows(kind, models, monkeypatch):
    monkeypatch.setattr(base, "MAX_ROWS", 20)
    counts = {}
    for width, height in SHAPES:
        image = picture(3, width, height)
        rows = family_of(kind, models).cut(image).text.count(MARK)
        assert 0 < rows <= 20
        for max_pixels in (1, 3 * 1024, 7 * 1024, 10**7):
            cut = family_of(kind, models, max_pixels).cut(image)
            pixels = sum(tile.shape[1] * tile.shape[2] for tile in cut.tiles)
            assert pixels <= max(max_pixels, 32 * 32)
            counts.setdefault(max_pixels, []).append(cut.text.count(MARK))
    few, some, more, all_rows = map(sum, counts.values())
    assert few < some <= more <= all_rows


@pytest.mark.parametrize("kind", ["internvl", "qwen3_vl", "gemma4 experts"])
def test_an_image_of_another_size_of_numbers(kind, models):
    """In bfloat16, where answers with drafts are those without, too."""
    folder, _ = models(kind)
    with LLM(str(folder), "ar") as llm:
        right = llm.chat(two_images(), GREEDY).token_ids
        assert llm.chat(two_images(), GREEDY, method="auto").token_ids == right
        (first, *_) = llm.encode_chat(two_images()).images
        assert first.rows.dtype is torch.bfloat16


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_a_call_brings_in_place_of_embeddings(threads):
    kernels, width = library.kernels(), 40
    table = torch.randn(9, width)
    program = Program(kernels)
    target, given = program.external("x", width, True), program.external("embedded", 1)
    program.embed(table, target, scale=2.0, given=given)
    program.add_rows(given, target, column=width)
    tokens, x = [3, 1, 4, 1, 5, 8, 2], torch.empty(7, width)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        one, two, three = (torch.randn(count, 2 * width) for count in (1, 2, 3))
        for embedded in ({}, {2: three}, {0: one, 5: two}, {}):
            rows = RowList()
            zeros = [0] * 7
            rows.add(0, tokens, zeros, zeros, zeros, [()] * 7, ())
            rows.embedded.update(embedded)
            program.run(rows, {"x": x, "embedded": rows.embedded_addresses})
            right = 2 * table[tokens]
            for first, brought in embedded.items():
                right[first : first + len(brought)] = brought[:, :width] + brought[:, width:]
            assert torch.equal(x, right)
    finally:
        torch.set_num_threads(before)
