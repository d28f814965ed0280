"""The Python faces with many answers under way: lists, streams in any order and in threads,
asyncio."""

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cases import before, few, refuses
from quickbeam import LLM, AsyncLLM, QuickbeamError, SamplingParams
from quickbeam.config import parse_bytes
from quickbeam.engine.sequence import SequenceState
from quickbeam.grammar.spec import Grammar

PROMPTS = ["the cat sat on the mat and the cat", "one two three one two", "hello"]
PROMPTS += ["a b a b a b a b", "rain, rain, go away"]
PARAMS = SamplingParams(max_tokens=24)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)


def slow(llm, monkeypatch):
    engine = llm.engine if isinstance(llm, LLM) else llm.llm.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.01), step()))


@pytest.fixture(scope="module")
def alone(llm):
    return {prompt: llm.generate(prompt, PARAMS, method="ar").token_ids for prompt in PROMPTS}


def test_lists_are_answered_side_by_side(llm, alone):
    llm.reset()
    answers = llm.generate(PROMPTS, PARAMS, budget=4)
    assert [one.token_ids for one in answers] == [alone[prompt] for prompt in PROMPTS]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    several = [one.token_ids for one in llm.chat(chats, PARAMS)]
    assert several == [llm.chat(chat, PARAMS).token_ids for chat in chats]
    refuses("empty prompt", llm.generate, [PROMPTS[0], ""], PARAMS)
    assert not llm.engine.busy
    lengths = range(3, 3 + len(PROMPTS))
    params = [SamplingParams(max_tokens=length) for length in lengths]
    answers = [one.token_ids for one in llm.generate(PROMPTS, params)]
    assert answers == [alone[text][:length] for text, length in zip(PROMPTS, lengths, strict=True)]
    refuses("2 parameters for 5 prompts", llm.generate, PROMPTS, params[:2])


def test_several_answers_of_one_prompt(llm):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3)
    both = (llm.generate("hello", params, method="ar") for _ in range(2))
    three, again = ([one.token_ids for one in answers] for answers in both)
    first = llm.generate("hello", replace(params, n=1), method="ar")
    assert len(three) == 3 and three[0] == first.token_ids and again == three
    assert len(set(map(tuple, three))) == 3  # seeds of their own
    assert len(llm.generate(["hello", "one"], params, method="ar")) == 6


def test_streams_may_be_interleaved(llm, alone, monkeypatch):
    slow(llm, monkeypatch)
    first, second = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS, method="ar")
    dropped = llm.stream(PROMPTS[2], PARAMS)
    closed = llm.stream(PROMPTS[0], LONG, method="ar")
    pieces = {first: "", second: ""}
    for turn in range(200):
        for stream in (first, second):
            pieces[stream] += next(stream, "")
        if turn == 2:
            next(dropped, "")
            del dropped  # ends its answer
            closed.close()
    assert pieces[first] == first.completion.text and pieces[second] == second.completion.text
    assert first.completion.token_ids == alone[PROMPTS[0]]
    assert second.completion.token_ids == alone[PROMPTS[1]]
    assert closed.completion.finish_reason == "interrupted"
    pairs = zip(closed.completion.token_ids, alone[PROMPTS[0]], strict=False)
    assert all(mine == right for mine, right in pairs)
    gc.collect()
    llm.reset()
    assert llm.model.pool.used == 0 and not llm.engine.busy  # everything is given back


def test_streams_in_threads(llm, alone):
    def work(prompt, method):
        stream = llm.stream(prompt, PARAMS, method=method)
        text = "".join(stream)
        assert text == stream.completion.text
        return stream.completion.token_ids

    methods = ("ar", "pld", "logitspec", "ar", "pld")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(work, PROMPTS, methods)) == [alone[prompt] for prompt in PROMPTS]


def test_sizes_of_memory():
    sizes = {"2GB": 2 * 10**9, "512 MiB": 512 * 2**20, 1000: 1000, "1.5kb": 1500}
    assert [parse_bytes(text, "memory") for text in sizes] == list(sizes.values())
    for text in ("", "much", "-1", "0", "2 GB of", "nan", "inf"):
        refuses("memory=.*size of memory", parse_bytes, text, "memory")


@pytest.mark.parametrize("method", ("ar", "logitspec"))
def test_memory_for_keys_and_values_is_bounded(toy_folder, alone, method):
    page = LLM(toy_folder, "ar").model.pool.page_bytes
    with LLM(toy_folder, method, kv_memory=4 * page) as llm:
        answers = llm.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in answers] == [alone[prompt] for prompt in PROMPTS]
        assert llm.model.pool.used <= 4
        refuses("kv-memory", llm.generate, "hello " * 60, PARAMS)
    refuses("kv_memory", LLM, toy_folder, "ar", kv_memory=page // 2)


def test_what_ends_one_of_several_answers_is_raised(llm, monkeypatch):
    active, seen = llm.engine.scheduler.active, set[SequenceState]()

    def broken(batch):
        seen.update(active)
        if any(part.cache is bad.cache for part in batch.parts for bad in active[2:3]):
            raise RuntimeError("no such pass")

    before(monkeypatch, llm.model, "forward", broken)
    with pytest.raises(RuntimeError, match="no such pass"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True), method="ar")
    assert not llm.engine.busy and all(one.over for one in seen)


def test_what_ends_one_of_several_answers_has_the_others(llm):
    pytest.importorskip("llguidance")
    stuck = SamplingParams(grammar=Grammar.regex("[ab]{8}c"), bad_words=["c"])
    short = SamplingParams(max_tokens=3, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], short).token_ids
    with pytest.raises(QuickbeamError) as caught:
        llm.generate(PROMPTS[:2], [short, stuck], method="ar")
    first, second = caught.value.completions
    assert (first.token_ids, first.finish_reason) == (alone, "length")
    assert second.finish_reason == "error" and 0 < len(second.token_ids) <= 8


def test_asynchronous_conversations_have_the_same_answers(llm):
    messages = [{"role": "user", "content": PROMPTS[0]}]
    expected = llm.chat(messages, PARAMS, method="ar").token_ids
    assert asyncio.run(AsyncLLM(llm=llm).chat(messages, PARAMS)).token_ids == expected
    assert asyncio.run(AsyncLLM(llm=llm).chat(PROMPTS[0], PARAMS)).token_ids == expected


def test_leaving_an_asynchronous_stream_ends_it(toy_folder, monkeypatch):
    async def main():
        async with AsyncLLM(toy_folder, "ar") as llm:
            slow(llm, monkeypatch)
            async for _ in await llm.stream("hello", LONG):
                break
            waiting = asyncio.create_task(llm.generate("one two", LONG))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for _ in range(200):
                if not llm.llm.engine.busy:
                    break
                await asyncio.sleep(0.02)
            llm.llm.reset()
            assert not llm.llm.engine.busy and llm.llm.model.pool.used == 0

    asyncio.run(main())


def test_closing_ends_what_is_waited_for(toy_folder, monkeypatch):
    async def main():
        llm = AsyncLLM(toy_folder, "ar")
        slow(llm, monkeypatch)
        stream = await llm.stream("hello", LONG)
        await stream.__anext__()
        await asyncio.to_thread(llm.close)
        async for _ in stream:
            pass
        assert stream.completion.finish_reason == "interrupted"
        with pytest.raises(QuickbeamError, match="closed"):
            await llm.generate("hello")

    asyncio.run(main())


def test_a_model_that_is_closed_answers_no_more(toy_folder):
    messages = [{"role": "user", "content": "hello"}]
    with LLM(toy_folder, "ar") as llm:
        stream = llm.stream("hello", LONG)
    llm.close()  # as often as one likes
    assert stream.result().finish_reason == "interrupted" and stream.completion.text is not None
    for ask, given in (
        (llm.generate, "hello"),
        (llm.generate, ["hello", "one"]),
        (llm.chat, messages),
        (llm.stream, "hello"),
        (llm.chat_stream, messages),
    ):
        refuses("this model is closed: load it again", ask, given, error=QuickbeamError)
    refuses("closed", llm.reset, error=QuickbeamError)
    assert repr(llm) == f"LLM({llm.name!r}, method='ar', closed)"


def test_an_asynchronous_model_that_is_closed_answers_no_more(toy_folder):
    closed, wrapped = LLM(toy_folder, "ar"), AsyncLLM(toy_folder, "ar")
    closed.close()  # before it was asked anything
    wrapped.close()
    assert repr(wrapped) == f"AsyncLLM({closed.name!r}, method='ar', closed)"
    for llm in (wrapped, AsyncLLM(llm=closed)):
        for ask in (llm.generate, llm.chat, llm.stream, llm.chat_stream):
            with pytest.raises(QuickbeamError, match="this AsyncLLM is closed"):
                asyncio.run(ask("hello"))
    for loaded in (wrapped.llm, closed):
        refuses("this model is closed", loaded.generate, "hello", error=QuickbeamError)


def test_a_model_outlives_what_it_was_given_to(llm, alone):
    async def main():
        async with AsyncLLM(llm=llm) as wrapped:
            stream = await wrapped.stream("hello", LONG)
        async for _ in stream:
            pass
        assert stream.completion.finish_reason == "interrupted"
        with pytest.raises(QuickbeamError, match="closed"):
            await wrapped.generate("hello")

    asyncio.run(main())
    assert llm.generate(PROMPTS[0], PARAMS).token_ids == alone[PROMPTS[0]]


def test_the_thread_ends_with_close_and_with_its_model(toy_folder):
    llm, before = LLM(toy_folder, "ar"), set(threading.enumerate())
    llm.generate("hello", PARAMS)
    (thread,) = {*threading.enumerate()} - before
    llm.close()
    assert not thread.is_alive()
    llm = LLM(toy_folder, "ar")
    stream = llm.stream("hello", LONG)
    (thread,), model = {*threading.enumerate()} - before, weakref.ref(llm.model)
    del llm
    assert next(stream) and thread.is_alive()  # a stream keeps its engine
    del stream
    gc.collect()
    thread.join(30)
    gc.collect()
    assert not thread.is_alive() and model() is None


@pytest.mark.parametrize("end", few(["", "del llm, stream"], ["del llm, stream"]))
def test_the_interpreter_ends_in_the_midst_of_an_answer(toy_folder, end):
    program = f"""
from quickbeam import LLM, SamplingParams
llm = LLM({toy_folder!r}, "pld")
stream = llm.stream("hello", SamplingParams(max_tokens=450, ignore_eos=True))
print(next(stream) != "")
{end}
"""
    command, how = [sys.executable, "-c", program], {"capture_output": True, "text": True}
    ended = subprocess.run(command, timeout=120, **how)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are of Unix")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_engine(llm):
    llm.generate("hello", PARAMS)
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            llm.generate("hello", PARAMS)
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    assert "was forked" in message and "spawn" in message


def test_an_observer_that_asks_the_same_model_is_told(llm, alone):
    """It would wait for itself. Its answer ends with the error, no other does."""
    other, errors = llm.stream(PROMPTS[0], PARAMS), list[str]()

    def asks(record):
        for ask in (lambda: llm.stream("hello", PARAMS), lambda: next(stream), llm.reset):
            try:
                ask()
            except QuickbeamError as error:
                errors.append(str(error))
        llm.generate("hello", PARAMS)

    stream = llm.stream("hello", LONG, observer=asks)
    refuses("under way", stream.result, error=QuickbeamError)
    assert len([error for error in errors if "under way" in error]) >= 2
    assert other.result().token_ids == alone[PROMPTS[0]]


def test_pickling_and_copying_say_what_to_do_instead(llm):
    stream = llm.stream("hello", PARAMS)
    for loaded in (llm, AsyncLLM(llm=llm), llm.generate, {"model": llm}, stream):
        for function in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"load it in each process, .*`quickbeam serve`"):
                function(loaded)
    with pytest.raises(TypeError, match=r"^LLM: a loaded model can't be pickled or copied"):
        copy.copy(llm)
    assert len(stream.result().token_ids) == 24  # nothing was disturbed
