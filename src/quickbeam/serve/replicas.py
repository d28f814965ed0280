"""What a deployment on Ray Serve consists of: a front that checks requests, and replicas.

Ray's proxy hands an HTTP request on before its body is there. So the front reads the body, and
`PrefixRouter` sends the request to the replica that keeps the conversation's prefix.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Hashable
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from quickbeam.config import ServerOptions
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve import errors
from quickbeam.serve.actors import reason_of
from quickbeam.serve.admission import SOON, TENANT, Unavailable
from quickbeam.serve.affinity import conversation_key, ranked
from quickbeam.serve.app import checks, create_app
from quickbeam.serve.metrics import ReplicaMetrics, expose
from quickbeam.serve.runner import Runner
from quickbeam.serve.server import prepare

# of a request, for the replica that answers it
SCOPE_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme"),
    *("path", "raw_path", "query_string", "root_path", "headers"),
)
METRICS_TIMEOUT = 5.0  # seconds
logger = logging.getLogger(__name__)


class Replica:
    """An engine with its server's application, without the checks of access."""

    def __init__(self, options: dict[str, Any], server: ServerOptions) -> None:
        self.runner = Runner(server)
        self.runner.attach(*prepare(lambda: LLM(**options)))
        self._app = create_app(self.runner, checked=False)

    async def respond(
        self, scope: Scope, body: bytes, tenant: Hashable
    ) -> AsyncIterator[list[Message]]:
        """Yield ASGI's messages of the response to a request, those at a time that are ready.

        `body`: the whole body of the request. `tenant`: whose it is.
        """
        ready = list[Message]()
        changed = asyncio.Event()

        async def send(message: Message) -> None:
            ready.append(message)
            changed.set()

        answering = asyncio.create_task(self._answer(scope, body, tenant, send))
        answering.add_done_callback(lambda task: changed.set())
        try:
            while ready or not answering.done():
                await changed.wait()
                changed.clear()
                messages = ready.copy()
                ready.clear()
                if messages:
                    yield messages
            answering.result()  # raises what it raised
        finally:
            answering.cancel()  # where the client has left

    async def _answer(self, scope: Scope, body: bytes, tenant: Hashable, send: Send) -> None:
        TENANT.set(tenant)
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:  # that the client leaves is told by cancelling
                await asyncio.Event().wait()
            return unread.pop()

        await self._app(scope, receive, send)

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Return the replica's name, and what its registry of metrics collects."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, await asyncio.to_thread(list, self.runner.metrics.registry.collect())

    def check_health(self) -> None:
        """Raise if requests are not answered; Ray then replaces the replica."""
        unhealthy_reason = self.runner.unhealthy_reason
        if unhealthy_reason is not None:
            raise QuickbeamError(unhealthy_reason)

    async def __del__(self) -> None:
        """End all answers and the engine. Ray calls this when the replica is to go."""
        await self.runner.close()


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a conversation's requests to one replica, unless that is busy.

    Of the replicas that are not busy, the first in the conversation's rendezvous order is taken. A
    replica that has as many requests as it can run at a time is busy. Where all are busy, and for
    requests that belong to no conversation, the one with the fewest requests is taken.
    """

    def initialize_state(self, max_running: int) -> None:
        """Set how many requests a replica runs at a time."""
        self._max_running = max_running

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, in groups of which an earlier one is preferred."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all are full
        conversation = pending_request.metadata.session_id
        key = conversation or pending_request.metadata.internal_request_id
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        in_order = [by_name[name] for name in ranked(key, by_name)]
        if not conversation:
            return [in_order]
        return [*([replica] for replica in in_order if not self._is_busy(replica)), in_order]

    def _is_busy(self, replica: RunningReplica) -> bool:
        requests = self.replica_queue_len_cache.get(replica.replica_id)
        return requests is not None and requests >= self._max_running


class Front:
    """Checks requests, and has each answered by a replica. `/metrics` are those of all."""

    def __init__(self, replicas: DeploymentHandle[Any], options: ServerOptions) -> None:
        self._replicas = replicas
        self._options = options

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application. Ray calls this once the front is made."""
        routes = [Route("/metrics", self.metrics), Mount("/", self.forward)]
        return Starlette(routes=routes, middleware=checks(self._options))

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by a replica.

        Where a replica dies before it has begun to respond, another one is asked.
        """
        begun = False

        async def send_on(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            body = await Request(scope, receive).body()
            try:
                await self._ask(scope, body, send_on)
            except RayActorError:
                if begun:
                    raise
                await self._ask(scope, body, send_on)
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:
                raise
            if isinstance(error, RayError | RayServeException):
                logger.warning("a replica failed: %s", reason_of(error))
                error = Unavailable("the replica that was asked has failed: ask again", SOON)
            await errors.response(error, scope)(scope, receive, send)

    async def _ask(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send what a replica responds."""
        tenant = TENANT.get()
        handle = self._replicas.options(session_id=conversation_key(tenant, body), stream=True)
        fields = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        async for messages in handle.respond.remote(fields, body, tenant):
            for message in messages:
                await send(message)

    async def metrics(self, http: Request) -> Response:
        """Return the metrics of all replicas that give them in time."""
        broadcast = self._replicas.broadcast("metrics")
        results = await broadcast.results_async(timeout_s=METRICS_TIMEOUT, return_exceptions=True)
        given = [result for result in results if not isinstance(result, BaseException)]
        accept = http.headers.get("accept", "")
        content, kind = await asyncio.to_thread(expose, ReplicaMetrics(dict(given)), accept)
        return Response(content, media_type=kind)
