"""What a release consists of says the same everywhere."""

import re

import pytest
import yaml

from docs import ROOT, read
from quickbeam import __version__

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")


def test_a_release_names_its_version_python_and_files():
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), re.M)
    assert released[0] == __version__ and len(released) > 1
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
    workflow = yaml.safe_load(read(".github/workflows/tests.yml"))
    versions = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={versions[0]}"' in read("pyproject.toml")
    lines = re.findall(r"^COPY ([^-\n].*) ", read("deploy/Dockerfile"), re.M)
    copied = {word for line in lines for word in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    files = re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', read("pyproject.toml"), re.M)
    assert len(files) == 2 and {*files, "pyproject.toml", "hatch_build.py", "src"} <= copied
    made = {*re.findall(r"^([a-z-]+):", read("Makefile"), re.M), "docs"}
    for path in WORKFLOWS:
        workflow = yaml.safe_load(read(path))
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), path.name
                assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= made, path.name
