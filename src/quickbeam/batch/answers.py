"""Answer requests with a model in this process: the server's endpoints without HTTP."""

from __future__ import annotations

from typing import Any

from quickbeam.batch.run import Answer, Reply
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve import endpoints
from quickbeam.serve.errors import problem
from quickbeam.serve.runner import Runner
from quickbeam.serve.settings import ServeSettings

NEVER = 10**9  # seconds


class Answering:
    """Answers every request in its turn, without limits on how many wait.

    The caller decides how many requests it sends at a time. An instance belongs to one event loop.
    As a context manager it gives `answer`, and ends the answers under way. `name` is what responses
    call the model.
    """

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        unbounded = ServeSettings(
            served_name=name, max_waiting=2**40, max_waiting_tokens=2**40, queue_timeout=NEVER
        )
        self._runner = Runner(unbounded, llm)

    async def answer(self, url: str, body: dict[str, Any]) -> Reply:
        """Return the endpoint's reply, which is an error for a request that can't be answered.

        Raises `QuickbeamError` if the engine can't answer any more.
        """
        try:
            return Reply(200, await endpoints.answer(self._runner, url, body))
        except Exception as error:
            if (unhealthy_reason := self._runner.unhealthy_reason) is not None:
                raise QuickbeamError(f"no more answers: {unhealthy_reason}") from error
            about = problem(error)
            return Reply(about.status, about.body)

    async def __aenter__(self) -> Answer:
        return self.answer

    async def __aexit__(self, *_: object) -> None:
        await self._runner.close()
