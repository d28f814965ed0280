"""What tests of a running server share: a client without a socket, steps that can be held, waiting
for what comes about by itself."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from quickbeam import SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.serve.runner import Job, Runner
from quickbeam.serve.server import config, listen
from serving import client

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@asynccontextmanager
async def served(llm, **settings):
    """A runner, and a client of its application. The model may be used again afterwards."""
    runner = Runner(ServerOptions(**settings), llm)
    try:
        async with client(runner) as web:
            yield runner, web
    finally:
        await runner.close()


class Brake:
    """Holds an engine's steps: `waits` is set as one begins, `release` lets some or all go."""

    def __init__(self):
        self.waits, self._go, self._open = threading.Event(), threading.Semaphore(0), False

    def hold(self):
        if not self._open:
            self.waits.set()
            self._go.acquire()

    def release(self, steps=None):
        self._open = self._open or steps is None
        self._go.release(steps or 1000)


@contextmanager
def braked(engine):
    brake, step = Brake(), engine.step

    def held():
        brake.hold()
        step()

    engine.step = held
    try:
        yield brake
    finally:
        brake.release()
        del engine.step


async def until(condition):
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def job(llm, text="hello", params=LONG, **more):
    return Job(list(llm.tokenizer(text)["input_ids"]), params, **more)


async def begun(runner, *jobs):
    with runner.gate.enter(10, len(jobs)) as ticket:
        return await runner.begin(jobs, ticket)


def idle(runner):
    gate, engine = runner.gate, runner.llm.engine
    places = (gate.inside, gate.waiting, gate.waiting_tokens)
    sequences = (*engine.scheduler.active, *engine.scheduler.waiting)
    return not any(places) and not sequences and not engine.busy


def serving(runner):
    return in_thread(config(runner))


@contextmanager
def in_thread(settings):
    """The address and the event loop of a server on a free port of this machine."""
    listener, server = listen("127.0.0.1", 0), uvicorn.Server(settings)
    loop = asyncio.new_event_loop()

    def run():  # all of it in the thread: whoever waits for it may have a loop of its own
        loop.run_until_complete(server.serve([listener]))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", loop
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
