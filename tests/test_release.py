"""What a release consists of says the same everywhere."""

import re

import pytest
import yaml

from docs import ROOT, read
from quickbeam import __version__

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")


def test_the_changelog_and_the_citation_name_this_version():
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), re.M)
    assert released[0] == __version__ and len(released) > 1
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__


def test_workflows_ask_for_targets_that_there_are():
    made = {*re.findall(r"^([a-z-]+):", read("Makefile"), re.M), "docs"}
    for path in WORKFLOWS:
        workflow = yaml.safe_load(read(path))
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), path.name
                assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= made, path.name


def test_the_oldest_python_that_is_promised_is_tested():
    workflow = yaml.safe_load(read(".github/workflows/tests.yml"))
    versions = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={versions[0]}"' in read("pyproject.toml")


def test_the_image_is_given_what_its_build_reads():
    lines = re.findall(r"^COPY ([^-\n].*) ", read("deploy/Dockerfile"), re.M)
    copied = {word for line in lines for word in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    files = re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', read("pyproject.toml"), re.M)
    assert len(files) == 2 and {*files, "pyproject.toml", "hatch_build.py", "src"} <= copied
