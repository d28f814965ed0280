"""Time llama.cpp, as the process that `llama_cpp.py` starts.

Reads contexts from standard input, one a line, and writes the milliseconds of one token after each.
The interpreter may not have quickbeam, so this file imports nothing of it.
"""

from __future__ import annotations

import json
import random
import sys
from time import perf_counter


def main() -> None:
    settings = json.loads(sys.argv[1])
    del sys.path[0]  # this file's folder, whose llama_cpp.py would hide the package
    from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]

    draw = random.Random(0)
    sessions = {}
    # each session has a KV cache of its own; all share the file's weights
    for context in settings["contexts"]:
        threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
        session = Llama(settings["model"], n_ctx=context + 64, verbose=False, **threads)
        session.eval([draw.randrange(session.n_vocab()) for _ in range(context)])
        sessions[context] = session
    print("ready", flush=True)
    for line in sys.stdin:
        context = int(line)
        session = sessions[context]
        session.n_tokens = context  # forget the token timed before
        start = perf_counter()
        session.eval([7])
        print((perf_counter() - start) * 1e3, flush=True)


if __name__ == "__main__":
    main()
