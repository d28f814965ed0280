"""Files of requests, answered by what stands in for a model. Imported by programs that are killed,
so nothing heavy is in here."""

import asyncio
import json
import os
import random
import signal
from pathlib import Path

from quickbeam.batch.journal import Journal
from quickbeam.batch.run import Reply, check, read, run


async def echo(url, body):
    """An answer that is the request's own, after a moment of any length."""
    await asyncio.sleep(random.random() / 500)
    return Reply(200, {"url": url, "echo": body})


def lines(path, requests):
    path.write_text(
        "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in requests)
    )
    return path


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def go(source, output, answer=echo, window=4):
    """Requests in the file, and those answered now."""
    answered = []
    with Journal(output) as journal:
        total = len(check(source, journal))
        asyncio.run(run(read(source), answer, journal, window, lambda: answered.append(None)))
    return total, len(answered)


def killed(source, output, writes, part):
    """As `go`, but this process is killed after so many writes and a part of another, in bytes."""
    write, left = os.write, writes

    def counted(file, data):
        nonlocal left
        if not left:
            write(file, data[:part])
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return write(file, data)

    os.write = counted
    go(Path(source), Path(output))
