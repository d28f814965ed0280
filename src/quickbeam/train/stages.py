"""From a model to a drafter, in stages: write text, train, describe.

Each stage continues what an earlier run left.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
from accelerate import Accelerator

from quickbeam import hub
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.errors import InvalidInput
from quickbeam.models.gathered import RowPool
from quickbeam.models.kv import LayerShape
from quickbeam.models.loading import eos_ids, load_model
from quickbeam.models.torch import TorchModel
from quickbeam.train import drafter, openers, text
from quickbeam.train.recipes import Plan as Plan
from quickbeam.train.shards import Shards, ShardWriter, Unwritten, read_prompts
from quickbeam.train.trainer import Report, Trainer

GIB = 2**30


@dataclass(frozen=True)
class Needs:
    """The most that the stages take, in bytes."""

    text_memory: int
    train_memory: int
    disk: int


class DrafterTraining:
    """Makes a drafter for a model: `write_text`, then `train`.

    `accelerator`: the device and the number of processes.
    """

    def __init__(self, plan: Plan, accelerator: Accelerator | None = None) -> None:
        openers.questions(plan.languages)  # an unknown one is refused before anything is loaded
        self.plan = plan
        self.accelerator = accelerator or Accelerator()
        self.device = self.accelerator.device
        folder = hub.resolve(plan.model)
        self.model, self.tokenizer = load_model(folder, torch.bfloat16, self.device)
        config = self.model.config.get_text_config()
        self.head = drafter.head_of(self.model)  # before anything is packed
        count = config.num_hidden_layers
        self.layers = tuple(
            sorted({max(1, count // 6), max(1, count // 2), max(1, count * 5 // 6), count + 1})
        )
        heads, kv_heads = (
            config.num_attention_heads,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        )
        rope = {"max_position_embeddings": config.max_position_embeddings}
        if parameters := getattr(config, "rope_parameters", None):
            rope["rope_parameters"] = dict(parameters)
        self.config = EagleConfig(
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            layers=self.layers,
            target_size=config.hidden_size,
            vocab_size=len(self.head),
            eps=getattr(config, "rms_norm_eps", 1e-5),
            rope=rope,
            feature_norms=True,
            lift=True,
        )

    def needs(self) -> Needs:
        """Return upper estimates, from the shapes."""
        plan, config, recipe = self.plan, self.config, self.plan.recipe
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        row = len(self.layers) * config.target_size * 2 + 5
        logits = plan.slots * config.vocab_size * 4
        base = GIB  # the interpreter and the libraries
        shape = LayerShape(config.kv_heads, config.head_dim, config.head_dim)
        pool = RowPool(
            [shape] * self.model.config.get_text_config().num_hidden_layers,
            self.model.dtype,
            self.device,
        )
        longest = plan.length * 3 // 2 + pool.page  # the pool grows by half
        cache = plan.slots * -(-longest // pool.page) * pool.page_bytes
        text_memory = base + 3 * weights + cache + 6 * logits + plan.slots * plan.length * row
        width = (
            (config.heads + 2 * config.kv_heads) * config.head_dim
            + 3 * config.intermediate_size
            + 12 * config.hidden_size
        )
        parameters = config.hidden_size * (
            len(config.layers) * config.target_size + width + 2 * config.hidden_size
        )
        longest = max(recipe.batch, plan.length)
        activations = (
            longest * recipe.depths * (6 * width + 3 * recipe.loss_vocab) * 4 + longest * row * 4
        )
        scores = 4 * config.heads * longest * (plan.length + recipe.depths) * (recipe.depths + 2)
        check = 6 * plan.length * config.vocab_size * 4
        head = 0 if drafter.fast_bfloat16(self.device) else 4 * self.head.numel()
        train_memory = base + 2 * weights + head + 24 * parameters + activations + scores + check
        return Needs(text_memory, train_memory, int(plan.tokens * row * 1.02) + 24 * parameters)

    def check(self) -> None:
        """Raise `InvalidInput` if the training can't be done.

        That is if the disk has no room for what is still to be written, or if `start` is of another
        shape.
        """
        if self.plan.start is not None:
            self.network()
        self.plan.out.mkdir(parents=True, exist_ok=True)
        there = sum(f.stat().st_size for f in self.plan.out.rglob("*") if f.is_file())
        free = shutil.disk_usage(self.plan.out).free
        if (needed := self.needs().disk - there) > free:
            raise InvalidInput(
                f"{self.plan.out} has {free / GIB:.1f} GiB free, {needed / GIB:.1f} "
                "are needed: ask for fewer --tokens"
            )

    def written(self) -> int:
        """Return how many tokens of text there are.

        Raises `InvalidInput` for files that are no shards.
        """
        there = self._there()
        return 0 if there is None else there.tokens

    def _there(self) -> Shards | None:
        try:
            return Shards(self.plan.text)
        except InvalidInput:
            if any(self.plan.text.glob("*.safetensors")):
                raise
            return None

    def write_text(self, report: Callable[[int, float], None]) -> None:
        """Write conversations until there are `tokens` tokens of text, or all prompts are answered.

        `report` is called after every pass with the number of tokens, those of conversations that
        are not complete yet included, and the tokens per second. What is complete stays when it is
        interrupted, and a prompt that it answers is not answered again. Raises `QuickbeamError` if
        the text can't be written.
        """
        plan, processes = self.plan, self.accelerator.num_processes
        earlier = self._there()
        there = 0 if earlier is None else earlier.tokens
        prompts = None
        if plan.prompts is not None and there < plan.tokens:
            prompts = [self._encode(messages) for messages in read_prompts(plan.prompts)]
        answered = None
        if prompts is not None:
            none = [False] * len(prompts)
            answered = none if earlier is None else earlier.answered_prompts(prompts)
        self.accelerator.wait_for_everyone()  # no process writes before all have looked
        if there >= plan.tokens or (answered is not None and all(answered)):
            return
        shards = ShardWriter(plan.text, f"text{self.accelerator.process_index}")
        began, fresh = time.perf_counter(), 0

        def stepped(unfinished: int) -> None:
            here = (fresh + unfinished) * processes
            report(min(there + here, plan.tokens), here / (time.perf_counter() - began))

        share = -(-(plan.tokens - there) // processes)
        try:
            for conversation in self._writer(shards, prompts, answered, share, stepped):
                shards.add(conversation)
                fresh += len(conversation.tokens)
                if there + fresh * processes >= plan.tokens:
                    break
            stepped(0)
        except Unwritten:
            raise  # another try would fail as well
        except BaseException:
            shards.flush()
            raise
        shards.flush()
        self.accelerator.wait_for_everyone()

    def _writer(
        self,
        shards: ShardWriter,
        prompts: list[list[int]] | None,
        answered: list[bool] | None,
        tokens: int,
        stepped: Callable[[int], None],
    ) -> text.Writer:
        """Return what writes this process's share of the text."""
        plan, rank, count = (
            self.plan,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        stops = eos_ids(self.model, self.tokenizer)
        template = None if plan.prompts else text.Template.of(self.tokenizer, stops)
        recipe = text.Recipe(
            length=plan.length,
            question=min(text.Recipe.question, plan.length // 3),
            quote=plan.quote,
            openers=openers.questions(plan.languages),
            documents=openers.documents(plan.languages),
            seed=plan.recipe.seed + 1_000_003 * (shards.files + 1) + rank,
        )
        model = TorchModel(self.model)
        model.watch(self.layers)
        return text.Writer(
            model,
            plan.slots,
            self._ids,
            template,
            template.stops if template else frozenset(stops),
            recipe,
            None if prompts is None else prompts[rank::count],
            None if answered is None else answered[rank::count],
            tokens,
            stepped,
        )

    def _ids(self, words: str) -> list[int]:
        return [
            int(token) for token in self.tokenizer(words, add_special_tokens=False)["input_ids"]
        ]

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            return [
                int(token)
                for token in self.tokenizer("\n".join(m["content"] for m in messages))["input_ids"]
            ]
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in ids]

    def train(self, report: Callable[[Report], None]) -> drafter.Held:
        """Train on the text that is there, and write the drafter and its card.

        Returns the held-out figures. It frees the model, so no other stage can follow.
        """
        plan = self.plan
        shards = Shards(plan.text)
        network = self.network()
        del self.model  # with its packed linears, and the keys and values of the text
        gc.collect()
        # The distance to hidden states only guides networks that begin with random weights.
        recipe = replace(plan.recipe, regression=0.0) if plan.start else plan.recipe
        trainer = Trainer(network, self.head, shards, recipe, plan.out, self.accelerator)
        held = trainer.run(report)
        if self.accelerator.is_main_process:
            (plan.out / "README.md").write_text(self.card(shards, trainer, held))
            record = {"held_out": held._asdict(), "recipe": asdict(plan.recipe)}
            (plan.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        return held

    def network(self) -> EagleHead:
        """Return the network that training begins with.

        Raises `InvalidInput` if `start` is of another shape.
        """
        if self.plan.start is None:
            return drafter.new_network(self.model, self.config, self.plan.recipe.seed)
        return drafter.begun(self.model, self.config, self.plan.start)

    def command(self) -> str:
        """Return the command line of this training."""
        plan, recipe, plain = self.plan, self.plan.recipe, drafter.Recipe()
        parts = ["quickbeam train --only drafter"]
        parts += [f"--model {plan.model}"] if plan.model else []
        parts += [f"--prompts {plan.prompts.name}"] if plan.prompts else []
        parts += [f"--tokens {plan.tokens}", f"--length {plan.length}"]
        parts += [f"--quote {plan.quote:g}"] if plan.quote != Plan.quote else []
        if tuple(plan.languages) != Plan.languages:
            parts += [f"--languages {','.join(plan.languages)}"]
        parts += [f"--start {plan.start.name}"] if plan.start else []
        for name, value in asdict(recipe).items():
            if value != getattr(plain, name):
                parts.append(f"--{name.replace('_', '-')} {value:g}")
        return " ".join(parts)

    def card(self, shards: Shards, trainer: Trainer, held: drafter.Held) -> str:
        """Return the model card in Markdown: what it is, how it was made, how good it is."""
        name = self.plan.model or hub.DEFAULT
        rows = "\n".join(
            f"| {i} | {a:.3f} | {o:.3f} |"
            for i, (a, o) in enumerate(zip(held.agreement, held.overlap, strict=True), 1)
        )
        parameters = sum(p.numel() for p in trainer.network.parameters()) / 1e6
        source = (
            f"answers to the prompts of {self.plan.prompts.name}"
            if self.plan.prompts
            else "questions, answers and documents"
        )
        return f"""# A feature drafter for {name}

One decoder layer of {parameters:.1f} M parameters that reads hidden states of {name} (after layers
{", ".join(map(str, self.layers))}) and drafts its next tokens, with its embedding and head. Made
with

    {self.command()}

- **Data:** {source} written by the model itself, {shards.tokens:,} tokens in {len(shards):,}
  conversations ({shards.answers:,} tokens of answers). No other text was used. One conversation in
  {drafter.HELD_OUT} was held out.
- **Training:** {trainer.seen:,} tokens ({trainer.seen / shards.tokens:.1f} times the text) in
  {trainer.step:,} steps, {timedelta(seconds=round(trainer.seconds))} on {_machine(self.device)}.
- **Held-out acceptance**, by depth (how many tokens it drafts ahead, its own drafts having been
  right): how often its likeliest token is the model's, and the mean overlap Σ min(p, q) of the two
  distributions, which is how often a drawn token is accepted at temperature 1.

| depth | agreement | overlap |
| --- | --- | --- |
{rows}
"""


def _machine(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
