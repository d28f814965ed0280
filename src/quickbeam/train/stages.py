"""From a model to a block drafter, in stages: write text, train, describe.

Each stage continues what an earlier run left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_files import load_block
from quickbeam.drafters.folder import TargetParts, embed_scale
from quickbeam.drafters.layouts import BLOCK, is_kind
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import InvalidInput
from quickbeam.models import builtin
from quickbeam.models.opening import open_model
from quickbeam.models.text.chat_template import for_template
from quickbeam.models.transformers_class import refuse_file
from quickbeam.models.weights.formats import pick_device
from quickbeam.train import text
from quickbeam.train.block import HeldOutMetrics, new_network
from quickbeam.train.recipes import Plan, Recipe, opening_words
from quickbeam.train.router import ranking
from quickbeam.train.shards import Shards, ShardWriter, read_prompts
from quickbeam.train.target import FrozenTarget, load_target
from quickbeam.train.trainer import Report, Trainer


def existing_text(plan: Plan) -> Shards | None:
    """Return the text that is there. Raises `InvalidInput` for files that are no shards."""
    return Shards(plan.text) if any(plan.text.glob("*.safetensors")) else None


class TextStage:
    """Has the model of a `plan` write text. Raises `InvalidInput` for an unknown language."""

    def __init__(self, plan: Plan) -> None:
        opening_words("questions", plan.languages)  # refused before anything is loaded
        self.plan = plan
        folder, device = builtin.resolve(plan.model), pick_device(None)
        refuse_file(folder)  # which the next stage couldn't read
        opened = open_model(folder, torch.bfloat16, device)
        self._model, self._tokenizer = opened.model, opened.tokenizer
        self._stops = opened.eos_ids

    def run(self, report: Callable[[int, float], None]) -> None:
        """Write conversations until there are `tokens` tokens of text, or all prompts are answered.

        `report` is called after every pass with the number of tokens, those of conversations that
        are not complete yet included, and the tokens per second. What is complete stays when it is
        interrupted, and a prompt that it answers is not answered again. Raises `QuickbeamError` if
        the text can't be written.
        """
        plan, earlier = self.plan, existing_text(self.plan)
        there = 0 if earlier is None else earlier.tokens
        prompts = None
        if plan.prompts is not None:
            prompts = [self._encode(messages) for messages in read_prompts(plan.prompts)]
            if earlier is not None:
                pairs = zip(prompts, earlier.answered_prompts(prompts), strict=True)
                prompts = [one for one, done in pairs if not done and len(one) < plan.length - 1]
        if there >= plan.tokens or prompts == []:
            return
        shards = ShardWriter(plan.text)
        began, fresh = time.perf_counter(), 0

        def stepped(unfinished: int) -> None:
            here = fresh + unfinished
            report(min(there + here, plan.tokens), here / (time.perf_counter() - began))

        template = None if prompts else text.Template.of(self._tokenizer, self._stops)
        stops = template.stops if template else frozenset(self._stops)
        recipe = text.TextRecipe(
            length=plan.length,
            question=min(text.TextRecipe.question, plan.length // 3),
            quote=plan.quote,
            openers=opening_words("questions", plan.languages),
            documents=opening_words("documents", plan.languages),
            seed=plan.recipe.seed + 1_000_003 * (shards.files + 1),
        )
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        of, wanted = (self._model, plan.slots, encode), plan.tokens - there
        writer = text.Writer(*of, template, stops, recipe, prompts, wanted, stepped)
        try:
            for conversation in writer:
                shards.add(conversation)
                fresh += len(conversation.tokens)
                if there + fresh >= plan.tokens:
                    break
            stepped(0)
        finally:
            shards.flush()

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            words = "\n".join(m["content"] for m in messages)
            return [int(token) for token in self._tokenizer(words)["input_ids"]]
        turns = for_template(self._tokenizer.get_chat_template(), messages)
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [int(token) for token in self._tokenizer.apply_chat_template(turns, **how)]


def aux_layers(count: int) -> tuple[int, ...]:
    """Return which hidden states a drafter reads of a model of `count` layers.

    DFlash's rule for three layers is round(1 + i (L - 4) / 2), counted from 0.
    """
    layers = {min(count, 2 + round(i * max(0, count - 4) / 2)) for i in range(3)}
    return tuple(sorted(layers))


def block_config(model: PreTrainedModel, tokenizer: Any, recipe: Recipe) -> BlockConfig:
    """Return the shape of a block drafter for a model: layers as wide as the model's own.

    It reads the model after the first layer, about half of them, and nearly all. The mask is a
    token that text does not hold: one without a name, or the last special one.
    """
    config = model.config.get_text_config()
    count, vocab = config.num_hidden_layers, len(model.get_output_embeddings().weight)
    rope = {"max_position_embeddings": config.max_position_embeddings}
    if parameters := getattr(config, "rope_parameters", None):
        rope["rope_parameters"] = dict(parameters.get("full_attention", parameters))
    named, heads = len(tokenizer), config.num_attention_heads
    special = [i for i in tokenizer.added_tokens_decoder if i < vocab]
    return BlockConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        depth=recipe.depth,
        aux_layers=aux_layers(count),
        target_size=config.hidden_size,
        vocab_size=vocab,
        block_size=recipe.block,
        mask_token=vocab - 1 if named < vocab else max(special, default=vocab - 1),
        markov_rank=recipe.rank,
        confidence=True,
        embedding_scale=embed_scale(model.get_input_embeddings()),
        eps=getattr(config, "rms_norm_eps", 1e-6),
        rope=rope,
    )


class BlockStage:
    """Trains a block drafter on the text of a `plan`.

    Raises `InvalidInput` if there is no text, or `start` is of another shape.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        Shards(plan.text)  # refused before anything is loaded
        model, tokenizer = load_target(plan.model, pick_device(None))
        config = block_config(model, tokenizer, plan.recipe)
        count = model.config.get_text_config().num_hidden_layers
        self.target = FrozenTarget(model, (*config.aux_layers, count + 1))
        network = new_network(config, self.target, plan.recipe.seed)
        if plan.start is not None:
            if not is_kind(plan.start, BLOCK):
                raise InvalidInput(f"--start {plan.start}: must be the folder of a block drafter")
            parts = count, config.target_size, config.vocab_size, self.target.embedding
            network = load_block(plan.start, TargetParts(*parts, torch.nn.Identity()))
            network = network.float().requires_grad_(True)
            if differing := [
                f"{name} {getattr(network.config, name)} instead of {one}"
                for name, one in vars(config).items()
                if name != "embedding_scale" and getattr(network.config, name) != one
            ]:
                raise InvalidInput(
                    f"--start {plan.start}: of another shape ({', '.join(differing)}): give its "
                    "--depth, --block and --rank"
                )
            network.config = config
        total = max(1, int(plan.tokens * plan.recipe.epochs))
        trained = plan.start is not None
        self.trainer = Trainer(
            network, self.target, plan.text, plan.recipe, total, plan.out, trained=trained
        )

    def run(self, report: Callable[[Report], None]) -> HeldOutMetrics:
        """Train, write what was asked for and the figures, and return these.

        The tokens by how often the text has them lie beside the drafter from the start.
        """
        plan, shards = self.plan, self.trainer.shards
        order = ranking(shards.counts(len(self.target.head)))
        Artefact(Layout(order, len(order), 1, len(order)), order, None).save(plan.out)
        held = self.trainer.run(report)
        record = asdict(plan) | {"seen": self.trainer.seen, "seconds": self.trainer.seconds}
        record |= {"text": self.trainer.shards.tokens, "held_out": held._asdict()}
        (plan.out / "training.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
        return held
