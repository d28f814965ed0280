"""The endpoints `/v1/models`, `/tokenize`, `/detokenize` and `/version`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quickbeam import __version__
from quickbeam.errors import InvalidInput
from quickbeam.serve.bodies import read
from quickbeam.serve.convert import check_model, check_size, encode_conversation, field_of, size_of
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import TokenizeChat
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import Detokenize, TokenizeText
from quickbeam.serve.tool_formats import tool_format

router = APIRouter()


@router.get("/v1/models")
def models(http: Request) -> dict[str, Any]:
    """List the model under each of its names."""
    runner: Runner = http.app.state.runner
    return {
        "object": "list",
        "data": [_model(runner, name) for name in (runner.name, *runner.settings.aliases)],
    }


@router.get("/v1/models/{name:path}")
def model(name: str, http: Request) -> dict[str, Any]:
    """Describe the model, given one of its names."""
    runner: Runner = http.app.state.runner
    check_model(runner, name)
    return _model(runner, name)


def _model(runner: Runner, name: str) -> dict[str, Any]:
    """Return OpenAI's model object.

    It also has vLLM's `root` and `max_model_len`, and the methods that `speculation` may name.
    """
    llm = runner.loaded
    return {
        "id": name,
        "object": "model",
        "created": runner.started,
        "owned_by": "quickbeam",
        "root": runner.name,
        "max_model_len": llm.room(0),
        "quickbeam": {"methods": llm.methods, "default_method": llm.method},
    }


@router.get("/version")
def version() -> dict[str, str]:
    """Return quickbeam's version."""
    return {"version": __version__}


async def tokenize(http: Request) -> Response:
    """Return the tokens of a text, or of the prompt of a conversation (by the chat template)."""
    runner: Runner = http.app.state.runner
    request = await read(http, TokenizeText | TokenizeChat)
    check_model(runner, request.model)
    try:
        ids = await asyncio.to_thread(_tokens, runner, request)
    except Refused:
        raise
    except InvalidInput as error:
        raise Refused(str(error), field_of(str(error), type(request).model_fields)) from error
    strings = request.return_token_strs
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": runner.llm.room(0),
            "tokens": ids,
            "token_strs": runner.llm.tokenizer.convert_ids_to_tokens(ids) if strings else None,
        }
    )


def _tokens(runner: Runner, request: TokenizeText | TokenizeChat) -> list[int]:
    tokenizer = runner.llm.tokenizer
    if isinstance(request, TokenizeText):
        check_size(runner.llm, len(request.prompt), "prompt")
        return list(
            tokenizer(request.prompt, add_special_tokens=request.add_special_tokens is not False)[
                "input_ids"
            ]
        )
    if request.tools:
        tool_format(tokenizer)  # raises if the chat template doesn't take tools
    check_size(runner.llm, size_of(request.messages), "messages")
    return encode_conversation(runner.llm, request, request.tools)


async def detokenize(http: Request) -> Response:
    """Return the text of tokens, special ones included."""
    runner: Runner = http.app.state.runner
    request = await read(http, Detokenize)
    check_model(runner, request.model)
    size = runner.llm.model.vocab_size
    if outside := [token for token in request.tokens if not 0 <= token < size]:
        raise Refused(
            f"tokens: {outside[0]} is not an id of this model: they go from 0 to {size - 1}",
            "tokens",
        )
    text = await asyncio.to_thread(runner.llm.tokenizer.decode, request.tokens)
    return JSONResponse({"prompt": text})
