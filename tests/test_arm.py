"""The kernels' tests again on ARM64, by an emulator: with bfloat16 and byte products of the
processor, and without."""

from pathlib import Path

import pytest

import foreign

CPUS = {"neon-bf16": "max", "neon-dot": "neoverse-n1", "neon": "cortex-a53"}
HERE = Path(__file__).parent
EVERY_SET = [path for path in HERE.glob("test_*.py") if "\n@every_set" in path.read_text("utf-8")]
FILES = sorted(str(path) for path in (*EVERY_SET, HERE / "test_recurrent.py"))
# In the tests' names `plain` is the set that the emulated kernels stand for. What is left out takes
# minutes there, and has smaller siblings that run.
TESTS = ("-m", "not long", "-k", "plain and not 5002 and not 217")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(foreign.reason_against()), reason=foreign.reason_against()),
]


@pytest.mark.parametrize("isa", CPUS)
def test_the_tests_of_the_kernels_pass_on_arm(isa, tmp_path):
    done = foreign.run(foreign.compiled(isa), CPUS[isa], tmp_path, *TESTS, *FILES)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 1000, done.stdout


def test_a_mistake_on_arm_is_seen(tmp_path):
    """A processor without products of bytes stops at the first of them."""
    done = foreign.run(
        foreign.compiled("neon-dot"),
        "cortex-a53",
        tmp_path,
        "-k",
        "plain and int8",
        "-x",
        str(HERE / "test_native_experts.py"),
    )
    assert done.returncode == 1 and "ended the driver" in done.stdout, done.stdout[-2000:]
