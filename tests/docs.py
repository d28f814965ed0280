"""The code blocks and links of README.md and docs/, for the tests that hold them to the code."""

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam.drafters.eagle_files import save_eagle
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Artefact

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


FENCE = re.compile(
    r"^(?P<mark><!-- not run: [^\n]+ -->\n)?"
    r"(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
SERVER = "http://127.0.0.1:8000"  # a block that names it needs the server


class Block(NamedTuple):
    page: Path
    line: int
    kind: str
    body: str
    skipped: bool  # a marker before it says why

    @property
    def served(self):
        return SERVER in self.body

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    block: Block
    words: list[str]

    def __str__(self):
        return f"{self.block} {' '.join(self.words)[:60]}"


@cache
def blocks():
    fenced = []
    for page in PAGES:
        text = read(page)
        for each in FENCE.finditer(text):
            line = text.count("\n", 0, each.start("body"))
            fenced.append(Block(page, line, each["kind"], each["body"], bool(each["mark"])))
    return fenced


@cache
def commands():
    bash = [block for block in blocks() if block.kind == "bash"]
    return [
        Command(block, shlex.split(line, comments=True))
        for block in bash
        for line in block.body.splitlines()
    ]


def of_program(words):
    """Calls of quickbeam in a line, without its name; `echo … | quickbeam generate -` has one."""
    parts: list[list[str]] = [[]]
    for word in words:
        parts.append([]) if word == "|" else parts[-1].append(word)
    return [part[1:] for part in parts if part and part[0] == "quickbeam"]


@cache
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_drafter(folder, vocab, size, layers):
    """A random feature drafter with a shortlist, for a target of these sizes."""
    torch.manual_seed(5)
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    of_target = {"layers": (1, layers), "target_size": size, "vocab_size": vocab}
    config = EagleConfig(size, 48, **heads, **of_target, feature_norms=True)
    embedding, head = torch.nn.Embedding(vocab, size), torch.nn.Linear(size, vocab, bias=False)
    save_eagle(EagleHead(config, embedding, head), folder)
    layout = Layout(torch.randperm(vocab), 33, 16, vocab)
    router = Router(RouterConfig(size, size, 8, layout.clusters))
    Artefact(layout, torch.randperm(vocab), router).save(folder)
