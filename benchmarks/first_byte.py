"""How long a short prompt waits for its first byte while a server reads a long one.

python benchmarks/first_byte.py [--tokens 4000] [--rounds 3] [--serve "--model MODEL --method ar"]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import threading
import time
from urllib.request import Request, urlopen

from quickbeam.bench.servers import Serving, ourselves

SHORT = "Name three colours."
SENTENCE = "The quick brown fox jumps over the lazy dog near the quiet river bank. "


def first_byte(server: Serving, prompt: str, seconds: list[float]) -> None:
    """Ask for a few tokens, and add the seconds until the first of them came."""
    body = json.dumps(
        {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    ).encode()
    began = time.perf_counter()
    with urlopen(
        Request(f"{server.base}/completions", body, {"Content-Type": "application/json"})
    ) as response:
        found = None
        for line in response:
            if found is None and line.startswith(b"data: {"):
                found = time.perf_counter() - began
    assert found is not None
    seconds.append(found)


def main() -> None:
    """Print both times, alone and side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="options of quickbeam serve")
    told = parser.parse_args()
    long = SENTENCE * (told.tokens // 15)
    with Serving(ourselves([*shlex.split(told.serve), "--no-share-prefixes"])) as server:
        times: dict[str, list[float]] = {
            "short": [],
            "long": [],
            "short beside": [],
            "long beside": [],
        }
        first_byte(server, SHORT, [])
        for _ in range(told.rounds):
            first_byte(server, SHORT, times["short"])
            first_byte(server, long, times["long"])
            other = threading.Thread(target=first_byte, args=(server, long, times["long beside"]))
            other.start()
            time.sleep(0.3)  # by now the server reads the long prompt
            first_byte(server, SHORT, times["short beside"])
            other.join()
    for name, found in times.items():
        print(
            f"{name:>13}: {statistics.median(found) * 1000:7.0f} ms to the first byte (median of "
            f"{len(found)})"
        )


if __name__ == "__main__":
    main()
