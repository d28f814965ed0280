"""From a model to a drafter, in stages: write text, train, describe.

Each stage continues what an earlier run left.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_files import load_block
from quickbeam.drafters.eagle_files import FileHead, load_eagle, save_eagle
from quickbeam.drafters.eagle_model import EagleConfig
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.layouts import BLOCK, EAGLE, is_kind
from quickbeam.drafters.ngram_table import NgramTable
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import InvalidInput
from quickbeam.models.text.chat_template import for_template
from quickbeam.train import given, recipes, text
from quickbeam.train.base import DrafterTraining
from quickbeam.train.block import BlockTraining, new_block_network
from quickbeam.train.feature import FeatureTraining, feature_layers, new_feature_network
from quickbeam.train.forecast import Rates, measure_rates, write_rate
from quickbeam.train.held_out import HeldOutMetrics
from quickbeam.train.recipes import HIDDEN_FOLDER, Plan, Recipe, opening_words
from quickbeam.train.router import ranking
from quickbeam.train.shards import Shards, ShardWriter, read_prompts, token_counts
from quickbeam.train.states import StateCache
from quickbeam.train.target import FrozenTarget, OpenTarget
from quickbeam.train.trainer import Report, Trainer

LEAST_TOKENS = 1000  # of a plan


def existing_text(plan: Plan) -> Shards | None:
    """Return the text that is there. Raises `InvalidInput` for files that are no shards."""
    return Shards(plan.text) if any(plan.text.glob("*.safetensors")) else None


def planned(plan: Plan, rates: Rates) -> Plan:
    """Return the plan with the tokens that `minutes` allows at these rates, where it is given.

    An earlier run for as many minutes has chosen already, in `plan.json`, unless one of both only
    writes text, which takes less time.
    """
    if plan.minutes is None:
        return plan
    path = plan.folder / "plan.json"
    trains = math.isfinite(rates.train)
    if path.is_file():
        earlier = json.loads(path.read_text())
        if (earlier["minutes"], earlier.get("trains", True)) == (plan.minutes, trains):
            return replace(plan, tokens=earlier["tokens"])
    tokens = max(LEAST_TOKENS, int(60 * plan.minutes * plan.tokens / sum(rates.seconds(plan))))
    plan.folder.mkdir(parents=True, exist_ok=True)
    chosen = {"minutes": plan.minutes, "trains": trains, "tokens": tokens}
    path.write_text(json.dumps(chosen) + "\n")
    return replace(plan, tokens=tokens)


class TextStage:
    """Has a model write the text of a `plan`."""

    def __init__(self, plan: Plan, target: OpenTarget) -> None:
        self.plan = plan
        self._model = target.loaded.model
        self._tokenizer = target.loaded.tokenizer
        self._stops = target.loaded.eos_ids

    def run(
        self,
        report: Callable[[int, float], None],
        tokens: int,
        states: StateCache | None = None,
    ) -> None:
        """Write conversations until there are `tokens` tokens of text, or all prompts are answered.

        A part of the text is what the user gives (`Plan.given`). `states` gets the hidden states of
        what is written. `report` is called after every pass with the number of tokens, those of
        conversations that are not complete yet included, and the tokens per second. What is
        complete stays when it is interrupted, and a prompt that it answers is not answered again.
        Raises `QuickbeamError` if the text can't be written.
        """
        plan = self.plan
        if plan.given is not None and self.tokens() < tokens:
            self._add_given(plan.given, round((1 - plan.own) * tokens))
        earlier, there = existing_text(plan), self.tokens()
        prompts = None
        if plan.prompts is not None:
            prompts = [self._encode(messages) for messages in read_prompts(plan.prompts)]
            if earlier is not None:
                pairs = zip(prompts, earlier.answered_prompts(prompts), strict=True)
                prompts = [one for one, done in pairs if not done and len(one) < plan.length - 1]
        if there >= tokens or prompts == []:
            return
        shards = ShardWriter(plan.text)
        began, fresh = time.perf_counter(), 0

        def stepped(unfinished: int) -> None:
            here = fresh + unfinished
            report(min(there + here, tokens), here / (time.perf_counter() - began))

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
        writer = text.Writer(
            self._model,
            plan.slots,
            self._encode_text,
            template,
            stops,
            recipe,
            prompts,
            tokens - there,
            stepped,
            states,
        )
        try:
            for conversation in writer:
                shards.add(conversation)
                fresh += len(conversation.tokens)
                if there + fresh >= tokens:
                    break
            stepped(0)
        finally:
            shards.flush()

    def rates(self) -> Rates:
        """Measure how fast this machine writes the text of the plan."""
        return Rates(write_rate(self.plan, self._model), math.inf, math.inf)

    def save_table(self) -> None:
        """Write what the n-grams of all text say of the next token. It drafts from then on."""
        there = existing_text(self.plan)
        if there is not None:
            texts = [conversation.tokens.numpy() for conversation in there]
            NgramTable.of(texts, self._model.vocab_size).save(self.plan.folder)

    def _add_given(self, path: Path, tokens: int) -> None:
        """Add of the user's text until there are `tokens` tokens of it, or no more is there."""
        earlier = existing_text(self.plan) or ()
        present = [conversation for conversation in earlier if not conversation.own]
        count = sum(len(conversation.tokens) for conversation in present)
        template = None
        if getattr(self._tokenizer, "chat_template", None):
            template = text.Template.of(self._tokenizer, self._stops)
        raw = list(self._tokenizer("")["input_ids"])
        conversations = given.conversations(
            given.read_given(path),
            self._encode_text,
            template,
            raw,
            self.plan.length,
            self.plan.recipe.seed,
        )
        shards = ShardWriter(self.plan.text)
        for conversation in islice(conversations, len(present), None):
            if count >= tokens:
                break
            shards.add(conversation)
            count += len(conversation.tokens)
        shards.flush()

    def _encode_text(self, words: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(words, add_special_tokens=False)
        return ids

    def tokens(self) -> int:
        """Return how many tokens of text there are."""
        there = existing_text(self.plan)
        return 0 if there is None else there.tokens

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            words = "\n".join(m["content"] for m in messages)
            return [int(token) for token in self._tokenizer(words)["input_ids"]]
        turns = for_template(self._tokenizer.get_chat_template(), messages)
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [int(token) for token in self._tokenizer.apply_chat_template(turns, **how)]


def block_layers(count: int) -> tuple[int, ...]:
    """Return which hidden states a block drafter reads of a model of `count` layers.

    DFlash's rule for three layers is round(1 + i (L - 4) / 2), counted from 0.
    """
    layers = {min(count, 2 + round(i * max(0, count - 4) / 2)) for i in range(3)}
    return tuple(sorted(layers))


def sizes_and_angles(config: Any) -> dict[str, Any]:
    """Return the fields of a drafter's configuration that are a model's: sizes and angles."""
    rope = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    if parameters := getattr(config, "rope_parameters", None):
        rope["rope_parameters"] = dict(parameters.get("full_attention", parameters))
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "heads": heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "target_size": config.hidden_size,
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope": {name: value for name, value in rope.items() if value is not None},
    }


def feature_config(target: OpenTarget) -> EagleConfig:
    """Return the shape of a feature drafter for a model: a layer as wide as the model's own."""
    config = target.loaded.model.config
    heads = config.num_attention_heads
    return EagleConfig(
        **sizes_and_angles(config),
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        layers=feature_layers(config.num_hidden_layers),
        vocab_size=target.loaded.model.vocab_size,
        feature_norms=True,
    )


def block_config(target: OpenTarget, recipe: Recipe) -> BlockConfig:
    """Return the shape of a block drafter for a model: layers as wide as the model's own.

    It reads the model after the first layer, about half of them, and nearly all. The mask is a
    token that text does not hold: one without a name, or the last special one.
    """
    model, tokenizer = target.loaded.model, target.loaded.tokenizer
    vocab, named = model.vocab_size, len(tokenizer)
    special = [i for i in tokenizer.added_tokens_decoder if i < vocab]
    return BlockConfig(
        **sizes_and_angles(model.config),
        kv_heads=model.config.num_attention_heads,
        depth=recipe.depth,
        aux_layers=block_layers(model.config.num_hidden_layers),
        vocab_size=vocab,
        block_size=recipe.block,
        mask_token=vocab - 1 if named < vocab else max(special, default=vocab - 1),
        markov_rank=recipe.rank,
        confidence=True,
        embedding_scale=target.stack.scale,
    )


class DrafterStage:
    """Trains a drafter on the text of a `plan`.

    Raises `InvalidInput` if `start` is of another shape.
    """

    def __init__(self, plan: Plan, opened: OpenTarget) -> None:
        self.plan = plan
        model, recipe = opened.loaded.model, plan.recipe
        config: Any = feature_config(opened)
        aux_layers = config.layers
        if recipe.kind == recipes.BLOCK:
            config = block_config(opened, recipe)
            aux_layers = config.aux_layers
        last = model.config.num_hidden_layers + 1
        self.target = FrozenTarget(model, opened.parameters, opened.stack, (*aux_layers, last))
        self._model = model
        self._config = config
        self._trainer: Trainer | None = None

    def rates(self) -> Rates:
        """Measure how fast this machine carries out the plan."""
        return measure_rates(self.plan, self._model, self.target, self._drafter())

    @cached_property
    def states(self) -> StateCache:
        """The hidden states of the text that are kept until the end of the training."""
        return StateCache.of(self.target, self.plan.folder / HIDDEN_FOLDER)

    @property
    def recorded(self) -> StateCache | None:
        """Where the hidden states of text go as it is written; None on a GPU, which reads fast."""
        return self.states if self.target.device.type == "cpu" else None

    @property
    def trainer(self) -> Trainer:
        """What trains. Raises `InvalidInput` if there is no text."""
        plan = self.plan
        if self._trainer is None:
            self._trainer = Trainer(
                self._drafter(),
                self.target,
                plan.text,
                plan.recipe,
                max(1, plan.visits),
                plan.folder,
                trained=plan.start is not None,
                states=self.states,
            )
            self._save_frequent(self._trainer.shards)
        return self._trainer

    def _drafter(self) -> DrafterTraining:
        """Return the drafter to be trained: a new one, or that of `start`."""
        plan, target, recipe = self.plan, self.target, self.plan.recipe
        network: Any
        if recipe.kind == recipes.BLOCK:
            if plan.start is None:
                network = new_block_network(self._config, target, recipe.seed)
            else:
                network = self._started(plan.start, BLOCK, load_block)
            return BlockTraining(network, recipe.spacing)
        if plan.start is None:
            network = new_feature_network(self._config, target, recipe.seed)
        else:
            network = self._started(plan.start, EAGLE, load_eagle)
        return FeatureTraining(network, recipe.ahead)

    def _started(self, start: Path, kind: str, load: Callable[[Path, TargetParts], Any]) -> Any:
        """Return the network in the folder `start`. Raises `InvalidInput` for another shape."""
        if not is_kind(start, kind):
            raise InvalidInput(
                f"--start {start}: must be the folder of a drafter of --kind "
                f"{self.plan.recipe.kind}"
            )
        parts = TargetParts.of(self._model)._replace(embedding=self.target.embedding)
        network = load(start, parts).float().requires_grad_(True)
        differing = list[str]()
        for name, value in vars(self._config).items():
            there = getattr(network.config, name)
            if name != "embedding_scale" and there != value:
                differing.append(f"{name} {there} instead of {value}")
        if differing:
            raise InvalidInput(
                f"--start {start}: of another shape ({', '.join(differing)}): give its --depth, "
                "--block and --rank"
            )
        network.config = self._config
        return network

    def _save_frequent(self, shards: Shards) -> None:
        """Write the tokens by how often the text has them, where there is no router yet."""
        out = self.plan.folder
        if Artefact.exists(out) and Artefact.load(out).router is not None:
            return
        order = ranking(token_counts(shards, len(self.target.head)))
        Artefact(Layout(order, len(order), 1, len(order)), order, None).save(out)

    def run(self, report: Callable[[Report], None], until: float = 1.0) -> HeldOutMetrics:
        """Train up to a share of the run, and return the figures of the drafter.

        At the end the figures and the frequent tokens are written beside the drafter.
        """
        plan, trainer = self.plan, self.trainer
        held = trainer.run(report, until)
        if until < 1:
            return held
        self._save_frequent(trainer.shards)
        if isinstance(trainer.drafter, FeatureTraining) and plan.recipe.file_head:
            head = self.target.head
            order = ranking(token_counts(trainer.shards, len(head)))
            file_head = FileHead(order[: plan.recipe.file_head], head)
            save_eagle(trainer.drafter.network, plan.folder, head=file_head)
        record = asdict(plan) | {"seen": trainer.seen, "seconds": trainer.seconds}
        record |= {"text": trainer.shards.tokens, "held_out": held._asdict()}
        (plan.folder / "training.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
        return held
