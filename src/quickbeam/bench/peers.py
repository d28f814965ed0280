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
        self.device, self.raw = str(self.model.device), raw or self.tokenizer.chat_template is None
        # the ids that end our answers
        self.stops = sorted(model_eos_ids(self.model, self.tokenizer))

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self.raw:
            text = "\n\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        given = {"add_generation_prompt": True, "return_dict": False}
        return list(self.tokenizer.apply_chat_template(list(messages), **given))

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Completion:
        """Continue the ids. Of what the pass over the prompt emits, statistics count one token."""
        if params.seed is not None:
            torch.manual_seed(params.seed)
        model, clock = self.model, _Clock()
        prompt = torch.tensor([list(ids)], device=self.device)
        own, model.generation_config = model.generation_config, self._config(params)
        more = {"attention_mask": torch.ones_like(prompt), "streamer": clock, **self.options}
        try:
            output = in_own_thread(lambda: model.generate(prompt, **more))
        except (RuntimeError, ValueError) as error:
            raise QuickbeamError(f"transformers' generate failed: {error}") from error
        finally:
            model.generation_config = own
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        counted = len(tokens) - clock.first_tokens + 1
        seconds, prefill = clock.ended - clock.started, clock.started - clock.began
        statistics = Statistics(counted, clock.puts - 2, seconds, prefill)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(text, tokens, "length", statistics)

    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)], device=self.device)).logits
        return logits[0, -1]  # type: ignore[no-any-return]

    def _config(self, params: SamplingParams) -> GenerationConfig:
        options: dict[str, Any] = {"max_new_tokens": params.max_tokens, "do_sample": False}
        options |= {"eos_token_id": self.stops or None, "pad_token_id": (*self.stops, 0)[0]}
        if params.temperature > 0:
            options |= {"do_sample": True, "temperature": params.temperature}
            options |= {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p or None}
        options |= {"repetition_penalty": params.repetition_penalty}
        return GenerationConfig(**options)


class _Clock:
    """A streamer, which generate gives the prompt, then the tokens of each pass, on the host."""

    def __init__(self) -> None:
        self.puts = self.first_tokens = 0
        self.began = self.started = self.ended = perf_counter()

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_tokens, self.started = value.numel(), perf_counter()

    def end(self) -> None:
        self.ended = perf_counter()


def load(folder: str, dtype: str, device: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer as transformers loads them. Raises as `load_model` does."""
    model, tokenizer = in_own_thread(
        lambda: load_model(folder, wanted_dtype(dtype), pick_device(device))
    )
    return model.eval(), tokenizer
