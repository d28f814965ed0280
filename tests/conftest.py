"""What several test files share."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach a package index at most
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # models would run there: see `make test-cuda`

from quickbeam import hub
from quickbeam.models import builtin

# An example that takes long on a busy machine is no failure (how many: `examples` in cases.py).
settings.register_profile("quickbeam", deadline=None, print_blob=True)
settings.load_profile("quickbeam")

BEGAN = time.time()


def pytest_sessionfinish(session):
    """Delete what the user's cache keeps of models in temporary folders, once all workers ended."""
    if hasattr(session.config, "workerinput"):
        return
    for name in ("weights/*toy*", "digests/*"):
        for file in hub.cache_folder().glob(name):
            if file.stat().st_mtime >= BEGAN:
                file.unlink(missing_ok=True)


# A shell starts what it puts in the background deaf to Ctrl-C, and so are the programs that tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the built-in model, pulled where the cache does not have it."""
    return builtin.pull("smollm2-135m")


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """A folder with a random Llama whose tokens are bytes, tokenizer and chat template included."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("toy")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab | {"<end>": len(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
        "add_generation_prompt %}> {% endif %}"
    )
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    special = dict(eos_token_id=len(vocab), bos_token_id=None)
    config = LlamaConfig(**sizes, **special, max_position_embeddings=512, initializer_range=0.5)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        # the last token decides: greedy answers end in a cycle, which lookup can guess
        layer.self_attn.o_proj.weight.data.zero_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """A cache folder of the test's own, with the kernels and the model that are there already."""
    folder = tmp_path_factory.mktemp("cache")
    for file in ("kernels", "smollm2-135m"):
        if (hub.cache_folder() / file).exists():
            os.symlink(hub.cache_folder() / file, folder / file)
    monkeypatch.setenv("QUICKBEAM_CACHE", str(folder))
    return folder


@pytest.fixture
def plain_environment(monkeypatch, tmp_path):
    for name in ("QUICKBEAM_KERNELS", "QUICKBEAM_ISA", "CXX", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def threads():
    """One thread, unless a test sets another number: work this small is slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def native(monkeypatch):
    """Makes models use the kernels of an instruction set, or PyTorch's operators ("eager")."""
    from kernels import load

    def take(isa):
        if isa == "eager":
            monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
            monkeypatch.delenv("QUICKBEAM_ISA", raising=False)
            return
        load(isa)
        monkeypatch.setenv("QUICKBEAM_KERNELS", "native")
        monkeypatch.setenv("QUICKBEAM_ISA", isa)

    return take


@pytest.fixture
def faked(monkeypatch):
    """The command line before a stand-in for the model; no command may end in a traceback."""
    from typer.testing import CliRunner

    import fake_llm
    from quickbeam.cli.app import app

    monkeypatch.setitem(sys.modules, "quickbeam.llm", fake_llm)
    monkeypatch.delenv("QUICKBEAM_DEBUG", raising=False)
    fake_llm.CALLS.clear()

    def run(*arguments, input=None):
        result = CliRunner().invoke(app, [str(one) for one in arguments], input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return run


@pytest.fixture(scope="module")
def llm(toy_folder):
    from quickbeam import LLM

    with LLM(toy_folder, "pld") as llm:
        yield llm


@pytest.fixture(scope="module")
def runner(llm):
    from quickbeam.config import ServerOptions
    from quickbeam.serve.runner import Runner

    runner = Runner(ServerOptions(served_names=("toy", "small")), llm)
    yield runner
    asyncio.run(runner.close())


@pytest.fixture
def scripted(llm):
    """A server whose answers are given."""
    from quickbeam.config import ServerOptions
    from serving import ScriptedRunner

    return ScriptedRunner(ServerOptions(served_names=("toy",)), llm)


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(60)))
    return path
