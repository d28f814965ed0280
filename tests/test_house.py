"""How the sources are laid out and named: who imports whom, and words that name nothing."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cases import refuses

SOURCES = Path(__file__).parents[1] / "src" / "quickbeam"
# single files that all rooms share
NOUNS = ("config", "errors", "machine", "noise", "params", "sampling", "tree", "verify")
# A room imports only from its own line and the lines above.
ROOMS = (
    ("nouns", "grammar"),
    ("hub",),
    ("models",),
    ("drafters",),
    ("methods",),
    ("engine",),
    ("llm",),
    ("aio", "hf"),
    ("serve", "batch", "train", "bench"),
    ("cli", "__main__"),
)


def modules(folder: Path) -> dict[str, Path]:
    """The modules of a package by their names within it: `engine.cost`."""
    paths = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("quickbeam."):
            within = f"{node.module}".removeprefix("quickbeam").removeprefix(".")
            for alias in node.names:
                name = f"{within}.{alias.name}".removeprefix(".")
                imported.add(name if name in known else within)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.startswith("quickbeam."))
            imported.update(name.removeprefix("quickbeam.") for name in names)
    return imported - {"", "__init__"}  # the package itself only hands on what its faces hold


def room(module: str, folder: Path) -> str:
    first = module.partition(".")[0]
    return "nouns" if first in NOUNS else first


def upward(folder: Path) -> set[str]:
    known = modules(folder)
    level = {one: i for i, line in enumerate(ROOMS) for one in line}
    wrong = set()
    for module, path in known.items():
        if module == "__init__":
            continue
        own = room(module, folder)
        assert own in level, f"{module}: put the room {own} into ROOMS"
        for other in imports(path, known):
            if level[room(other, folder)] > level[own]:
                wrong.add(f"{module} → {other}")
    return wrong


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The circles of a graph of imports, each as its members by name."""
    graph = {importer: imported & graph.keys() for importer, imported in graph.items()}
    seen = set()
    while True:
        try:
            list(TopologicalSorter(graph).static_order())
            return seen
        except CycleError as error:
            circle = error.args[1]
            seen.add(" → ".join(sorted(set(circle))))
            for importer, imported in zip(circle[1:], circle, strict=False):
                graph[importer] = graph[importer] - {imported}


def circles_of_modules(folder: Path) -> set[str]:
    known = modules(folder)
    graph = {name: imports(path, known) for name, path in known.items()}
    del graph["__init__"]
    return circles(graph)


def circles_of_rooms(folder: Path) -> set[str]:
    """Rooms that import each other, though no two of their modules need do. Each noun is a room of
    its own."""
    known = modules(folder)

    def room_of(module: str) -> str:
        named = room(module, folder)
        return module if named == "nouns" else named

    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        if module != "__init__":
            importer = room_of(module)
            imported = {room_of(other) for other in imports(path, known)}
            graph[importer] = graph.get(importer, set()) | (imported - {importer})
    return circles(graph)


@pytest.mark.parametrize(
    ("look", "left"),
    [(upward, set()), (circles_of_modules, set()), (circles_of_rooms, set())],
)
def test_the_house_is_in_order(look, left):
    assert look(SOURCES) == left


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_what_is_wrong_is_seen(tmp_path):
    files = {
        "__init__.py": "",
        "tree.py": "def f():\n    from quickbeam import engine",
        "engine/__init__.py": "from quickbeam.engine.step import g",
        "engine/step.py": "from quickbeam import tree",
        "llm.py": "from quickbeam.engine import step",
    }
    write(tmp_path, files)
    assert upward(tmp_path) == {"tree → engine"}
    assert circles_of_modules(tmp_path) == {"engine → engine.step → tree"}
    (tmp_path / "kitchen").mkdir()
    (tmp_path / "kitchen" / "pan.py").touch()
    refuses("put the room kitchen into ROOMS", upward, tmp_path, error=AssertionError)
    (tmp_path / "kitchen" / "pan.py").unlink()
    (tmp_path / "chair.py").touch()  # a file that stands in no room
    refuses("put the room chair into ROOMS", upward, tmp_path, error=AssertionError)


def test_two_rooms_that_import_each_other_are_seen(tmp_path):
    files = {
        "errors.py": "",
        "params.py": "from quickbeam.grammar import spec",
        "grammar/spec.py": "from quickbeam import errors",
        "batch/run.py": "from quickbeam import errors",
        "serve/app.py": "from quickbeam.batch.run import Reply",
    }
    write(tmp_path, {"__init__.py": "", **files})
    assert circles_of_rooms(tmp_path) == set()
    write(tmp_path, {"batch/ray.py": "def f():\n    from quickbeam.serve import app"})
    assert upward(tmp_path) == circles_of_modules(tmp_path) == set()
    assert circles_of_rooms(tmp_path) == {"batch → serve"}


# Words of our own that no paper and no engine uses: no part of a name
PRIVATE_WORDS = {
    *("ailment", "ailments", "border", "chance", "chances", "circles", "dear", "edge"),
    *("elsewhere", "evidence", "explores", "grew", "grow", "grower", "growing", "grown"),
    *("growth", "hear", "heard", "law", "laws", "luck", "meeting", "outlook", "price"),
    *("priced", "prices", "promise", "promises", "said", "settled", "silent", "taught"),
    *("teaching", "told", "turned", "unheard", "warmth", "wish", "wordless", "worst"),
}
# Words that could name anything: no name by themselves
EMPTY_WORDS = {"found", "made", "still", "turn", "usual"}


def names_of(tree: ast.AST) -> set[str]:
    """The names that a module gives to functions, classes, parameters, variables and attributes."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def words_of(name: str) -> list[str]:
    """The words of a name: `max`, `top`, `k` of `MaxTop_k`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def odd_names(folder: Path) -> set[str]:
    odd = set()
    for module, path in modules(folder).items():
        for name in names_of(ast.parse(path.read_text(encoding="utf-8"))):
            words = words_of(name)
            if set(words) & PRIVATE_WORDS or (len(words) == 1 and words[0] in EMPTY_WORDS):
                odd.add(f"{module}: {name}")
    return odd


def test_names_are_words_of_the_field():
    assert odd_names(SOURCES) == set()


def test_odd_names_are_seen(tmp_path):
    lines = (
        "def too_dear(growth, *, found): pass",
        "class LastGrown: pass",
        "for made in self.UNHEARD: self._turn = still = 1",
    )
    write(tmp_path, {"odd.py": "\n".join(lines)})
    odd = ("too_dear", "growth", "found", "LastGrown", "made", "_turn", "still")
    assert odd_names(tmp_path) == {f"odd: {name}" for name in odd}
    lines = (
        "def returned(end_turn, usual_scale, lawful): pass",  # parts of other words, or with more
        "class Pricing: heard_of = outlook.law(chance=1)",
    )
    write(tmp_path, {"odd.py": "\n".join(lines)})
    assert odd_names(tmp_path) == {"odd: heard_of"}
