"""How long a short prompt waits for its first piece while a server reads a long one.

python benchmarks/first_byte.py --tokens 4000 --rounds 3 --serve "--method ar"
"""

from __future__ import annotations

import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from common import arguments, finish, script
from servers import ServerProcess

SHORT = "Name three colours."
SENTENCE = "The quick brown fox jumps over the lazy dog near the quiet river bank. "


def main() -> None:
    parser = arguments(__doc__, max_tokens=8, raw=True)
    parser.add_argument("--tokens", type=int, default=4000, help="of the long prompt, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="options of quickbeam serve")
    given = parser.parse_args()
    long, times = SENTENCE * (given.tokens // 15), dict[str, list[float]]()
    command = [sys.executable, "-m", "quickbeam", "serve", "--port", "{port}"]
    command += [*shlex.split(given.serve), "--no-share-prefixes"]
    with ServerProcess("quickbeam", shlex.join(command)) as server, ThreadPoolExecutor(1) as beside:

        def ask(name: str, prompt: str) -> None:
            times.setdefault(name, []).append(1000 * server.ask(prompt, given).first)

        server.ask(SHORT, given)
        for _ in range(given.rounds):
            ask("short", SHORT)
            ask("long", long)
            other = beside.submit(ask, "long, beside the short one", long)
            time.sleep(0.3)  # by now the server reads the long prompt
            ask("short, beside the long one", SHORT)
            other.result()
    rows = [{"prompt": name, "first piece ms": f"{median(ms):.0f}"} for name, ms in times.items()]
    finish(given, rows, milliseconds=times)


if __name__ == "__main__":
    script(main)
