"""Times llama.cpp: reads contexts from standard input, one a line, and writes the milliseconds of
one token behind each.

Run by `llama_cpp.py`, in an interpreter that may not have quickbeam: imports nothing of it.
"""

from __future__ import annotations

import json
import random
import sys
from time import perf_counter


def main() -> None:
    settings = json.loads(sys.argv[1])
    del sys.path[0]  # the folder of this file, where names mean other things
    from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]

    draw = random.Random(0)
    sessions = {}
    # each with a cache of its own; the file's weights are shared
    for context in settings["contexts"]:
        threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
        session = Llama(settings["model"], n_ctx=context + 64, verbose=False, **threads)
        session.eval([draw.randrange(session.n_vocab()) for _ in range(context)])
        sessions[context] = session
    print("ready", flush=True)
    for line in sys.stdin:
        context = int(line)
        session = sessions[context]
        session.n_tokens = context  # the token timed before is forgotten
        start = perf_counter()
        session.eval([7])
        print((perf_counter() - start) * 1e3, flush=True)


if __name__ == "__main__":
    main()
