"""The kernels' tests again on other platforms: on ARM64 by an emulator, with bfloat16 and byte
products of the processor and without; for Windows by Wine."""

import struct
from pathlib import Path

import pytest

import foreign
from foreign import ARM, WINDOWS
from quickbeam.models.native import build

CPUS = {"neon-bf16": "max", "neon-dot": "neoverse-n1", "neon": "cortex-a53"}
HERE = Path(__file__).parent
EVERY_SET = [path for path in HERE.glob("test_*.py") if "\n@every_set" in path.read_text("utf-8")]
FILES = sorted(str(path) for path in (*EVERY_SET, HERE / "test_recurrent.py"))
# In the tests' names `plain` is the set that the other platform's kernels stand for. What is left
# out takes minutes in the emulator, and has smaller siblings that run.
TESTS = ("-m", "not long", "-k", "plain and not 5002 and not 217")

pytestmark = pytest.mark.long
on_arm, on_windows = (
    pytest.mark.skipif(bool(reason := machine.reason_against()), reason=reason)
    for machine in (ARM, WINDOWS)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where Wine keeps its Windows, which it takes a while to make."""
    return tmp_path_factory.mktemp("foreign")


def options(cpu):
    return ["-cpu", cpu, "-L", "/usr/aarch64-linux-gnu"]


def all_pass(done):
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 1000, done.stdout


@on_arm
@pytest.mark.parametrize("isa", CPUS)
def test_the_tests_of_the_kernels_pass_on_arm(isa, folder):
    all_pass(foreign.run(ARM, ARM.compiled(isa), options(CPUS[isa]), folder, *TESTS, *FILES))


@on_windows
@pytest.mark.parametrize("isa", build.PLATFORMS["win32", "amd64"])
def test_the_tests_of_the_kernels_pass_on_windows(isa, folder):
    if not build.NEEDS[isa] <= build.features():
        pytest.skip("this processor does not have it")
    all_pass(foreign.run(WINDOWS, WINDOWS.compiled(isa), (), folder, *TESTS, *FILES))


@on_arm
def test_a_mistake_on_arm_is_seen(folder):
    """A processor without products of bytes stops at the first of them."""
    few = ("-k", "plain and (int8 or softmax)", "-x", str(HERE / "test_native_experts.py"))
    done = foreign.run(ARM, ARM.compiled("neon-dot"), options("cortex-a53"), folder, *few)
    assert done.returncode == 1 and "ended the driver" in done.stdout, done.stdout[-2000:]


@on_windows
def test_a_mistake_on_windows_is_seen(folder, tmp_path):
    """A constant of the exponential has the wrong sign."""
    right, wrong = WINDOWS.compiled("plain").read_bytes(), tmp_path / "plain.dll"
    constants = (struct.pack("<f", sign * 6.931472029e-1) for sign in (1, -1))
    wrong.write_bytes(right.replace(*constants))
    assert wrong.read_bytes() != right
    some = ("-k", "plain and gate", "-x", str(HERE / "test_native_kernels.py"))
    done = foreign.run(WINDOWS, wrong, (), folder, *some)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-2000:]
    assert "ended the driver" not in done.stdout, done.stdout[-2000:]
