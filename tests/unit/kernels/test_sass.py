"""sass.py: faults that it must find in machine code, and correct code that it must accept. Needs no GPU."""

import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.unit.kernels import sass

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the ptxas and cuobjdump of triton")

WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
ONE_LEFT = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
MATMUL = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0"


def listing(*lines: str) -> str:
    """Text as cuobjdump prints it. A line `name:` stands for the address of the next line, in branches."""
    labels: dict[str, str] = {}
    code: list[str] = []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = f"{16 * len(code):#x}"
        else:
            code.append(line)
    text = "\tcode for sm_90a\n\t\tFunction : kernel\n"
    for i, line in enumerate(code):
        for name, address in labels.items():
            line = re.sub(rf"\b{name}\b", address, line)
        text += f"        /*{16 * i:04x}*/                   {line} ;    /* 0x0000000000007918 */\n"
    return text


def code_of(*lines: str) -> sass.Code:
    (code,) = sass.parse(listing(*lines))
    return code


def loop(*body: str, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> sass.Code:
    return code_of(*before, "again:", *body, "@P0 BRA again", *after, "EXIT")


def test_instructions_are_parsed() -> None:
    assert code_of("@!P1 LDS.64 R8, [R5+UR12+0x30]", "NOP", "BRA 0x20").instructions == [
        sass.Instruction(0x00, "!P1", "LDS.64", ("R8", "[R5+UR12+0x30]")),
        sass.Instruction(0x10, "", "NOP", ()),
        sass.Instruction(0x20, "", "BRA", ("0x20",)),
    ]


@pytest.mark.parametrize(
    ("line", "writes"),
    [
        ("FFMA R8, R6.reuse, R94, -R8", range(8, 9)),
        ("CS2R R24, SRZ", range(24, 26)),
        ("LDS.128 R4, [UR5+0x10]", range(4, 8)),
        ("LDSM.16.M88.4 R88, [R11+UR11+0x80]", range(88, 92)),
        ("STS.64 [R3+UR4], R88", range(0)),
        ("STG.E desc[UR6][R2.64], R9", range(0)),
        ("IMAD.WIDE R4, R6, 0x4, R8", range(4, 6)),
        ("SHFL.BFLY PT, R5, R4, 0x1, 0x1f", range(5, 6)),
        ("LOP3.LUT P0, R7, R8, 0x3, RZ, 0xc0, !PT", range(7, 8)),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", range(0)),
        ("R2UR UR4, R5", range(0)),
        ("BRX R4 -0x1a0", range(0)),
        ("HGMMA.64x8x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0", range(24, 28)),
        ("HGMMA.64x16x16.F16 R24, gdesc[UR4].tnspA, RZ, !UPT", range(24, 28)),
    ],
)
def test_registers_that_an_instruction_writes(line: str, writes: range) -> None:
    assert code_of(line).instructions[0].writes == writes


@pytest.mark.parametrize(
    ("line", "operand"),
    [
        ("HGMMA.64x64x16.F32.BF16 R152, R76, gdesc[UR48].tnspB, R152", range(76, 80)),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR40].tnspA.tnspB, R24", range(0)),
        ("FADD R24, R88, R4", range(0)),
    ],
)
def test_a_is_in_registers_or_in_shared_memory(line: str, operand: range) -> None:
    assert code_of(line).instructions[0].a_operand == operand


POLL = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R6"
LOOPS = {
    # A wait that ptxas moved to the end belongs to its loop; without a loop around it, it makes none.
    "wait_moved_to_the_end": (
        [
            *("again:", POLL, "@!P0 BRA sleep", "on:", MATMUL, "@P1 BRA again", "@!P0 BRA doze", "further:", MATMUL),
            *("EXIT", "sleep:", POLL, "@!P0 BRA sleep", "BRA on", "doze:", "BRA further"),
        ],
        [(0, 7)],
    ),
    "innermost_with_matmuls": (
        ["outer:", MATMUL, "inner:", MATMUL, "spin:", "@P2 BRA spin", "@P1 BRA inner", "@P0 BRA outer", "EXIT"],
        [(0x10, 3)],
    ),
    # Warp-specialised kernels begin with a jump by a table.
    "behind_a_jump_table": (
        ["BRX R4 -0x10", "EXIT", "one:", MATMUL, "@P0 BRA one", "EXIT", "two:", MATMUL, "@P0 BRA two", "EXIT"],
        [(0x20, 2), (0x50, 2)],
    ),
}


@pytest.mark.parametrize(("lines", "expected"), LOOPS.values(), ids=list(LOOPS))
def test_loops(lines: list[str], expected: list[tuple[int, int]]) -> None:
    assert [(loop.address, len(loop.body)) for loop in code_of(*lines).innermost] == expected


FIRST = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24"
SECOND = "HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR8], R24, gsb0"
OTHER = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR12], R56, gsb0"
PACK = "F2FP.BF16.F32.PACK_AB R88, R3, R4"


@pytest.mark.parametrize(
    ("lines", "in_time"),
    [
        ([FIRST, SECOND, WAIT, PACK], True),
        ([FIRST, SECOND, PACK, WAIT], False),
        ([FIRST, PACK.replace("R88", "R91"), SECOND, WAIT], False),
        ([FIRST, SECOND, ONE_LEFT, PACK, WAIT], False),
        ([FIRST, SECOND, OTHER, ONE_LEFT, PACK, WAIT], True),
        ([FIRST, WAIT, PACK, SECOND], False),
        ([FIRST, SECOND.replace("R24", "R88"), WAIT], True),
    ],
)
def test_an_operand_is_overwritten_while_it_is_read(lines: list[str], in_time: bool) -> None:
    found = sass.overwritten_operands(code_of(*lines, "EXIT"))
    assert found == [] if in_time else found[0].startswith(f"{FIRST} at 0x0 may still read what F2FP")


def test_the_next_iteration_overwrites_an_operand() -> None:
    """Triton 3.7 and ptxas 12.8 on `acc = tl.dot(a + 1, b, acc)` in a pipelined loop, shortened: the wait at
    its end leaves the second group in flight, whose A the next iteration loads."""
    body = [
        "LDSM.16.M88.4 R104, [R11+UR11+0x18000]",
        "LDSM.16.M88.4 R88, [R11+UR11+0x18080]",
        "HGMMA.64x128x16.F32.BF16 R24, R104, gdesc[UR16].tnspB, R24, gsb0",
        ONE_LEFT,
        "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0",
    ]
    (finding,) = sass.overwritten_operands(loop(*body, ONE_LEFT))
    assert re.search(r"R24, R88, .* may still read what LDSM.16.M88.4 R88, ", finding)
    assert sass.overwritten_operands(loop(*body, WAIT)) == []


ARRIVE = "@!P1 SYNCS.ARRIVE.TRANS64 RZ, [UR6+0x30], RZ"
SYNC = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ([MATMUL, WAIT, ARRIVE], True),
        ([MATMUL, SYNC, WAIT, ARRIVE], True),
        ([MATMUL, WAIT, "BAR.ARV 0x2, 0x80", ARRIVE], True),
        ([MATMUL, WAIT, SYNC, ARRIVE], False),
        ([ARRIVE, MATMUL, WAIT], True),  # in the next iteration
        ([ARRIVE, MATMUL, WAIT, SYNC], False),
        ([MATMUL, WAIT, "@P2 BRA on", SYNC, "on:", ARRIVE], True),
    ],
)
def test_an_arrival_may_come_before_other_warps_have_waited(lines: list[str], early: bool) -> None:
    found = sass.early_arrivals(loop(*lines))
    assert bool(found) == early
    assert all(re.search(r"SYNCS.ARRIVE.* may come before other warps are through WARPGROUP", line) for line in found)


def test_spills_count_in_loops_with_matmuls() -> None:
    code = loop("LDL.LU R5, [R1+0x4]", MATMUL, WAIT, before=("STL.64 [R1], R4",), after=("LDL R6, [R1]",))
    assert [instruction.opcode for instruction in sass.spills_in_loops(code)] == ["LDL.LU"]
    assert sass.spills_in_loops(loop("STL [R1], R4", "FADD R4, R4, R5")) == []


PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 place, .param .u64 tile, .param .u32 count) .maxntid 128
{
    .reg .pred %again, %add;
    .reg .b32 %a<4>, %i;
    .reg .f32 %d<4>;
    .reg .b64 %place, %tile;
    ld.param.u64 %place, [place];
    ld.param.u64 %tile, [tile];
    ld.param.u32 %i, [count];
    ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%place];
    ld.global.v4.f32 {%d0, %d1, %d2, %d3}, [%place + 16];
    setp.eq.b32 %add, 0, 0;
again:
    .pragma "nounroll";
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, %tile, %add, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    add.f32 %d0, %d0, 0f3f800000;
    add.s32 %i, %i, -1;
    setp.ne.s32 %again, %i, 0;
    @%again bra again;
    st.global.v4.f32 [%place], {%d0, %d1, %d2, %d3};
    ret;
}
"""
"""A matmul in a loop, with A in registers."""


def read(ptx: str) -> sass.Report:
    cubin, _ = sass.assemble(ptx)
    return sass.read(SimpleNamespace(asm={"ptx": ptx, "cubin": cubin}, metadata=SimpleNamespace(shared=512)))


@needs_triton
def test_report_on_a_kernel() -> None:
    report = read(PTX)
    assert (report.shared, report.stack, report.spills_in_loops) == (512, 0, 0)
    assert 8 < report.registers < 128
    assert (report.loops, report.wgmma, report.tma, report.setmaxnreg) == (1, 1, 0, 0)
    assert (report.hazards, report.remarks) == ((), ())


@needs_triton
def test_report_has_the_remarks_of_ptxas() -> None:
    (remark,) = read(PTX.replace("wgmma.wait_group.sync.aligned 0;", "")).remarks
    assert re.match(r"\(C75\d\d\) ", remark)


@needs_triton
def test_an_overwritten_operand_is_found_in_real_code() -> None:
    """A write between a matmul and the wait for it."""
    text = sass.disassemble(sass.assemble(PTX)[0])
    (code,) = sass.parse(text)
    (matmul,) = (x for x in code.instructions if x.is_matmul)
    for register in matmul.a_operand:
        line = f"        /*{matmul.address + 8:04x}*/    VIADD R{register}, R{register}, 0xffffffff ;"
        (changed,) = sass.parse(re.sub(rf"(.*/\*{matmul.address:04x}\*/ .*\n)", rf"\1{line}\n", text))
        (finding,) = sass.overwritten_operands(changed)
        assert f"may still read what VIADD R{register}" in finding
