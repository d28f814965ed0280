"""Ray actors that answer requests: replicas for `quickbeam batch`, and an actor for Ray Data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from quickbeam.batch.run import CHAT, COMPLETIONS, RESPONSES, Answer, Reply
from quickbeam.config import LLMOptions, ReplicaOptions
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve.endpoints import InProcessServer

URL_BY_FIELD = {"messages": CHAT, "input": RESPONSES, "prompt": COMPLETIONS}
RESTARTS = 10  # of a replica that dies, until the run is given up


def environment(threads: int) -> dict[str, Any]:
    """Return Ray's `runtime_env` for a replica that computes with this number of threads."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads)}}


def connect() -> None:
    """Connect to the cluster that `RAY_ADDRESS` names, or start one on this machine."""
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def reason_of(error: Exception) -> str:
    """Return the last line of an error of Ray's, which says why."""
    return str(error).strip().splitlines()[-1]


class BatchReplica(InProcessServer):
    """A model in a process of its own. `options` are arguments of `LLM`."""

    def __init__(self, name: str | None, options: dict[str, Any]) -> None:
        super().__init__(LLM(**options), name)


@asynccontextmanager
async def replicated(
    options: LLMOptions, name: str | None, replicas: ReplicaOptions
) -> AsyncIterator[Answer]:
    """Yield a function that answers with replicas, on `RAY_ADDRESS` or this machine.

    `name` is what responses call the model.

    A request goes to the replica with the fewest unanswered ones. A replica that dies is started
    again and asked again; if that doesn't help, the function raises `QuickbeamError`.
    """
    connect()
    try:
        actor_class: Any = ray.remote(BatchReplica).options(
            num_cpus=replicas.cpus,
            num_gpus=replicas.gpus,
            max_restarts=RESTARTS,
            max_task_retries=-1,
            runtime_env=environment(replicas.threads),
        )
        actors = [actor_class.remote(name, vars(options)) for _ in range(replicas.replicas)]
        unanswered = [0] * replicas.replicas

        async def answer(url: str, body: dict[str, Any]) -> Reply:
            index = unanswered.index(min(unanswered))
            unanswered[index] += 1
            try:
                reply: Reply = await actors[index].answer.remote(url, body)
                return reply
            except RayError as error:
                raise QuickbeamError(f"a replica failed: {reason_of(error)}") from error
            finally:
                unanswered[index] -= 1

        yield answer
    finally:
        ray.shutdown()


class QuickbeamActor:
    """An actor for Ray Data's `map_batches`, which answers all rows of a batch at the same time.

    `column` holds a prompt, a conversation (`messages`) or the Responses API's `input`. `params`
    are further fields of every request, `options` arguments of `LLM`. Two columns are added:
    `answer`, the text or None, and `error`, which says why there is none.
    """

    def __init__(
        self, column: str = "prompt", params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._column = column
        self._field = column if column in URL_BY_FIELD else "prompt"
        self._params = dict(params or {})
        self._loop = asyncio.new_event_loop()
        self._server = InProcessServer(LLM(**options))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of columns with the columns `answer` and `error` added."""
        replies = self._loop.run_until_complete(self._answer_all(batch[self._column]))
        answers = list[str | None]()
        errors = list[str | None]()
        for reply in replies:
            succeeded = reply.status == 200
            answers.append(_text(reply.body) if succeeded else None)
            errors.append(None if succeeded else reply.body["error"]["message"])
        return {**batch, "answer": answers, "error": errors}

    async def _answer_all(self, values: Iterable[Any]) -> list[Reply]:
        url = URL_BY_FIELD[self._field]
        bodies = [{**self._params, self._field: _json_value(value)} for value in values]
        return await asyncio.gather(*(self._server.answer(url, body) for body in bodies))


def _text(body: dict[str, Any]) -> str:
    """Return the text of a response, from its first choice if it has several."""
    if "output" in body:
        messages = [item for item in body["output"] if item["type"] == "message"]
        return "".join(part["text"] for message in messages for part in message["content"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def _json_value(value: Any) -> Any:
    """Return a column's value in the types of JSON; its lists and dictionaries may be arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    return value
