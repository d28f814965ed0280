"""Tiny random models that read images, in folders, and images for them."""

import io
import json
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer

from models import SIZES, spread_out, table

TEXT = table("texts", dict)
PIXELS = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4]}
SQUARE = {"height": 32, "width": 32}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
SMALL |= {"num_hidden_layers": 2, "patch_size": 8, "image_size": 32}
TILED = {"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 96}}
QWEN3 = {"hidden_size": 16, "intermediate_size": 24, "depth": 3, "num_heads": 2, "patch_size": 8}
QWEN3 |= {"out_hidden_size": 32, "num_position_embeddings": 16}
QWEN_PIXELS = {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 16 * 256}}
GEMMA4 = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "standardize": True}
GEMMA4 |= {"position_embedding_size": 256, "use_clipped_linears": True}
MARKS_OF_GEMMA4 = {"boi_token_id": 261, "eoi_token_id": 262}
SOUND = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
GEMMA4_PIXELS = {"patch_size": 4, "max_soft_tokens": 70}
# of each kind, whose first word is the model's type: the vision part, other fields of the
# configuration, and the image processor's
KINDS = {
    "smolvlm": (SMALL, {"scale_factor": 2}, TILED),
    "idefics3": (SMALL, {"scale_factor": 2}, TILED),
    "lfm2_vl": (
        SMALL | {"patch_size": 8, "num_patches": 16, "model_type": "siglip2_vision_model"},
        {"downsample_factor": 2, "projector_hidden_size": 16},
        {"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 2, "max_image_tokens": 6},
    ),
    "internvl": (
        SMALL | {"patch_size": [8, 8], "image_size": [32, 32]},
        {"downsample_ratio": 0.5, "image_seq_length": 4},
        {"size": SQUARE, "max_patches": 4},
    ),
    "gemma3": (
        SMALL | {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "boi_token_index": 261, "eoi_token_index": 262},
        {"size": SQUARE},
    ),
    "gemma4": (GEMMA4, MARKS_OF_GEMMA4 | {"audio_config": SOUND}, GEMMA4_PIXELS),
    "gemma4 experts": (GEMMA4, MARKS_OF_GEMMA4, GEMMA4_PIXELS),
    "qwen2_5_vl": (
        SMALL
        | {"hidden_act": "silu", "depth": 2, "num_heads": 2, "out_hidden_size": 32}
        | {"window_size": 32, "fullatt_block_indexes": [1], "spatial_merge_size": 2},
        {},
        QWEN_PIXELS,
    ),
    "qwen2_vl": (
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 8},
        {},
        QWEN_PIXELS,
    ),
    "qwen3_5": (QWEN3, {}, QWEN_PIXELS),
    "qwen3_5_moe": (QWEN3, {}, QWEN_PIXELS),
    "qwen3_vl": (QWEN3 | {"deepstack_visual_indexes": [0, 2]}, {}, QWEN_PIXELS),
    "qwen3_vl_moe": (QWEN3 | {"deepstack_visual_indexes": [1]}, {}, QWEN_PIXELS),
    "llava": (
        SMALL | {"model_type": "clip_vision_model"},
        {"vision_feature_layer": -1, "image_seq_length": 16},
        {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
    ),
}
MARK = "<image>"
MARKS = [MARK, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
MARKS += ["<img>", "</img>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
MARKS += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
MARKS += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


def vision_folder(kind, toy_folder, folder, dtype=torch.float32):
    """Write a tiny random model of a kind to `folder`, and return transformers' model."""
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE.replace(MARK, "<img>") if kind == "gemma3" else TEMPLATE
    tokenizer.save_pretrained(folder)
    vision, fields, processor = KINDS[kind]
    settings = PIXELS | processor
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model_class = CONFIG_MAPPING[kind.split()[0]]
    text = SIZES | TEXT.get(kind, {}) | {"vocab_size": len(tokenizer), "eos_token_id": 256}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = len(tokenizer)
    text["model_type"] = model_class().get_text_config().model_type
    if kind.startswith("qwen"):
        fields = fields | {"vision_start_token_id": 260, "vision_end_token_id": 261}
        fields |= {"video_token_id": 262}
    token = "image_token_index" if kind == "llava" else "image_token_id"
    config = model_class(
        text_config=text,
        vision_config=vision,
        **{token: tokenizer.convert_tokens_to_ids(MARK)},
        tie_word_embeddings=False,
        **fields,
    )
    model = AutoModelForImageTextToText.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    language = "language_model" if hasattr(model.model, "language_model") else "text_model"
    spread_out(model.get_submodule(f"model.{language}"))
    spread_out(model.lm_head)
    if "deepstack_visual_indexes" in vision:
        spread_out(model.model.visual.deepstack_merger_list)
    if kind.startswith("gemma4"):
        tower = model.model.vision_tower
        torch.nn.init.normal_(tower.patch_embedder.position_embedding_table)
        torch.nn.init.normal_(tower.std_bias)
        for clipped in (part for part in tower.modules() if hasattr(part, "input_max")):
            clipped.input_max.fill_(0.5)
            clipped.output_min.fill_(-0.1)
    model.save_pretrained(folder)
    return model.eval()


def picture(seed, width=40, height=28):
    """Return a random image of coarse squares, as Pillow has it."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(256, (5, 7, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(coarse.numpy()).resize((width, height), Image.Resampling.BICUBIC)


def file_of(image, kind="PNG", **options):
    """Return the bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def asked(*parts):
    """Return a conversation of one message of the user's, of texts and images."""
    content = []
    for part in parts:
        text = isinstance(part, str)
        content.append({"type": "text", "text": part} if text else {"type": "image", "image": part})
    return [{"role": "user", "content": content}]
