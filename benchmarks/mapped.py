"""Passes and answers with weights that are read from disk, or mapped by the system (`mmap`).

    systemd-run --scope -p MemoryMax=1600M python benchmarks/mapped.py --model BIG --memory 1400MB
    systemd-run --scope -p MemoryMax=1600M python benchmarks/mapped.py --model BIG

Without --memory the packed weights are mapped, and the system reads the pages that a pass needs.
The file of packed weights is made by a first load, which needs the memory for all of them.
"""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from common import arguments, finish, load, script
from quickbeam import LLM, SamplingParams
from quickbeam.models.weights import packed_file

WIDTHS = (16, 64, 256)  # rows of a pass
PASSES = 3


def map_plainly(path: Path) -> torch.Tensor:
    """Return a file's bytes, mapped, of which none is read before it is used."""
    with open(path, "rb") as file:
        return torch.frombuffer(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
        )


def random_ids(llm: LLM, count: int) -> list[int]:
    return [random.randrange(llm.model.vocab_size) for _ in range(count)]


def main() -> None:
    given = arguments(__doc__, max_tokens=24).parse_args()
    random.seed(given.seed)
    with patch.object(packed_file, "map_file", map_plainly):
        llm = load(given, "ar", share_prefixes=False, kv_memory="200MB")
    seconds = dict[str, float]()  # of a pass
    rows = list[dict[str, object]]()
    first_token = SamplingParams(max_tokens=1, ignore_eos=True)
    for width in WIDTHS:
        passes = [llm.generate(random_ids(llm, width), first_token) for _ in range(PASSES)]
        median_pass = median(answer.statistics.prefill_seconds for answer in passes)
        seconds[f"{width} rows"] = median_pass
        rows.append({"pass": f"{width} rows", "seconds": f"{median_pass:.3f}", "tokens/s": ""})
    # sampled tokens are routed to other experts each time, as those of a text are
    sampled = SamplingParams(given.max_tokens, temperature=1, seed=given.seed, ignore_eos=True)
    greedy = SamplingParams(given.max_tokens, ignore_eos=True)
    for method, params in (("ar", sampled), ("recycling", greedy)):
        answer = llm.generate(random_ids(llm, 4), params, method=method, budget=64)
        figures = answer.statistics
        seconds[method] = figures.seconds / figures.steps
        rows.append(
            {
                "pass": method,
                "seconds": f"{seconds[method]:.3f}",
                "tokens/s": f"{figures.tokens_per_second:.2f}",
            }
        )
    streamed = llm.model.streamed
    print("weights are mapped" if streamed is None else streamed.in_words)
    finish(given, rows, model=llm.name, seconds=seconds)


if __name__ == "__main__":
    script(main)
