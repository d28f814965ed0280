"""What README.md and docs/ tell the reader to do works: every code block is run, or says why not.
Links lead somewhere: pages, headings, pictures, files of the repository, names that these define.
`make test` runs them with a tiny random model; the long tests with the default one.
"""

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from docs import PAGES, ROOT, blocks, commands, hooks, of_program, read, save_drafter
from quickbeam import LLM, hub
from quickbeam.cli.app import app
from quickbeam.config import ServerOptions
from quickbeam.methods import METHODS
from quickbeam.models import builtin
from quickbeam.models.families import llama
from quickbeam.serve.app import create_app
from quickbeam.serve.metrics import expose
from quickbeam.serve.runner import Runner
from running import serving
from scripts import captured, cli

SMALL = {
    "generate": ["--max-tokens", "8"],
    "chat": ["--max-tokens", "8"],
    "demo": ["--max-tokens", "8"],
    "bench": ["--limit", "1", "--max-tokens", "4"],
}
PROGRAMS = {"quickbeam", "make", "pip", "curl", "docker", "serve", ".ci/run", "echo", "python"}
PROGRAMS |= {"git", "lm_eval"}
REAL = pytest.mark.long
RUN = [command for command in commands() if of_program(command.words) and not command.block.skipped]
PYTHON = [block for block in blocks() if block.kind == "python" and not block.skipped]
ASKED = [one for one in commands() if one.words[:1] == ["curl"] and not one.block.skipped]
SERVING = read("docs/serving.md")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def little(toy_folder, tmp_path_factory):
    """A folder in which the tiny model's drafter lies under the name of the default model."""
    folder = tmp_path_factory.mktemp("drafters")
    save_drafter(folder / hub.DEFAULT, 257, 32, 2)
    return folder


@pytest.fixture(params=["tiny", pytest.param("default", marks=REAL)])
def model(request, monkeypatch):
    if request.param == "default":
        return str(request.getfixturevalue("smollm2"))
    folder, drafters = request.getfixturevalue("toy_folder"), request.getfixturevalue("little")
    monkeypatch.setattr(builtin, "pull", lambda name=hub.DEFAULT, progress=None: Path(folder))
    monkeypatch.setattr(hub, "DRAFTERS", drafters)
    return str(folder)


def smaller(arguments, model):
    arguments = [*arguments]
    if "toy" in model and "--shortlist" in arguments:
        arguments[arguments.index("--shortlist") + 1] = "90"
    name = next((name for name in (" ".join(arguments[:2]), arguments[0]) if name in SMALL), "")
    return [*arguments, *SMALL.get(name, [])]


def test_every_block_is_run_or_says_why_not():
    kinds = {block.kind for block in blocks()}
    assert kinds <= {"bash", "python", "json", "text", "mermaid", "bibtex"}, kinds
    for command in commands():
        assert not command.words or command.words[0] in PROGRAMS, str(command)
        if command.words and command.words[0] == "serve":
            assert command.block.skipped, str(command)
    assert len(RUN) > 20 and len(PYTHON) > 8 and len(ASKED) > 2
    for page in PAGES:
        assert "not run by tests" not in read(page), page


@pytest.mark.parametrize("block", [block for block in blocks() if block.kind == "json"], ids=str)
def test_json_is_json(block):
    for line in block.body.splitlines():
        json.loads(re.sub(r"\{…\}", "{}", line))


@pytest.mark.parametrize("command", [one for one in commands() if of_program(one.words)], ids=str)
def test_commands_and_options_exist(command):
    for arguments in of_program(command.words):
        inner: Any = typer.main.get_command(app)
        for word in arguments:
            if word not in getattr(inner, "commands", {}):
                break
            inner = inner.commands[word]
        known = {name for one in inner.params for name in (*one.opts, *one.secondary_opts)}
        assert {word for word in arguments if word.startswith("--")} <= known | {"--version"}


def test_make_targets_extras_and_pages_are_there():
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    asked = [command.words[1:] for command in commands() if command.words[:1] == ["make"]]
    assert asked and {word for words in asked for word in words} <= targets
    declared = read("pyproject.toml").split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", declared, re.MULTILINE))
    for page in PAGES:
        for group in re.findall(r"(?:\.|quickbeam)\[([a-z,]+)\]", read(page)):
            assert set(group.split(",")) <= extras, (page, group)
    text = re.sub(r"!!python/name:\S+", "''", read("mkdocs.yml"))
    listed = re.findall(r": ([\w/-]+\.md)$", text.split("\nnav:\n")[1], re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(one.relative_to(docs)) for one in docs.rglob("*.md"))
    assert yaml.safe_load(text)["hooks"] == ["docs/hooks.py"]


@pytest.mark.parametrize("command", RUN, ids=str)
def test_command_runs(command, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = [one for one in commands() if one.block == command.block]
    for words in (one.words for one in block):  # make the files that the block reads
        if words[:1] == ["echo"] and words[2] in (">", ">>"):
            with open(tmp_path / words[3], "w" if words[2] == ">" else "a") as file:
                file.write(f"{words[1]}\n")
    earlier = [one.words[1:] for one in block if "--trace" in one.words]  # make what is inspected
    for arguments in of_program(command.words):
        for before in earlier if arguments[0] == "inspect" else ():
            assert cli(*smaller(before, model)).exit_code == 0
        given = {"input": "Hello\n/exit\n", "catch_exceptions": False}
        result = cli(*smaller(arguments, model), **given)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()


@pytest.mark.parametrize("block", [block for block in PYTHON if not block.served], ids=str)
def test_python_runs(block, model, capsys):
    code = re.sub(r"(max_tokens|max_new_tokens)=\d+", r"\1=8", block.body)
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", model)
    exec(compile(code, str(block), "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module", params=["tiny", pytest.param("default", marks=REAL)])
def address(request, toy_folder):
    real = request.param == "default"
    if real:
        request.getfixturevalue("smollm2")
    with (
        LLM(None if real else toy_folder) as llm,
        serving(Runner(ServerOptions(served_names=(hub.DEFAULT,)), llm)) as (base, _),
    ):
        yield base


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("command", ASKED, ids=str)
def test_a_request_is_answered(command, address):
    words = [word.replace("http://127.0.0.1:8000", address) for word in command.words]
    asked = captured(words, timeout=120)
    assert asked.returncode == 0 and asked.stdout
    if "/v1/" not in " ".join(words):
        return
    body = json.loads(asked.stdout)
    content = body["choices"][0]["message"]["content"]
    assert content
    if any("json_schema" in word for word in words):
        cut = body["choices"][0]["finish_reason"] == "length"
        assert cut or set(json.loads(content)) == {"name", "colour"}


@pytest.mark.parametrize("block", [block for block in PYTHON if block.served], ids=str)
def test_python_asks_the_server(block, address, capsys):
    code = block.body.replace("http://127.0.0.1:8000", address)
    code = re.sub(r"max_tokens=\d+", "max_tokens=8", code)
    exec(compile(code, str(block), "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.strip()


def test_the_readme_begins_with_the_commands_that_try_and_test_it():
    own = [one for one in commands() if one.block.page.name == "README.md"]
    first = [one for one in own if one.block == own[0].block]
    assert [one.words[:2] for one in first] == [
        ["git", "clone"],
        ["make", "demo"],
        ["make", "test"],
    ]
    for line in first[0].block.body.splitlines()[1:]:
        assert re.search(r"#.*\d minutes", line), line
    makefile = read(
        "Makefile"
    )  # what follows without a compiler is said before anything is fetched
    assert makefile.index("native.build --compiler") < makefile.index("pip install")
    installs = [one.words for one in own if one.words[0] == "pip"]
    assert installs == [["pip", "install", ".[serve,grammar]"]]


def test_words_are_explained_before_a_newcomer_needs_them():
    before, table = read("README.md").split("\n| server |")
    assert all(word in before for word in ("*drafts*", "*nodes*", "*step*", "(`ar`, "))
    headings = table.partition("\n")[0].strip(" |").split(" | ")
    assert len(headings) == 6 and all(
        heading.endswith(("client", "clients")) for heading in headings
    )
    glossary = "\n".join(re.findall(r"^\| ([^|]+) \|", read("docs/glossary.md"), re.MULTILINE))
    for word in (
        "`ar`",
        "`auto`",
        "Draft,",
        "Node",
        "Step",
        "Source",
        "Recycling",
        "Built-in model",
    ):
        assert word in glossary, word
    for text in (*map(read, PAGES), hooks().commands()):
        assert not re.search(r"embedded (model|name|default|one)", text, re.IGNORECASE)


def test_what_repeats_the_code():
    assert len(read("README.md").splitlines()) <= 120
    text = read("docs/guides/methods.md").split("## All methods\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w[\w-]*)` \| .+ \|$", text, re.MULTILINE) == list(METHODS)
    command: Any = typer.main.get_command(app).commands["serve"]
    defaults = {option: one.default for one in command.params for option in one.opts}
    assert set(re.findall(r"`(--[\w-]+)", SERVING)) <= set(defaults)
    documented = dict(re.findall(r"^\| `(--[\w-]+) (\S+)` \|", SERVING, re.MULTILINE))
    assert documented and {option: str(defaults[option]) for option in documented} == documented
    assert inspect.getsource(llama.arcee) in read("docs/extending/architectures.md")


def test_paths_and_metrics_are_those_of_the_server(toy_folder):
    with LLM(toy_folder, "ar") as llm:
        runner = Runner(ServerOptions(), llm)
        paths = {route.path for route in create_app(runner).routes}
        exposed = expose(runner.metrics.registry, "")[0].decode()
    table = SERVING.split("| path | what it is |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(/[\w/]*)`", table)) <= paths
    assert all(name in exposed for name in re.findall(r"`((?:vllm|quickbeam):\w+)`", SERVING))


def test_troubleshooting_quotes_errors_that_the_code_raises():
    page = read("docs/troubleshooting.md")
    source = "\n".join(map(read, (ROOT / "src").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # messages of several lines are one
    source = re.sub(r"\{[^{}]*\}", "…", source)
    quoted = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^### .+$", page, re.MULTILINE)))
    assert len(quoted) > 20
    for message in quoted:
        for part in message.split("…"):
            assert part.strip() in source, message


LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK, CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE), re.compile(r"`[^`\n]+`")
LATER = {"docs/images/demo.svg"}  # `quickbeam demo --svg` draws it


def text_of(page):
    return BLOCK.sub("", read(page))


def anchors(page):
    """The names of a page's headings, as GitHub and mkdocs make them."""
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        names.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return names


@every_page
def test_links_lead_somewhere(page):
    for link in LINK.findall(CODE.sub("", text_of(page))):
        if re.match(r"\w+:", link):
            assert link.startswith("https://"), link
            continue
        target, _, name = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists() or str(path.relative_to(ROOT)) in LATER, link
        if name and path.suffix == ".md":
            assert name in anchors(path), f"{link}: {sorted(anchors(path))}"
        elif name:
            assert hooks().line_of(path, name) > 0, link


@every_page
def test_files_that_are_named_are_there(page):
    for name in re.findall(r"`((?:src|tests|deploy|docs)/[\w./-]+\w)`", read(page)):
        assert (ROOT / name).exists(), name


def test_the_reference_has_every_command_and_option():
    page = hooks().commands()

    def visit(command, name):
        section = page.split(f"## {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.name != "help":
                options = [option for option in parameter.opts if option.startswith("-")]
                assert all(option in section for option in options), (name, options)
        below = getattr(command, "commands", {}).items()
        return 1 + sum(visit(each, f"{name} {key}") for key, each in below)

    assert visit(typer.main.get_command(app), "quickbeam") == 12
    assert "| `--temperature" in page and "`0.0`" in page
    stub = read("docs/reference/cli.md")
    assert stub.count(hooks().MARK) == 1 and not re.search(r"^## quickbeam", stub, re.MULTILINE)


def test_links_to_code_lead_to_lines():
    text = "[x](../../src/quickbeam/tree.py#TokenTree.add) [y](../serving.md) "
    made = hooks().rewritten(text + "[z](https://a.org/a.py)", "methods/dyspec.md")
    line = re.findall(r"\]\(\.\./source/src/quickbeam/tree\.py\.md#__codelineno-0-(\d+)\)", made)
    assert "def add(" in read("src/quickbeam/tree.py").splitlines()[int(line[0]) - 1]
    assert "](../serving.md)" in made and "](https://a.org/a.py)" in made
    with pytest.raises(ValueError, match="no nothing"):
        hooks().line_of(ROOT / "src/quickbeam/tree.py", "nothing")
