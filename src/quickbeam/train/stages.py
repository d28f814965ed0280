"""From a model to a block drafter, in stages: write text, train, describe.

Each stage continues what an earlier run left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from transformers import PreTrainedModel

from quickbeam import hub
from quickbeam.drafters.block_model import BlockConfig, BlockNetwork, load_block
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model
from quickbeam.models.chat_template import for_template
from quickbeam.models.formats import pick_device
from quickbeam.models.loading import load_model
from quickbeam.models.opening import make_model, model_eos_ids
from quickbeam.train import openers, text
from quickbeam.train.block import Held, new_network
from quickbeam.train.clusters import ranking
from quickbeam.train.recipes import Plan, Recipe
from quickbeam.train.shards import HELD_OUT, Shards, ShardWriter, Unwritten, read_prompts
from quickbeam.train.target import FrozenTarget, load_target
from quickbeam.train.trainer import Report, Trainer


def written(plan: Plan) -> Shards | None:
    """Return the text that is there. Raises `InvalidInput` for files that are no shards."""
    return Shards(plan.text) if any(plan.text.glob("*.safetensors")) else None


class TextStage:
    """Has the model of a `plan` write text. Raises `InvalidInput` for an unknown language."""

    def __init__(self, plan: Plan) -> None:
        openers.questions(plan.languages)  # refused before anything is loaded
        self.plan = plan
        folder, device = hub.resolve(plan.model), pick_device(None)
        loaded, self._tokenizer = load_model(folder, torch.bfloat16, device)
        self._stops = model_eos_ids(loaded, self._tokenizer)
        self._model: Model = make_model(loaded)

    def run(self, report: Callable[[int, float], None]) -> None:
        """Write conversations until there are `tokens` tokens of text, or all prompts are answered.

        `report` is called after every pass with the number of tokens, those of conversations that
        are not complete yet included, and the tokens per second. What is complete stays when it is
        interrupted, and a prompt that it answers is not answered again. Raises `QuickbeamError` if
        the text can't be written.
        """
        plan, earlier = self.plan, written(self.plan)
        there = 0 if earlier is None else earlier.tokens
        prompts, answered = None, None
        if plan.prompts is not None:
            prompts = [self._encode(messages) for messages in read_prompts(plan.prompts)]
            none = [False] * len(prompts)
            answered = none if earlier is None else earlier.answered_prompts(prompts)
        if there >= plan.tokens or (answered is not None and all(answered)):
            return
        shards = ShardWriter(plan.text)
        began, fresh = time.perf_counter(), 0

        def stepped(unfinished: int) -> None:
            here = fresh + unfinished
            report(min(there + here, plan.tokens), here / (time.perf_counter() - began))

        try:
            for conversation in self._writer(shards, prompts, answered, there, stepped):
                shards.add(conversation)
                fresh += len(conversation.tokens)
                if there + fresh >= plan.tokens:
                    break
            stepped(0)
        except Unwritten:
            raise  # another try would fail as well
        except BaseException:
            shards.flush()
            raise
        shards.flush()

    def _writer(
        self,
        shards: ShardWriter,
        prompts: list[list[int]] | None,
        answered: list[bool] | None,
        there: int,
        stepped: Callable[[int], None],
    ) -> text.Writer:
        plan, stops = self.plan, frozenset(self._stops)
        template = None if plan.prompts else text.Template.of(self._tokenizer, self._stops)
        recipe = text.Recipe(
            length=plan.length,
            question=min(text.Recipe.question, plan.length // 3),
            quote=plan.quote,
            openers=openers.questions(plan.languages),
            documents=openers.documents(plan.languages),
            seed=plan.recipe.seed + 1_000_003 * (shards.files + 1),
        )
        return text.Writer(
            self._model,
            plan.slots,
            self._ids,
            template,
            template.stops if template else stops,
            recipe,
            prompts,
            answered,
            plan.tokens - there,
            stepped,
        )

    def _ids(self, words: str) -> list[int]:
        found = self._tokenizer(words, add_special_tokens=False)["input_ids"]
        return [int(token) for token in found]

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            words = "\n".join(m["content"] for m in messages)
            return [int(token) for token in self._tokenizer(words)["input_ids"]]
        template = self._tokenizer.get_chat_template()
        ids = self._tokenizer.apply_chat_template(
            for_template(template, messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return [int(token) for token in ids]


def block_config(model: PreTrainedModel, tokenizer: Any, recipe: Recipe) -> BlockConfig:
    """Return the shape of a block drafter for a model: layers as wide as the model's own.

    It reads the model after the first layer, about half of them, and nearly all. The mask is a
    token that text does not hold: one without a name, or the last special one.
    """
    config = model.config.get_text_config()
    count, vocab = config.num_hidden_layers, len(model.get_output_embeddings().weight)
    rope = {"max_position_embeddings": config.max_position_embeddings}
    if parameters := getattr(config, "rope_parameters", None):
        rope["rope_parameters"] = dict(parameters)
    named, heads = len(tokenizer), config.num_attention_heads
    special = [i for i in tokenizer.added_tokens_decoder if i < vocab]
    return BlockConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        depth=recipe.depth,
        # DFlash's rule: round(1 + i (L - 4) / 2) for three, and one further, as outputs
        taps=tuple(sorted({min(count, 2 + round(i * max(0, count - 4) / 2)) for i in range(3)})),
        target_size=config.hidden_size,
        vocab_size=vocab,
        block_size=recipe.block,
        mask_token=vocab - 1 if named < vocab else max(special, default=vocab - 1),
        markov_rank=recipe.rank,
        confidence=True,
        eps=getattr(config, "rms_norm_eps", 1e-6),
        rope=rope,
    )


def command(plan: Plan) -> str:
    """Return the command line of a training."""
    plain = Recipe()
    parts = ["quickbeam train"]
    parts += [f"--model {plan.model}"] if plan.model else []
    parts += [f"--prompts {plan.prompts.name}"] if plan.prompts else []
    parts += [f"--tokens {plan.tokens} --length {plan.length} --quote {plan.quote:g}"]
    parts += [f"--languages {','.join(plan.languages)}"]
    parts += [f"--start {plan.start.name}"] if plan.start else []
    for name, value in asdict(plan.recipe).items():
        if value != getattr(plain, name):
            parts.append(f"--{name.replace('_', '-')} {value:g}")
    return " ".join(parts)


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
        self.target = FrozenTarget(model, (*config.taps, count + 1))
        network = (
            new_network(config, self.target, plan.recipe.seed)
            if plan.start is None
            else self._begun(config, count)
        )
        total = max(1, int(plan.tokens * plan.recipe.epochs))
        self.trainer = Trainer(network, self.target, plan.text, plan.recipe, total, plan.out)

    def _begun(self, config: BlockConfig, layers: int) -> BlockNetwork:
        start = self.plan.start
        assert start is not None
        shape, modules = (layers, config.target_size, config.vocab_size), self.target.embedding
        network = load_block(start, TargetParts(*shape, modules, torch.nn.Identity()))
        own, expected = asdict(network.config), asdict(config)
        if others := [
            f"{name} {own[name]!r} instead of {expected[name]!r}"
            for name in expected
            if own[name] != expected[name]
        ]:
            raise InvalidInput(f"--start {start}: of another shape: {'; '.join(others)}")
        return network.float().requires_grad_(True)

    def run(self, report: Callable[[Report], None]) -> Held:
        """Train, write the drafter's card and figures, and return these.

        The tokens by how often the text has them lie beside the drafter from the start.
        """
        plan, order = self.plan, ranking(self.trainer.shards.counts(len(self.target.head)))
        Artefact(Layout(order, len(order), 1, len(order)), order, None).save(plan.out)
        held = self.trainer.run(report)
        (plan.out / "README.md").write_text(self.card(held))
        record = {
            "command": command(plan),
            "seen": self.trainer.seen,
            "held_out": held._asdict(),
            "recipe": asdict(plan.recipe),
        }
        (plan.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        return held

    def card(self, held: Held) -> str:
        """Return the model card in Markdown: what it is, how it was made, how good it is."""
        trainer, config = self.trainer, self.trainer.network.config
        name, shards = self.plan.model or hub.DEFAULT, trainer.shards
        rows = "\n".join(
            f"| {i} | {a:.3f} | {o:.3f} |"
            for i, (a, o) in enumerate(zip(held.agreement, held.overlap, strict=True), 1)
        )
        parameters = sum(p.numel() for p in trainer.network.parameters()) / 1e6
        return f"""# A block drafter for {name}

{config.depth} layers of {parameters:.1f} M parameters in all, with a Markov head of rank
{config.markov_rank}, that read hidden states of {name} (after layers
{", ".join(map(str, config.taps))}) and draft {config.drafted} tokens in one pass, with its
embedding and head. DSpark's layout (2607.05147). Made with

    {command(self.plan)}

- **Data:** written by the model itself, {shards.tokens:,} tokens in {len(shards):,} conversations
  ({shards.answers:,} tokens of answers). No other text was used. One conversation in {HELD_OUT} was
  held out.
- **Training:** {trainer.seen:,} tokens in {trainer.step:,} steps,
  {timedelta(seconds=round(trainer.seconds))} with {torch.get_num_threads()} threads on
  {trainer.target.device.type}.
- **Held-out**, by position: how often its likeliest token is the model's, and the mean overlap of
  the two distributions, which is how often a drawn token is accepted at temperature 1. As a chain,
  that is {held.mat:.2f} tokens a step at temperature 0, and {held.mat_drawn:.2f} at 1.

| position | agreement | overlap |
| --- | --- | --- |
{rows}
"""
