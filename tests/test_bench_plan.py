"""`bench plan`: what is measured, kept, rendered, and said to be old. A stand-in for quickbeam
writes the records.

pytest tests/test_bench_plan.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from glob import glob
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quickbeam.bench import documents, plan_run
from quickbeam.bench.charts import CHARTS
from quickbeam.bench.grids import pick
from quickbeam.bench.origin import KEY, covered, digest
from quickbeam.bench.plan import Plan, read_plan
from quickbeam.bench.saved import Saved
from quickbeam.cli.app import app
from quickbeam.cli.bench_plan import takes_file
from quickbeam.errors import InvalidInput
from records import RECORDS

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
PLAN = """
root: ..
docs: [README.md, "docs/*.md"]
images: docs/images
x-code: &code [src/code.py]
entries:
  - name: heads
    title: Heads
    command: quickbeam bench heads --repeats 1
    table: {columns: [ratio, full]}
    minutes: 1
    covers: [*code, src/heads/**]
  - name: load
    title: Load
    command: quickbeam bench throughput --methods ar,auto
    plot: load
    minutes: 2
    covers: *code
  - name: asked
    title: Asked
    command: quickbeam bench --questions {questions} --methods ar
    minutes: 3
    covers: *code
"""
README = """# A

<!-- report: heads -->
| old |
<!-- /report -->

```
<!-- report: not-an-entry -->
```
"""
DOCS = (
    "Load:\n\n<!-- report: load -->\n<!-- /report -->\n\n<!-- report: asked -->\n| by hand "
    "|\n<!-- /report -->\n"
)
# Writes what it was asked, and the record of that command to --json FILE, or prints it. Told by a
# file, it fails or waits.
STAND_IN = """
import json, os, pathlib, signal, sys, time
here, words = pathlib.Path(__file__).parent, sys.argv[1:]
sys.path.insert(0, {tests!r})
from records import RECORDS
kind = words[1] if words[1] in RECORDS else "methods"
if (here / f"fail-{{kind}}").exists():
    sys.exit("a warning\\nerror: out of luck")
if (here / f"wait-{{kind}}").exists():
    try:
        (here / "waiting").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        (here / "told").touch()
        sys.exit(130)
record = RECORDS[kind]()
record["set"] = os.environ.get("QUICKBEAM_ISA")
if kind == "methods":
    record["settings"]["questions"] = words[words.index("--questions") + 1]
    record["settings"]["questions file"] = words[words.index("--questions") + 1] + " was read"
at = words[words.index("--json") + 1 :]
if at:
    pathlib.Path(at[0]).write_text(json.dumps(record))
    print("| a table |")
else:
    print(json.dumps(record))
"""


class Place:
    """A small checkout with a plan."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan, self.records = (
            folder,
            folder / "benchmarks" / "plan.yaml",
            folder / "benchmarks",
        )
        self.write("benchmarks/plan.yaml", PLAN)
        self.write("README.md", README)
        self.write("docs/figures.md", DOCS)
        self.write("src/code.py", "one\n")
        self.write("src/heads/deep/a.h", "two\n")
        self.write("quickbeam.py", STAND_IN.format(tests=str(Path(__file__).parent)))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def record(self, name: str) -> dict:
        return json.loads(self.read(f"benchmarks/{name}.json"))

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *who, *words], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    def run(self, *options: str, code: int = 0):
        result = CliRunner().invoke(app, ["bench", "plan", str(self.plan), *options])
        assert result.exit_code == code, result.output
        return result


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(plan_run, "QUICKBEAM", (sys.executable, str(tmp_path / "quickbeam.py")))
    monkeypatch.delenv("QUICKBEAM_BENCH_QUESTIONS", raising=False)
    return Place(tmp_path)


def test_a_run_keeps_records_and_writes_tables_and_plots(place: Place) -> None:
    place.git("init", "-q")
    place.git("add", ".")
    place.git("commit", "-qm", "one")
    commit = place.git("rev-parse", "HEAD")
    said = place.run("--only", "heads,load").stdout
    assert (
        "1/2 heads (about 1 min): quickbeam bench heads --repeats 1" in said
        and said.count("done in 0 min") == 2
    )
    run = place.record("heads")[KEY]
    assert (run["commit"], run["dirty"], run["command"]) == (
        commit,
        False,
        "quickbeam bench heads --repeats 1",
    )
    assert (
        run["digest"] == digest(place.folder, ["src/code.py", "src/heads/**"])
        and run["seconds"] > 0
    )
    assert run["packages"]["torch"] and run["machine"]["cores"] and run["date"].endswith("Z")
    assert place.record("heads") == {**RECORDS["heads"](), "set": None, KEY: run}
    head = "Llama-3-8B 128,256 \N{MULTIPLICATION SIGN} 4,096"
    table = (
        f"| head | rows | ratio | full |\n| --- | --- | ---: | ---: |\n| {head} | 4 | 0.13 | "
        "40.00 |"
    )
    machine = "Test CPU <9000>, 2 cores, 2 threads, native (avx2), torch 2.13.0"
    origin = (
        f"Measured {run['date'][:10]} at {commit[:9]}, {machine}: `quickbeam bench heads "
        "--repeats 1`"
    )
    readme = place.read("README.md")
    assert f"\n\n{table}\n\n{origin}\n<!-- /report -->" in readme and "| old |" not in readme
    assert readme.startswith(
        "# A\n\n<!-- report: heads -->\n*Milliseconds of a head"
    ) and readme.endswith("```\n<!-- report: not-an-entry -->\n```\n")
    docs = place.read("docs/figures.md")
    assert (
        "| 1 | auto | 120.0 |" in docs
        and "![Lines of tokens a second" in docs
        and "](images/benchmark-load.svg)" in docs
    )
    assert "requests at a time" in place.read("docs/images/benchmark-load.svg")
    assert (
        "older" not in readme
        and "> **No record of this table is kept" in docs.split("report: asked")[1]
        and "| by hand |" in docs
    )
    assert "wrote" not in place.run("--render").stdout, "what is written stays"


def test_tables_say_that_they_are_old_when_code_changes_and_not_otherwise(place: Place) -> None:
    plan = PLAN.replace("    plot: load\n", "")
    place.write("benchmarks/plan.yaml", plan)
    place.run("--only", "heads,load")
    at = place.record("heads")[KEY]["commit"] or "an unknown commit"
    old = (
        "> **This table is older than the code it measures (measured at "
        f"{at[:9] if len(at) == 40 else at}"
    )

    def notes() -> tuple[bool, bool]:
        place.run("--render")
        return old in place.read("README.md"), old in place.read("docs/figures.md")

    assert notes() == (False, False)
    place.write("src/other.py", "new\n")
    place.write("docs/more.md", "text\n")
    assert notes() == (False, False), "files that are not covered"
    place.write("src/heads/deep/b.h", "new\n")
    assert notes() == (True, False), "a new file"
    (place.folder / "src/heads/deep/b.h").unlink()
    assert notes() == (False, False)
    place.write("src/code.py", "one2\n")
    assert notes() == (True, True), "a change of one character"
    place.write("src/code.py", "one\n")
    assert notes() == (False, False)
    (place.folder / "src/code.py").rename(place.folder / "src/heads/code.py")
    assert notes() == (True, True), "another name"
    (place.folder / "src/heads/code.py").unlink()
    place.write("src/code.py", "one\n")
    assert notes() == (False, False)
    place.write("benchmarks/plan.yaml", plan.replace("--repeats 1", "--repeats 2"))
    place.run("--render")
    assert "> **This table is of another command than the plan's" in place.read("README.md")
    assert "`quickbeam bench heads --repeats 1`" in place.read("README.md"), (
        "the command that was run"
    )
    place.run("--only", "heads")
    assert "> **" not in place.read("README.md")


def test_check_names_what_is_missing_or_old(place: Place) -> None:
    result = place.run("--check", code=1)
    assert {"heads: not measured yet", "load: not measured yet", "asked: not measured yet"} <= set(
        result.stdout.splitlines()
    )
    questions = place.write("q.jsonl", "")
    place.run("--set", f"questions={questions}")
    assert "3 entries: all figures are there" in place.run("--check").stdout
    place.write("README.md", place.read("README.md").replace("40.00", "39.00"))
    result = place.run("--check", code=1)
    assert "README.md: not what the figures say" in result.stdout and "1 of" in result.stderr
    place.run("--render")
    place.write("src/heads/deep/a.h", "three\n")
    assert "heads: " not in place.run("--check", "--only", "load", code=1).stdout
    lines = place.run("--check", code=1).stdout.splitlines()
    assert [
        line
        for line in lines
        if line.startswith("heads: older than the code it measures (measured at ")
    ] and not any("load" in x for x in lines)
    assert "three" in place.read("src/heads/deep/a.h") and "older" not in place.read("README.md"), (
        "nothing is written"
    )


def test_changes_that_are_not_committed_are_told(place: Place) -> None:
    place.git("init", "-q")
    place.git("add", ".")
    place.git("commit", "-qm", "one")
    place.write("README.md", README + "more\n")
    place.run("--only", "load")
    assert place.record("load")[KEY]["dirty"] is False, "nothing that is covered"
    place.write("src/heads/new.h", "untracked\n")
    place.run("--only", "heads")
    assert place.record("heads")[KEY]["dirty"] is True and " with changes, " in place.read(
        "README.md"
    )


def test_an_entry_that_fails_does_not_stop_the_others(place: Place) -> None:
    place.run("--only", "heads")
    before = place.read("benchmarks/heads.json")
    place.write("fail-heads", "")
    result = place.run("--all", code=1)
    assert (
        "    failed: out of luck" in result.stdout
        and ("1 of 3 entries failed: heads") in result.stderr
    )
    assert place.read("benchmarks/heads.json") == before, "the last figures stay"
    assert place.record("load")["concurrency"] and "| 1 | auto | 120.0 |" in place.read(
        "docs/figures.md"
    )
    assert (
        "asked: left out, as nothing fills {questions}" in result.stdout
        and not (place.records / "asked.json").exists()
    )


def test_a_command_that_leaves_no_record_fails(place: Place) -> None:
    place.write("quickbeam.py", "print('no JSON')")
    result = place.run(code=1)
    assert result.stdout.count("failed: the command left no record") == 2
    place.write("quickbeam.py", "print('{}')")
    assert "failed: heads: not a record of" in place.run("--only", "heads", code=1).stdout
    assert sorted(path.name for path in place.records.iterdir()) == ["plan.yaml"]


def test_interrupted_it_keeps_what_is_done(place: Place) -> None:
    place.write("wait-throughput", "")

    def interrupt() -> None:
        until = time.monotonic() + 60
        while not (place.folder / "waiting").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = place.run(code=130)
    thread.join()
    assert "    interrupted; 1 of 2 done before are kept" in result.stdout
    assert (place.folder / "told").exists(), "the command ends as by Ctrl-C"
    assert sorted(path.name for path in place.records.iterdir()) == ["heads.json", "plan.yaml"]
    assert "| 0.13 | 40.00 |" in place.read("README.md")
    (place.folder / "wait-throughput").unlink()
    kept = place.record("heads")[KEY]["date"]
    said = place.run().stdout
    assert "1 of 3 entries are of this code; --all measures them too" in said, "it goes on"
    assert "1/1 load" in said and place.record("heads")[KEY]["date"] == kept


def test_only_what_is_missing_or_old_is_measured_unless_all_is_asked_for(place: Place) -> None:
    def measured(*options: str) -> list[str]:
        lines = place.run(*options).stdout.splitlines()
        return [line.split()[1] for line in lines if " (about " in line]

    assert measured() == ["heads", "load"] and measured() == []
    assert measured("--all") == ["heads", "load"] and measured("--only", "load") == ["load"]
    place.write("src/heads/deep/a.h", "three\n")
    assert "(about 1 min; older than the code" in place.run("--list").stdout
    assert "(about 2 min; measured with this code)" in place.run("--list").stdout
    assert measured() == ["heads"]
    command = "quickbeam bench throughput --methods ar"
    place.write("benchmarks/plan.yaml", PLAN.replace(command, f"{command},pld"))
    assert measured() == ["load"], "another command"
    assert "--all, --only: give one of them" in place.run("--all", "--only", "load", code=2).stderr


def test_blanks_are_filled_and_paths_of_the_machine_are_not_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = place.write("some folder/q.jsonl", "x\n")
    assert (
        "asked needs {questions}: set QUICKBEAM_BENCH_QUESTIONS, or give --set questions=VALUE"
        in place.run("--only", "asked", code=2).stderr
    )
    monkeypatch.setenv("QUICKBEAM_BENCH_QUESTIONS", str(questions))
    place.run("--only", "asked")
    text, record = place.read("benchmarks/asked.json"), place.record("asked")
    assert str(place.folder) not in text and record["settings"]["questions"] == "{questions}"
    assert record["settings"]["questions file"] == "{questions} was read"
    sha256 = "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"
    assert record[KEY]["blanks"] == {"questions": {"file": "q.jsonl", "sha256": sha256}}
    assert "`quickbeam bench --questions QUESTIONS --methods ar`" in place.read(
        "docs/figures.md"
    ) and "by hand" not in place.read("docs/figures.md")
    assert (
        "must be NAME=VALUE for a {NAME} of the plan; known: {questions}"
        in place.run("--set", "model=x", code=2).stderr
    )


def test_variables_before_a_command_are_set_for_it_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKBEAM_ISA", "amx")
    with_variable = PLAN.replace(
        "quickbeam bench heads", "QUICKBEAM_ISA=avx2 quickbeam bench heads"
    )
    place.write("benchmarks/plan.yaml", with_variable)
    place.run("--only", "heads,load")
    assert place.record("heads")["set"] == "avx2" and place.record("load")["set"] == "amx"
    assert "`QUICKBEAM_ISA=avx2 quickbeam bench heads --repeats 1`" in place.read("README.md")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("entries:", "entries: [", "not YAML"),
        ("root: ..", "rot: ..", "unknown field 'rot'; known: root, docs, images, entries"),
        ("entries:", "x-entries:", "has no entries"),
        ("name: load", "name: heads", "two entries have the name 'heads'"),
        ("name: load", "name: Load it", "entry 2: name 'Load it' must be"),
        ("    title: Load\n", "", "entry 2: has no title"),
        ("minutes: 2", "minutes: soon", "minutes='soon': must be int or float"),
        ("minutes: 2", "minutes: 0", "minutes must be above 0"),
        ("quickbeam bench heads", "rm", "must be a `quickbeam bench"),
        ("heads --repeats 1", "heads --json", "line without --json"),
        ("heads --repeats 1", "heads 'x", "No closing quotation"),
        ("plot: load", "plot: {alt: x}", "plot: has no chart"),
        ("[ratio, full]", "[ratio, 1]", "columns: must be a list of texts"),
        ("{columns:", "{colums:", "unknown field 'colums'"),
    ],
)
def test_a_plan_is_refused_where_it_is_wrong(place: Place, old: str, new: str, says: str) -> None:
    place.write("benchmarks/plan.yaml", PLAN.replace(old, new, 1))
    with pytest.raises(InvalidInput) as caught:
        read_plan(place.plan)
    assert says in str(caught.value) and str(place.plan) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "heads --repeats 1",
            "heads --repeat 1",
            "entry heads: `quickbeam bench heads --repeat 1`: No such option",
        ),
        ("bench heads --repeats 1", "bench hats", "entry heads: `quickbeam bench hats`: "),
        ("bench heads --repeats 1", "bench plan", "writes no record: it has no --json"),
    ],
)
def test_commands_are_checked_before_anything_is_measured(
    place: Place, old: str, new: str, says: str
) -> None:
    place.write("benchmarks/plan.yaml", PLAN.replace(old, new))
    assert says in place.run(code=2).stderr and not (place.records / "load.json").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- report: other -->\n<!-- /report -->", "README.md:1: the plan"),
        (
            "\n<!-- report: heads -->\n",
            "README.md:2: the marker of 'heads' has no <!-- /report --> after it",
        ),
        ("<!-- /report -->", "README.md:1: <!-- /report --> without"),
        (
            "<!-- report: heads -->\n<!-- report: load -->\n<!-- /report -->",
            "README.md:2: a marker within that of 'heads'",
        ),
    ],
)
def test_markers_that_are_wrong_are_named_before_anything_is_measured(
    place: Place, text: str, says: str
) -> None:
    place.write("README.md", text)
    result = place.run(code=2)
    assert says in result.stderr and not (place.records / "heads.json").exists()


def test_a_table_that_can_t_be_made_names_its_entry(place: Place) -> None:
    place.write("benchmarks/plan.yaml", PLAN.replace("[ratio, full]", "[ratios]"))
    assert "entry heads: unknown column 'ratios'" in place.run("--only", "heads", code=2).stderr
    assert place.record("heads")["heads"], "what was measured is kept"
    for run in ({}, {KEY: {"date": "today"}}):
        place.write("benchmarks/heads.json", json.dumps(RECORDS["heads"]() | run))
        assert "was not measured by a plan" in place.run("--render", code=2).stderr


def test_documents_may_name_an_entry_twice_and_keep_their_line_ends(place: Place) -> None:
    twice = (
        "<!-- report: heads -->\r\n<!-- /report -->\r\ntext\r\n  <!-- report: heads -->\r\n  "
        "<!-- /report -->\r\n"
    )
    (place.folder / "README.md").write_bytes(twice.encode())
    place.run("--only", "heads")
    text = (place.folder / "README.md").read_bytes().decode()
    assert (
        text.count("| 0.13 | 40.00 |") == 2 and ("\r\ntext\r\n  <!-- report: heads -->\r\n") in text
    )
    assert "wrote" not in place.run("--render").stdout


def test_only_whole_files_are_covered(place: Place) -> None:
    place.write("src/heads/__pycache__/a.pyc", "x")
    names = [
        path.relative_to(place.folder).as_posix()
        for path in covered(place.folder, ["src/**", "src/code.py"])
    ]
    assert names == ["src/code.py", "src/heads/deep/a.h"]


# The plan that ships


@pytest.fixture(scope="module")
def shipped() -> Plan:
    return read_plan(ROOT / "benchmarks" / "plan.yaml")


def test_the_shipped_plan_s_commands_are_the_command_line_s(shipped: Plan) -> None:
    names = [entry.name for entry in shipped.entries]
    assert {
        "methods",
        "methods-warm",
        "trees",
        "vocabulary",
        "passes",
        "weights",
        "throughput",
        "served",
        "structured",
    } <= set(names)
    for entry in shipped.entries:
        anything = dict.fromkeys(entry.blanks, "x")
        takes_file(entry.words(anything))
        assert all(glob(str(shipped.root / pattern), recursive=True) for pattern in entry.covers), (
            entry.name
        )
        kind = next((word for word in entry.words(anything)[1:2] if word in RECORDS), "methods")
        if entry.table.columns and kind != "passes":
            pick(Saved("x", kind, RECORDS[kind]()), entry.table.grid, entry.table.columns)
        if entry.plot:
            assert kind in CHARTS[entry.plot.chart][0]
    kinds = {
        word
        for entry in shipped.entries
        for word in entry.words(dict.fromkeys(entry.blanks, "x"))[1:2]
        if not word.startswith("-")
    }
    assert kinds | {"methods"} == set(RECORDS), "every measurement has its place"


def test_the_documents_markers_are_the_shipped_plan_s(shipped: Plan) -> None:
    documents.check(shipped)


def test_methods_of_the_shipped_plan_are_all_presets(shipped: Plan) -> None:
    from quickbeam.bench.methods import parse_methods
    from quickbeam.presets import PRESETS

    for entry in shipped.only(["methods", "methods-warm"]):
        words = entry.words({})
        assert {
            item.method for item in parse_methods(words[words.index("--methods") + 1], drafter="x")
        } == set(PRESETS)


@pytest.mark.long
def test_a_tiny_plan_with_the_real_command_line(
    toy_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    )
    entries = """
root: ..
docs: [README.md]
entries:
  - name: heads
    title: Heads
    command: quickbeam bench heads --shapes 2048x32 --rows 1 --repeats 1
    minutes: 1
    covers: [src/**]
  - name: broken
    title: Broken
    command: quickbeam bench --model {model} --questions nowhere.jsonl
    minutes: 1
    covers: [src/**]
  - name: methods
    title: Methods
    command: quickbeam bench --model {model} --methods ar,pld,logitspec --limit 2 --max-tokens 8
    table: {columns: [identical]}
    plot: speed
    minutes: 1
    covers: [src/**]
"""
    place.write("benchmarks/plan.yaml", entries)
    place.write(
        "README.md",
        "<!-- report: methods -->\n<!-- /report -->\n<!-- report: heads -->\n<!-- /report -->\n",
    )
    result = place.run("--set", f"model={toy_folder}", code=1)
    assert (
        "failed: --questions nowhere.jsonl: no such file" in result.stdout
        and result.stdout.count("done in") == 2
    )
    text, record = place.read("README.md"), place.record("methods")
    answered = record["methods"]["pld"]["prompts"]  # the toy's context is short for some questions
    assert (
        answered
        and f"| pld | {answered}/{answered} |" in text
        and "2048x32" in text
        and "](images/benchmark-methods.svg)" in text
    )
    assert toy_folder not in place.read("benchmarks/methods.json") and record["methods"]["pld"][
        "accepted"
    ].keys() == {"ngram"}
    page = CliRunner().invoke(
        app,
        ["bench", "report", *glob(str(place.records / "*.json")), "--out", str(tmp_path / "page")],
    )
    assert page.exit_code == 0 and "pld" in (tmp_path / "page" / "index.html").read_text(
        encoding="utf-8"
    )


BEFORE = '''"""What it is."""

def double(x):
    """Twice as much."""
    if x:  # not nothing
        x = 2 * x
        print("# no comment")
    return x
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("What it is.", "What it was,\nand is.", True),
        ('    """Twice as much."""\n', "", True),
        ("  # not nothing", "", True),
        ("\n    return", "\n\n    # so much\n    return", True),
        ("x = 2 * x", "x = (\n            2\n            * x\n        )", True),
        ('"# no comment"', '"# no " "comment"', True),
        ("        print", "    print", False),
        ("# no comment", "# some comment", False),
        ("2 * x", "3 * x", False),
        ("return x\n", "return x\nreturn (", False),  # no longer Python
    ],
)
def test_figures_are_as_old_as_what_the_code_does(
    old: str, new: str, same: bool, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text(BEFORE)
    first = digest(tmp_path, ["*.py"])
    assert BEFORE.count(old) == 1
    (tmp_path / "code.py").write_text(BEFORE.replace(old, new))
    assert (digest(tmp_path, ["*.py"]) == first) is same
