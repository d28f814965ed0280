"""Links of README.md and docs/ lead somewhere: pages, headings, pictures, files of the repository,
names that these define.

`mkdocs build --strict` (`make docs`) checks the built site; this needs none of its packages.
"""

import re

import pytest
import yaml

from docs import PAGES, ROOT, hooks, read

LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK, CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE), re.compile(r"`[^`\n]+`")
LATER = {"docs/images/demo.svg"}  # `quickbeam demo --svg` draws it


def text_of(page):
    """A page without its blocks of code."""
    return BLOCK.sub("", read(page))


def anchors(page):
    """The names of a page's headings, as GitHub and mkdocs make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    for name in re.findall(r"`((?:src|tests|deploy|docs)/[\w./-]+\w)`", read(page)):
        assert (ROOT / name).exists(), name


def test_every_page_is_in_the_navigation():
    text = re.sub(r"!!python/name:\S+", "''", read("mkdocs.yml"))
    listed = re.findall(r": ([\w/-]+\.md)$", text.split("\nnav:\n")[1], re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    )
    assert yaml.safe_load(text)["hooks"] == ["docs/hooks.py"]


# --- the command line's reference -----------------------------------------------------------------


def test_the_reference_has_every_command_and_option():
    import typer.main

    from quickbeam.cli.app import app

    page = hooks().commands()

    def visit(command, name):
        section = page.split(f"## {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.name != "help":
                assert all(
                    option in section for option in parameter.opts if option.startswith("-")
                ), (name, parameter.opts)
        return 1 + sum(
            visit(each, f"{name} {key}") for key, each in getattr(command, "commands", {}).items()
        )

    assert visit(typer.main.get_command(app), "quickbeam") == 12
    assert "| `--temperature" in page and "`0.0`" in page
    stub = read("docs/reference/cli.md")
    assert stub.count(hooks().MARK) == 1 and not re.search(r"^## quickbeam", stub, re.MULTILINE)


def test_links_to_code_lead_to_lines():
    text = (
        "[x](../../src/quickbeam/tree.py#TokenTree.add) [y](../serving.md) "
        "[z](https://example.org/a.py)"
    )
    made = hooks().rewritten(text, "methods/dyspec.md")
    line = re.findall(r"\]\(\.\./source/src/quickbeam/tree\.py\.md#__codelineno-0-(\d+)\)", made)
    source = read("src/quickbeam/tree.py").splitlines()
    assert "def add(" in source[int(line[0]) - 1]
    assert "](../serving.md)" in made and "](https://example.org/a.py)" in made
    with pytest.raises(ValueError, match="no nothing"):
        hooks().line_of(ROOT / "src/quickbeam/tree.py", "nothing")
