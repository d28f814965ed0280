"""Replicas of a model on Ray, for `quickbeam batch` and as an actor for Ray Data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from quickbeam.batch.answers import Answering
from quickbeam.batch.requests import CHAT, COMPLETIONS, RESPONSES
from quickbeam.batch.run import Answer, Reply
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM

# CPUs that Ray reserves for a replica. Its threads decide how many it really uses. A half leaves
# room for the tasks that read and write data.
CPUS = 0.5
RESTARTS = 10  # of a replica that dies, until the run is given up


def environment(threads: int) -> dict[str, Any]:
    """Return Ray's `runtime_env` for a replica that computes with this number of threads."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads)}}


class Replica:
    """A model in a process of its own. `options` are arguments of `LLM`."""

    def __init__(self, name: str | None, options: dict[str, Any]) -> None:
        self._answering = Answering(LLM(**options), name)

    async def answer(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and body that `Answering.answer` gives."""
        return await self._answering.answer(url, body)


@asynccontextmanager
async def replicas(
    count: int, name: str | None, options: dict[str, Any], threads: int = 1
) -> AsyncIterator[Answer]:
    """Yield a function that answers with `count` replicas of a model.

    They run on the cluster that `RAY_ADDRESS` names, or on this machine. Each request goes to the
    replica with the fewest unanswered requests. A replica that dies is started again, and gets its
    unanswered requests again. If that doesn't help, the function raises `QuickbeamError`.
    """
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        kind: Any = ray.remote(Replica).options(
            num_cpus=CPUS,
            num_gpus=0,
            max_restarts=RESTARTS,
            max_task_retries=-1,
            runtime_env=environment(threads),
        )
        actors = [kind.remote(name, options) for _ in range(count)]
        owed = [0] * count

        async def answer(url: str, body: dict[str, Any]) -> Reply:
            least = min(range(count), key=owed.__getitem__)
            owed[least] += 1
            try:
                return Reply(*await actors[least].answer.remote(url, body))
            except RayError as error:
                raise QuickbeamError(
                    f"a replica failed: {str(error).strip().splitlines()[-1]}"
                ) from error
            finally:
                owed[least] -= 1

        yield answer
    finally:
        ray.shutdown()


class QuickbeamActor:
    """An actor for Ray Data's `map_batches`, which answers all rows of a batch at the same time.

    A row is a request. Its `column` holds a prompt, a conversation (`column="messages"`) or the
    input of the Responses API (`column="input"`). `params` are further fields of every request. Two
    columns are added: `answer` is the text (None if there is none), and `error` says why there is
    none. `options` are arguments of `LLM`.
    """

    def __init__(
        self, column: str = "prompt", params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._column, self._params = column, dict(params or {})
        field = column if column in ("messages", "input") else "prompt"
        self._field, self._url = (
            field,
            {"messages": CHAT, "input": RESPONSES, "prompt": COMPLETIONS}[field],
        )
        self._loop = asyncio.new_event_loop()
        self._answering = Answering(LLM(**options))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of columns with the columns `answer` and `error` added."""
        replies = self._loop.run_until_complete(
            self._all([_plain(value) for value in batch[self._column]])
        )
        texts = [_text(reply.body) if reply.status == 200 else None for reply in replies]
        errors = [
            None if reply.status == 200 else reply.body["error"]["message"] for reply in replies
        ]
        return {**batch, "answer": texts, "error": errors}

    async def _all(self, values: list[Any]) -> list[Reply]:
        return await asyncio.gather(
            *(
                self._answering.answer(self._url, {**self._params, self._field: value})
                for value in values
            )
        )


def _text(body: dict[str, Any]) -> str:
    """Return the text of a response, from its first choice if it has several."""
    if "output" in body:
        return "".join(
            part["text"]
            for item in body["output"]
            if item["type"] == "message"
            for part in item["content"]
        )
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def _plain(value: Any) -> Any:
    """Return a column's value in the types of JSON; its lists and dictionaries may be arrays."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
