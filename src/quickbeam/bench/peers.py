"""Other ways of decoding the same model, as methods: transformers' own generate."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

from quickbeam.bench.base import Answer, Message, Runner
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams
from quickbeam.target.loading import eos_ids, load_model, parse_dtype, pick_device

PROMPT_LOOKUP_TOKENS = 10  # the value transformers' documentation uses


class Loaded:
    """A model and its tokenizer as transformers loads them, shared by the peers that run on it.

    Raises as `load_model` does.
    """

    def __init__(self, model: str, dtype: str, device: str | None) -> None:
        place = pick_device(device)
        loaded, tokenizer = load_model(model, parse_dtype(dtype), place)
        self.model: Any = loaded.eval()
        self.tokenizer: Any = tokenizer
        self.device = str(place)


class Peer(Runner):
    """transformers' generate, as a method of the benchmark.

    Its kinds are `hf` (plain), `hf-pld` (prompt lookup) and `hf-assisted` (with `drafter` as
    assistant model). Only the distribution of the output is set to ours: temperature, filters and
    the repetition penalty. None of the checkpoint's own generation settings are used. All else is
    as transformers has it. Raises `InvalidInput` for another kind, and for `hf-assisted` without a
    drafter.
    """

    def __init__(self, kind: str, loaded: Loaded, drafter: Loaded | None = None) -> None:
        self.loaded = loaded
        self.device = loaded.device
        self.options: dict[str, Any] = {}
        if kind == "hf-pld":
            self.options = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        elif kind == "hf-assisted" and drafter is not None:
            self.options = {"assistant_model": drafter.model}
            if drafter.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
                self.options |= {
                    "tokenizer": loaded.tokenizer,
                    "assistant_tokenizer": drafter.tokenizer,
                }
        elif kind != "hf":
            raise InvalidInput(
                f"{kind!r}: not a way of transformers to decode here; known: hf, "
                "hf-pld, hf-assisted (with a drafter)"
            )
        self.stops = sorted(eos_ids(loaded.model, loaded.tokenizer))  # the ids that end our answers

    def encode(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if tokenizer.chat_template is None:
            return list(
                tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
            )
        return list(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
        )

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        if params.seed is not None:
            torch.manual_seed(params.seed)
        model, prompt, clock = (
            self.loaded.model,
            torch.tensor([list(ids)], device=self.device),
            _Clock(),
        )
        config = _generation_config(params, self.stops)
        own, model.generation_config = model.generation_config, config
        hook = model.register_forward_hook(clock.count_pass)
        try:
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **self.options
            )
        except (RuntimeError, ValueError) as error:
            raise QuickbeamError(f"transformers' generate failed: {error}") from error
        finally:
            hook.remove()
            model.generation_config = own
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        text: str = self.loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(
            tokens,
            text,
            len(tokens) - clock.first_tokens,
            clock.passes - 1,
            clock.ended - clock.started,
        )

    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.loaded.model(
                torch.tensor([list(ids)], device=self.device)
            ).logits[0, -1]
        return logits


class _Clock:
    """A streamer for generate that takes the time of decoding.

    generate gives it the prompt, then the tokens of each pass. They are on the host, so the device
    has finished by then.

    The pass over the prompt may emit several tokens, where it checks a draft too. The clock starts
    after that pass, so these tokens are not counted.
    """

    def __init__(self) -> None:
        self.puts = self.passes = self.first_tokens = 0
        self.started = self.ended = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_tokens = value.numel()
            self.started = perf_counter()

    def end(self) -> None:
        self.ended = perf_counter()

    def count_pass(self, *_: object) -> None:
        self.passes += 1


def _generation_config(params: SamplingParams, stops: list[int]) -> GenerationConfig:
    options: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "eos_token_id": stops or None,
        "pad_token_id": stops[0] if stops else 0,
    }
    if params.temperature > 0:
        options |= {
            "do_sample": True,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }
        options |= {"min_p": params.min_p} if params.min_p else {}
    else:
        options |= {"do_sample": False}
    if params.repetition_penalty != 1:
        options["repetition_penalty"] = params.repetition_penalty
    return GenerationConfig(**options)
