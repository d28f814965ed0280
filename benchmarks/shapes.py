"""Passes on the shapes of real models, with random weights, and what llama.cpp takes for the same.

    python benchmarks/shapes.py --models Qwen3.5-0.8B,LFM2-350M --llama-bench bin/llama-bench

"over_reading" is a token's time over that of reading the weights of its pass once, as fast as all
threads together read memory. Passes and reading memory go in turn, and the median counts.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common import arguments, finish, milliseconds, pass_of, script
from model_shapes import CONFIGS
from passes import MEGABYTES
from quickbeam.config import WEIGHTS
from quickbeam.errors import QuickbeamError
from quickbeam.models.base import Batch, Chain
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.families import stack_of
from quickbeam.models.native.library import kernels
from random_gguf import write


class RandomParameters:
    """Parameters of a configuration, made as they are asked for."""

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.config, self.dtype = model.config, torch.bfloat16
        self.shapes = {name: list(one.shape) for name, one in model.state_dict().items()}
        self._some = (torch.randn(1 << 20) * 0.02).to(self.dtype)

    def __call__(self, name: str) -> torch.Tensor:
        return self.rows(name)

    def mapped(self, name: str) -> torch.Tensor:
        return self(name)

    def like(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def shape(self, name: str) -> list[int]:
        return self.shapes[name]

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        shape = self.shapes[name]
        shape = [(shape[0] if last is None else last) - first, *shape[1:]]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype)
        count = torch.Size(shape).numel()
        return self._some.repeat(-(-count // len(self._some)))[:count].view(shape)

    def release(self, layers: str, layer: int | None) -> None:
        pass


def random_model(name: str, weights: str) -> NativeModel:
    parameters, native = RandomParameters(CONFIGS[name]), kernels()
    assert native is not None, "these shapes are measured with the native kernels"
    stack = stack_of(parameters.config, parameters.dtype)
    return NativeModel(parameters, stack, native, weights=weights)


def prompt_of(model: NativeModel, tokens: int) -> Callable[[], None]:
    """Return what reads a prompt of so many tokens, as the engine does."""
    ids = [(7 * i) % model.vocab_size for i in range(tokens)]

    @torch.inference_mode()
    def run() -> None:
        cache = model.pool.new()
        for begin in range(0, tokens, model.chunk):
            part = ids[begin : begin + model.chunk]
            model.forward(Batch([Chain(cache, part)]))
            cache.commit(range(len(part)))
        cache.release()

    return run


def bytes_of_a_token(model: NativeModel) -> float:
    """Return how many bytes of weights the last pass read."""
    experts = model._compiled._compiler.experts
    return model.weight_bytes - sum(size * (of.count - of.read) for of, size in experts)


def measure(name: str, given: Namespace) -> dict[str, float]:
    model = random_model(name, given.weights)
    run, prompt = pass_of(model, 100), prompt_of(model, given.prompt)
    prompt_times = milliseconds({"prompt": prompt}, given.prompts, 1)
    memory = torch.ones(MEGABYTES * 250_000)
    works = {"memory": memory.sum, 8: lambda: run(8), 1: lambda: run(1)}
    times, read = milliseconds(works, given.repeats), bytes_of_a_token(model)
    return {
        "megabytes": read / 1e6,
        "token_ms": times[1],
        "over_reading": times[1] / read / (times["memory"] / memory.nbytes),
        "eight_over_one": times[8] / times[1],
        "prompt_tokens_per_second": 1000 * given.prompt / prompt_times["prompt"],
    }


def llama_cpp(name: str, given: Namespace) -> dict[str, float]:
    """Return the same of llama.cpp: a token's milliseconds, and tokens of a prompt a second."""
    parameters = RandomParameters(CONFIGS[name])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write(path, parameters.config, parameters.shapes, given.weights)
        options = f"-p {given.prompt} -n 32 -t {torch.get_num_threads()} -r 3 -o json"
        command = [*shlex.split(given.llama_bench), "-m", str(path), *options.split()]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise QuickbeamError(f"{given.llama_bench} failed: {lines[-1]}")
    prompt, tokens = (one["avg_ts"] for one in json.loads(done.stdout))
    return {"llama_token_ms": 1000 / tokens, "llama_prompt_tokens_per_second": prompt}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(list(CONFIGS)[:5]), help=", ".join(CONFIGS))
    parser.add_argument("--weights", default="bfloat16", choices=WEIGHTS)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--prompts", type=int, default=3, help="how often it is read")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--llama-bench", help="llama.cpp's binary, and options of its own")
    given = parser.parse_args()
    figures = dict[str, dict[str, float]]()
    for name in given.models.split(","):
        figures[name] = measure(name, given)
        if given.llama_bench:
            figures[name] |= llama_cpp(name, given)
    rows = [
        {"shape": name, **{key: f"{value:.2f}" for key, value in one.items()}}
        for name, one in figures.items()
    ]
    finish(given, rows, shapes=figures)


if __name__ == "__main__":
    script(main)
