"""Limits of the compiled kernels, checked on the rows of tests/golden/kernel_resources.txt, and a sample of the rows
compiled again. Needs no GPU."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import ROOT, clean_env, execute

if find_spec("triton") is None or find_spec("triton.experimental.gluon") is None:
    pytest.skip("needs triton with Gluon", allow_module_level=True)

import triton

from cs336_systems.kernels.flash.tiles import BLOCK_DIMS, SHARED_MEMORY
from tests.golden import kernel_resources as resources

GOLDEN = resources.load()
OLDER = ROOT / ".triton-3.6"
HOUR = 3600.0
"""Compiling takes 30 s of processor time; a busy machine must not fail it."""
ALLOWED_SPILLS_IN_LOOPS = {
    ("backward", "bf16", "64", "sliding", "1"): 2,
    ("backward", "bf16", "96", "causal", "4"): 36,
    ("forward", "bf16", "128", "far", "4"): 12,
}
"""Hopper kernel, dtype, head dim, mask, group -> spill instructions in its loops, most of them in those of the few
tiles that a mask cuts: the positions of queries and keys take registers. At d 96 the accumulators are two, and the main
loop of a warpgroup that visits several heads has ten."""

same_triton = pytest.mark.skipif(
    triton.__version__ != GOLDEN.triton, reason=f"the golden file was written with Triton {GOLDEN.triton}"
)


def rows(section):
    return pytest.mark.parametrize("row", GOLDEN.rows[section], ids=lambda row: "-".join(list(row.values())[:8]))


def check_hopper(row):
    """No hazard in the machine code, nothing that made ptxas serialise matmuls, and the instructions of Hopper GPUs."""
    key = tuple(row[name] for name in ("kernel", "dtype", "d", "mask", "group"))
    assert (row["hazards"], row["remarks"]) == ("0", "0"), row
    assert all(int(row[name]) > 0 for name in ("loops", "wgmma", "tma", "barriers", "setmaxnreg")), row
    assert int(row["spills_in_loops"]) <= ALLOWED_SPILLS_IN_LOOPS.get(key, 0), row


@same_triton
def test_the_golden_file_belongs_to_these_kernels():
    launches = resources.launches()
    if resources.fingerprint(launches) != GOLDEN.fingerprint:
        pytest.fail(f"kernels changed: {resources.REWRITE}", pytrace=False)
    for section, columns in resources.SECTIONS.items():
        expected = [list(launch.row.values()) for launch in launches if launch.section == section]
        found = [[row[name] for name in columns] for row in GOLDEN.rows[section]]
        assert sorted(found) == sorted(expected), section


def test_a_reworded_kernel_has_the_same_fingerprint(tmp_path: Path):
    source = '@triton.jit\ndef kernel(x):\n    """One."""\n    tl.store(x, 1)  # why\n\ndef launch():\n    pass\n'
    reworded = source.replace("One.", "Two.").replace("  # why", "\n").replace("pass", "return None")
    changed = source.replace("x, 1", "x, 2")
    found = []
    for text in (source, reworded, changed, source.replace("@triton.jit\n", "")):
        (tmp_path / "kernel.py").write_text(text)
        found.append([resources.canonical(node) for node in resources.device_code(tmp_path / "kernel.py")])
    assert found[0] == found[1] != found[2]
    assert found[3] == []


def test_the_file_is_sorted_and_reads_back():
    assert resources.render(GOLDEN) == resources.FILE.read_text()
    assert all(own == sorted(own, key=resources._order) for own in GOLDEN.rows.values())


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_fit_shared_memory(arch):
    for section in GOLDEN.rows.values():
        assert [row for row in section if row["arch"] == arch and int(row["shared"]) > SHARED_MEMORY[arch]] == []


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_attention_spills_no_registers(arch):
    """None on sm_90, whose tiles were measured. Elsewhere fp32, whose three TF32 matmuls keep both halves of their
    operands in registers, and calls without a tile of their own may spill: windows, grouped heads, padded head dims."""
    own = [row for row in GOLDEN.rows["portable attention"] if row["arch"] == arch and row["stack"] != "0"]
    plain = [row for row in own if row["dtype"] == "bf16" and row["group"] == "1" and int(row["d"]) in BLOCK_DIMS]
    assert (own if arch == "sm_90" else plain) == []


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_pointwise_kernels_spill_no_registers(arch):
    own = [row for row in GOLDEN.rows["pointwise"] if row["arch"] == arch]
    assert len({row["kernel"] for row in own}) == 11
    assert [row for row in own if row["stack"] != "0"] == []


@rows("Hopper attention")
def test_machine_code_of_hopper_kernels(row):
    check_hopper(row)


def compile_sample(python: Path | str, *sections: str, **env: str):
    """Compile in another process, which has no real driver."""
    command = (python, "-m", "tests.golden.kernel_resources", "--sample", *sections)
    done = execute(*command, cwd=ROOT, timeout=HOUR, env=clean_env(**env))
    assert done.returncode == 0, done.stderr[-2000:]
    return resources.load(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
@pytest.mark.xdist_group("ranks")
@same_triton
def test_a_sample_compiles_to_the_rows_of_the_golden_file(forked_python):
    found = compile_sample(forked_python).rows
    assert {row["arch"] for own in found.values() for row in own} == set(SHARED_MEMORY)
    for section, own in found.items():
        assert [row for row in own if row not in GOLDEN.rows[section]] == [], resources.REWRITE


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
@pytest.mark.skipif(not OLDER.exists(), reason="`make older-triton` installs it beside the other")
def test_attention_compiled_by_the_oldest_supported_triton():
    """Names in Gluon still change from one version to the next, and so does what a device function may return."""
    found = compile_sample(sys.executable, "Hopper attention", "portable attention", PYTHONPATH=str(OLDER))
    assert found.triton == "3.6.0"
    assert found.rows["portable attention"]
    for row in found.rows["Hopper attention"]:
        check_hopper(row)


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
def test_tiles_are_not_transposed_by_matrix_instructions():
    """Triton puts words in wrong places where it transposes them by ldmatrix: see fp8_triton.TILE."""
    done = execute(sys.executable, "-m", "tests.unit.kernels.transposed_ptx", cwd=ROOT, timeout=HOUR, env=clean_env())
    assert done.stdout.split() == ["st.shared", "ld.shared"], done.stderr[-2000:]
