"""transformers' own generate, timed, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

from quickbeam.engine.result import Completion, Statistics
from quickbeam.errors import QuickbeamError
from quickbeam.machine import in_own_thread
from quickbeam.models.text.eos import model_eos_ids
from quickbeam.models.transformers_class import load_model
from quickbeam.models.weights.formats import pick_device, wanted_dtype
from quickbeam.params import SamplingParams

LOOKUP = {"prompt_lookup_num_tokens": 10}  # the value transformers' documentation uses


class Peer:
    """transformers' generate as a method, with ours of the output's distribution."""

    def __init__(self, loaded: tuple[Any, Any], lookup: bool = False, raw: bool = False) -> None:
        self.model, self.tokenizer = loaded
        self.options: dict[str, Any] = LOOKUP if lookup else {}
        self.device = str(self.model.device)
        self.raw = raw or self.tokenizer.chat_template is None
        # the ids that end our answers
        self.stops = sorted(model_eos_ids(self.model, self.tokenizer))

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self.raw:
            text = "\n\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        ids = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Completion:
        """Continue the ids. Of what the pass over the prompt emits, statistics count one token."""
        if params.seed is not None:
            torch.manual_seed(params.seed)
        clock = _Clock()
        prompt = torch.tensor([list(ids)], device=self.device)
        output = self._generate(prompt, clock, params)
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        statistics = Statistics(
            new_tokens=len(tokens) - clock.first_tokens + 1,
            steps=clock.puts - 2,
            seconds=clock.ended - clock.started,
            prefill_seconds=clock.started - clock.began,
        )
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(text, tokens, "length", statistics)

    def _generate(
        self, prompt: torch.Tensor, clock: _Clock, params: SamplingParams
    ) -> torch.Tensor:
        model = self.model
        config_before = model.generation_config
        model.generation_config = self._config(params)

        def generate() -> torch.Tensor:
            mask = torch.ones_like(prompt)
            output: torch.Tensor = model.generate(
                prompt, attention_mask=mask, streamer=clock, **self.options
            )
            return output

        try:
            return in_own_thread(generate)
        except (RuntimeError, ValueError) as error:
            raise QuickbeamError(f"transformers' generate failed: {error}") from error
        finally:
            model.generation_config = config_before

    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)], device=self.device)).logits
        return logits[0, -1]  # type: ignore[no-any-return]

    def _config(self, params: SamplingParams) -> GenerationConfig:
        config = GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=params.temperature > 0,
            eos_token_id=self.stops or None,
            pad_token_id=self.stops[0] if self.stops else 0,
            repetition_penalty=params.repetition_penalty,
        )
        if params.temperature > 0:
            config.temperature = params.temperature
            config.top_k = params.top_k
            config.top_p = params.top_p
            config.min_p = params.min_p or None
        return config


class _Clock:
    """A streamer, which generate gives the prompt, then the tokens of each pass, on the host."""

    def __init__(self) -> None:
        self.puts = self.first_tokens = 0
        self.began = self.started = self.ended = perf_counter()

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_tokens = value.numel()
            self.started = perf_counter()

    def end(self) -> None:
        self.ended = perf_counter()


def load(folder: str, dtype: str, device: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer as transformers loads them. Raises as `load_model` does."""
    model, tokenizer = in_own_thread(
        lambda: load_model(folder, wanted_dtype(dtype), pick_device(device))
    )
    return model.eval(), tokenizer
