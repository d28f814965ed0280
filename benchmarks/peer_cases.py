"""What `peers.py` asks: a model in a number format, and the commands of servers that read it."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from quickbeam import hub
from quickbeam.config import WEIGHTS
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.methods import preset
from quickbeam.models import builtin

BITS = dict(zip((16, 8, 4), WEIGHTS, strict=True))
TYPES = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}  # of llama-quantize
SHORT = "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8"  # the defaults are 12 and 48
DRAFTING = "--spec-type {} -md {{draft}} --spec-draft-n-max 8"
# options of llama-server, by what the table calls them; those with {draft} need a drafter
SPECULATIONS = {
    "ngram-simple": "--spec-type ngram-simple",
    "ngram-simple 3:8": f"--spec-type ngram-simple {SHORT}",
    "ngram-map-k": "--spec-type ngram-map-k",
    "ngram-map-k4v": "--spec-type ngram-map-k4v",
    "ngram-mod": "--spec-type ngram-mod",
    "ngram-cache": "--spec-type ngram-cache",
    "draft-simple": DRAFTING.format("draft-simple"),
    "draft-simple + ngram-mod": DRAFTING.format("draft-simple,ngram-mod"),
    "draft-simple + ngram-simple 3:8": f"{DRAFTING.format('draft-simple,ngram-simple')} {SHORT}",
}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3}'


def llama_program(folder: Path, program: str) -> list[str]:
    """Return the command of a program of llama.cpp's, whose libraries lie beside it."""
    return ["env", f"LD_LIBRARY_PATH={folder.resolve()}", f"{folder.resolve()}/{program}"]


def llama_servers(
    given: Namespace, model: str, drafter: str, clients: int, context: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and command of llama-server without and with each of `--speculations`."""
    slots = f"-np {clients} -c {context * clients} -t {torch.get_num_threads()}"
    options = f"{slots} {given.llama_options}".split()
    program = llama_program(given.llama, "llama-server")
    start = [*program, "--port", "{port}", "-m", model, *options]
    yield "llama.cpp", start
    asked, every = given.speculations.split(","), given.speculations == "all"
    for name, words in SPECULATIONS.items():
        if (every or name in asked) and ("{draft}" not in words or drafter):
            yield f"llama.cpp {name}", [*start, *words.replace("{draft}", drafter).split()]


def add_llama(parser: ArgumentParser) -> None:
    """Add the arguments that `llama_servers` reads."""
    parser.add_argument("--llama", type=Path, help="folder of llama-server and llama-quantize")
    parser.add_argument("--llama-options", default="", help="of llama-server, say --no-repack")
    names = ", ".join(SPECULATIONS)
    parser.add_argument("--speculations", default="all", help=f"of llama-server: {names}; none")


class Case:
    """A model in a number format, with a drafter or none: its files for each server."""

    def __init__(self, text: str, given: Namespace) -> None:
        model, bits, drafter = (*text.split(":"), "", "")[:3]
        if bits and (not bits.isdecimal() or int(bits) not in BITS):
            raise InvalidInput(f"{text!r}: BITS are 16, 8 or 4, in MODEL[:BITS[:DRAFTER]]")
        self.model, self.path, self.drafter, self.given = model, Path(model), drafter, given
        self.is_file = self.path.suffix == ".gguf"
        self.bits = int(bits or (0 if self.is_file else 16))  # 0: as the file has them
        self.name = f"{self.path.stem}{f', {self.bits} bits' if self.bits else ''}"
        hub.check_source(model)

    def gguf(self, path: Path) -> Path:
        """Return a `.gguf` file in this case's bits, which `llama-quantize` makes of `path`."""
        if not self.bits:
            return path
        self.given.work.mkdir(parents=True, exist_ok=True)
        out = self.given.work / f"{path.stem}-{TYPES[self.bits]}.gguf"
        if not out.is_file():
            if not self.given.llama:
                raise InvalidInput(f"{path} in {self.bits} bits: needs llama-quantize, --llama")
            part = out.with_suffix(".part")
            program = llama_program(self.given.llama, "llama-quantize")
            command = [*program, "--allow-requantize", str(path), str(part)]
            made = subprocess.run([*command, TYPES[self.bits]], capture_output=True, text=True)
            if made.returncode:
                last = made.stderr.strip().splitlines()[-1:]
                raise QuickbeamError(f"{command[2]} can't make {out.name}: {' '.join(last)}")
            part.rename(out)
        return out

    def fetched(self) -> Path:
        """Return the `.gguf` file that an embedded model is made of."""
        entry, work = hub.EMBEDDED[self.model], self.given.work
        work.mkdir(parents=True, exist_ok=True)
        if not (work / entry.file).is_file():
            hub.unpack(entry, hub.download(entry, work), work)
        return work / entry.file

    def servers(self, clients: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the name and command of every server that can be asked."""
        given, is_file, embedded = self.given, self.is_file, self.model in hub.EMBEDDED
        model = str(self.gguf(self.path)) if is_file else self.model
        own = [sys.executable, "-m", "quickbeam", "serve", "--port", "{port}", "--model", model]
        if self.bits and not is_file:
            own += ["--weights", BITS[self.bits]]
        for method in given.methods.split(","):
            drafts = self.drafter and preset(method).uses_drafter
            more = ["--drafter", self.drafter] if drafts else []
            yield f"quickbeam {method}", [*own, "--method", method, *more]
        if given.llama and (embedded or is_file):
            file = self.gguf(self.fetched() if embedded else self.path)
            yield from llama_servers(given, str(file), self.drafter, clients, 4096)
        folder = Path(builtin.resolve(self.model)) if not is_file else self.path.with_suffix("")
        if self.bits in (16, 0) and folder.is_dir():
            yield from self.readers_of_folders(str(folder))

    def readers_of_folders(self, folder: str) -> Iterator[tuple[str, list[str]]]:
        if vllm := self.given.vllm:
            start = [vllm, "serve", folder, "--port", "{port}", "--dtype", "bfloat16"]
            start += ["--max-model-len", "4096"]
            yield "vLLM", start
            yield "vLLM n-grams", [*start, "--speculative-config", NGRAM]
        if self.given.transformers:
            program = str(Path(sys.executable).with_name("transformers"))
            yield "transformers", [program, "serve", folder, "--port", "{port}", "--device", "cpu"]
