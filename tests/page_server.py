"""A stand-in for the server behind the page: answers are scripted by the prompt's first word, in
the format of the real ones.

`python tests/page_server.py PORT` runs it for a look by hand.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from quickbeam.serve.app import page
from running import in_thread

CHROMIUM = Path("/usr/bin/chromium")
SWITCHES = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"]
SWITCHES += ["disable-background-networking", "disable-component-update", "disable-sync"]
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
ANSWERS = {
    "evil": [EVIL, " and", " ", EVIL, " again", "</span>", " &amp;", " &lt;b>"],
    # fences that tokens cut through, and what is none
    "code": [
        *("Here", " it", " is", ":\n\n", "``", "`", "python", "\n", "def", " add", "(a", ",", " b"),
        *("):\n", "   ", " return", " a", " +", " b", "\n```", "\n\n", "Call", " `", "add", "`:\n"),
        *("~~~~\n", "add", "(1,", " 2)", "  ~~~~\n", "~~~\n", "~", "~~~", "\n", "```", " is", " a"),
        *(" fence", "`.\n", "  ```", "sh\n", "\tls", "\n"),  # and one that nothing closes
    ],
    "cut": ["A", " tree", " \ufffd", "\ufffd", " of", " rowan", "."],  # two tokens of one character
}
TEXTS = {"cut": "A tree 🌳 of rowan."}
TEXT = (
    "The rowan is a small tree . It stands on hills , and its red berries feed the birds all "
    "winter . The rowan is"
)
DEFAULT = TEXT.split(" ")
SOURCES = ("drafter", "ngram", "last_logits", "grammar")


def words(prompt):
    return ANSWERS.get(prompt.split()[0], [DEFAULT[0], *(f" {word}" for word in DEFAULT[1:])])


def steps_of(tokens, method, sources=SOURCES):
    """Steps that emit these tokens after the first, 1, 3, 2, … at a time, with rejected ones."""
    steps, at = [], 1
    while at < len(tokens):
        size = 1 if method == "ar" else min((1, 3, 2, 4)[len(steps) % 4], len(tokens) - at)
        nodes = [node(tokens[at - 1], -1, 0, "root", 1.0, True)]
        for i in range(size - 1):
            source = sources[(len(steps) + i) % 4]
            nodes.append(node(tokens[at + i], i, i + 1, source, 0.8**i, True))
        for i in range(0 if method == "ar" else 3):
            above = min(i, size - 1)
            nodes.append(node(f" wrong{i}", above, above + 1, sources[i], 0.3 / (i + 1), False))
        seconds = 0.05 if method == "ar" else 0.06
        step = {"nodes": nodes, "next": token(tokens[at + size - 1]), "emitted": size}
        steps.append(step | {"draft_seconds": 0.01, "verify_seconds": 0.03, "seconds": seconds})
        at += size
    return steps


def token(text):
    return {"token": sum(text.encode()) + 1000 * len(text), "text": text}


def node(text, parent, depth, source, value, accepted):
    own = dict(parent=parent, depth=depth, source=source, value=value, accepted=accepted)
    return token(text) | own


class Stand:
    """The application, what it was asked, and how many streams are open."""

    def __init__(self):
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.open = 0
        self.busy = 0  # how many requests are refused before one is taken
        routes = [
            Route("/", self.page),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=[Mount("/some/prefix", routes=routes), *routes])

    async def page(self, request):
        html, policy = page()
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy})

    async def models(self, request):
        self.paths.append(request.url.path)
        methods = {"methods": ["ar", "auto", "logitspec", "future"], "default_method": "auto"}
        model = {"id": "rowan-135m", "object": "model", "quickbeam": methods, "max_model_len": 8192}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request):
        self.paths.append(request.url.path)
        body = await request.json()
        self.asked.append(body | {"authorization": request.headers.get("authorization")})
        content = body["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else content[-1]["text"]
        if "objekt" in json.dumps(body.get("response_format")):
            return refuse(400, "json_schema: Invalid type: objekt", param="response_format")
        if not body.get("stream"):  # the page asks whether a schema is taken
            return JSONResponse({"choices": []})
        if prompt.startswith("9,000 words"):
            about = {"code": "context_length_exceeded", "param": prompt.split()[-1]}
            return refuse(400, "This model's maximum context length is 8192 tokens", **about)
        if prompt.startswith("locked") and request.headers.get("authorization") != "Bearer rowan":
            return refuse(401, "give the API key as Authorization: Bearer KEY")
        if prompt.startswith("bad"):
            return refuse(400, f"temperature={EVIL}: must be 0 or more", param="temperature")
        if prompt.startswith("half a"):
            message = "messages[0].content: must be whole characters"
            return refuse(400, message, param="messages[0].content")
        if prompt.startswith("odd"):
            return refuse(400, f"the template refuses this: {EVIL}")
        if prompt.startswith("full") and self.busy > 0:
            self.busy -= 1
            return refuse(429, "64 requests wait already", headers={"Retry-After": "7"})
        return StreamingResponse(self.events(prompt, body), media_type="text/event-stream")

    async def events(self, prompt, body):
        method = body.get("speculation", {}).get("method", "auto")
        tokens = words(prompt)
        if prompt.startswith("differs") and method == "ar":
            tokens = [*tokens[:4], " oak", *tokens[5:]]
        if prompt.startswith(("endless", "lengthy")):
            tokens = tokens * (500 if prompt.startswith("endless") else 30)
        self.open += 1
        try:
            async for event in script(prompt, tokens, method):
                yield event
                await asyncio.sleep(0.02 if prompt.startswith("endless") else 0.002)
        finally:
            self.open -= 1


async def script(prompt, tokens, method):
    yield ": keep-alive\r\n\r\n"
    yield event(delta={"role": "assistant"})
    text = TEXTS.get(prompt.split()[0], "".join(tokens))
    at = len(tokens[0])
    yield event(delta={"content": text[:at]})
    steps = steps_of(tokens, method, (EVIL,) * 4 if prompt.startswith("evil") else SOURCES)
    for number, step in enumerate(steps, 1):
        read = sum(s["emitted"] for s in steps[:number])
        end = len(text if number == len(steps) else "".join(tokens[: read + 1]))
        end = min(end, len(text))
        yield event(delta={"content": text[at:end]}, quickbeam={"steps": [step], "method": method})
        at = end
        if prompt.startswith("breaks") and number == 2:
            return
        if prompt.startswith("fails") and number == 2:
            yield sent({"error": {"message": "the logits are not finite", "type": "server_error"}})
            return
    yield event(delta={}, finish_reason="stop")
    yield sent({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(tokens)}})
    yield "data: [DONE]\r\n\r\n"


def sent(value):
    return f"data: {json.dumps(value)}\r\n\r\n"


def event(delta, finish_reason=None, **more):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return sent({"object": "chat.completion.chunk", "choices": [choice]} | more)


def refuse(status, message, param=None, code=None, headers=None):
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


def serving(app):
    how = {"log_level": "error", "ws": "none", "lifespan": "on", "timeout_graceful_shutdown": 1}
    return in_thread(uvicorn.Config(app, **how))


def chromium(playwright):
    return playwright.chromium.launch(
        executable_path=str(CHROMIUM), args=[f"--{switch}" for switch in SWITCHES]
    )


if __name__ == "__main__":
    uvicorn.run(Stand().app, port=int(sys.argv[1]))
