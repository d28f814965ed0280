"""What a release consists of says the same everywhere."""

import re
from pathlib import Path

import pytest
import yaml

from quickbeam import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")


def test_the_changelog_and_the_citation_name_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", text, re.M)
    assert released[0] == __version__ and len(released) > 1
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__


def test_workflows_ask_for_targets_that_there_are():
    made = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    ) | {"docs"}
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), path.name
                assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= made, path.name


def test_the_oldest_python_that_is_promised_is_tested():
    workflow = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    )
    versions = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={versions[0]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


def test_the_image_is_given_what_its_build_reads():
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.findall(r"^COPY ([^-\n].*) ", image, re.M)
    copied = {word for line in lines for word in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    files = re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', declared, re.M)
    assert len(files) == 2 and {*files, "pyproject.toml", "hatch_build.py", "src"} <= copied
