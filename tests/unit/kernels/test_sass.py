"""Reading machine code: what sass.py must find, and what it must let pass. Needs no GPU."""

import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.unit.kernels import sass

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the ptxas and cuobjdump of triton")

WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0"
SET = ["LDS.128 R88, [R2]"]
PACK = [f"F2FP.BF16.F32.PACK_AB R{88 + i}, R{5 + i}, R{9 + i}" for i in range(4)]
"""A of the product: loaded, and made of other numbers."""


def listing(*lines: str) -> str:
    """As cuobjdump prints it. A line `name:` stands for the address of the next, in branches."""
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
        text += " " * 80 + "/* 0x000fe20000000000 */\n"
    return text


def loop(*body: str, before: list[str] = SET, after: tuple[str, ...] = ()) -> str:
    return listing(*before, "again:", *body, "@P0 BRA again", *after, "EXIT")


def code_of(text: str) -> sass.Code:
    (code,) = sass.parse(text).values()
    return code


# -- instructions -----------------------------------------------------------------------------------------------------


def test_instructions_are_taken_apart() -> None:
    (name, code), *others = sass.parse(listing("@!P1 LDS.64 R8, [R5+UR12+0x30]", "NOP", "BRA 0x20")).items()
    assert (name, others) == ("kernel", [])
    assert code.instructions == [
        sass.Instruction(0x00, "!P1", "LDS.64", ("R8", "[R5+UR12+0x30]")),
        sass.Instruction(0x10, "", "NOP", ()),
        sass.Instruction(0x20, "", "BRA", ("0x20",)),
    ]


@pytest.mark.parametrize(
    ("line", "writes", "reads"),
    [
        ("FFMA R8, R6.reuse, R94, -R8", {8}, {6, 94, 8}),
        ("CS2R R24, SRZ", {24, 25}, set()),
        ("LDS.128 R4, [UR5+0x10]", {4, 5, 6, 7}, set()),
        ("LDSM.16.M88.4 R88, [R11+UR11+0x80]", {88, 89, 90, 91}, {11}),
        ("STS.64 [R3+UR4], R88", set(), {3, 88, 89}),
        ("STG.E desc[UR6][R2.64], R9", set(), {2, 3, 9}),
        ("IMAD.WIDE R4, R6, 0x4, R8", {4, 5}, {6, 8, 9}),
        ("SHF.R.U64 R4, R6, 0x3, RZ", {4}, {6}),
        ("SHFL.BFLY PT, R5, R4, 0x1, 0x1f", {5}, {4}),
        ("LOP3.LUT P0, R7, R8, 0x3, RZ, 0xc0, !PT", {7}, {8}),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", set(), {4, 5}),
        ("R2UR UR4, R5", set(), {5}),
        ("BRX R4 -0x1a0", set(), {4}),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11+0x40], R6", set(), {6}),
        ("HGMMA.64x8x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0", {24, 25, 26, 27}, {24, 25, 26, 27}),
        ("HGMMA.64x16x16.F16 R24, gdesc[UR4].tnspA, RZ, !UPT", {24, 25, 26, 27}, set()),
    ],
)
def test_registers_written_and_read(line: str, writes: set[int], reads: set[int]) -> None:
    (instruction,) = code_of(listing(line)).instructions
    assert (set(instruction.writes), instruction.reads) == (writes, reads)


@pytest.mark.parametrize(
    ("line", "operand"),
    [
        (PRODUCT, range(88, 92)),
        ("HGMMA.64x64x16.F32.BF16 R152, R76, gdesc[UR48].tnspB, R152", range(76, 80)),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR40].tnspA.tnspB, R24", range(0)),
        ("FADD R24, R88, R4", range(0)),
    ],
)
def test_a_comes_from_registers_or_from_shared_memory(line: str, operand: range) -> None:
    (instruction,) = code_of(listing(line)).instructions
    assert instruction.a_operand == operand


# -- loops ------------------------------------------------------------------------------------------------------------


def addresses(loops: list[sass.Loop]) -> list[tuple[int, int]]:
    """First one, and how many instructions."""
    return [(loop.address, len(loop.body)) for loop in loops]


def test_a_wait_moved_to_the_end_belongs_to_the_loop_and_makes_none() -> None:
    """As ptxas lays out mbarrier.wait; in the second half the same, with no loop around it."""
    code = code_of(
        listing(
            "again:",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R6",
            "@!P0 BRA sleep",
            "on:",
            PRODUCT,
            "@P1 BRA again",
            "@!P0 BRA doze",
            "further:",
            PRODUCT,
            "EXIT",
            "sleep:",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R6",
            "@!P0 BRA sleep",
            "BRA on",
            "doze:",
            "BRA further",
        )
    )
    assert addresses(code.loops) == [(0, 7)]


def test_the_innermost_loops_with_products_are_found() -> None:
    code = code_of(
        listing(
            "outer:",
            PRODUCT,
            "inner:",
            PRODUCT,
            "spin:",
            "@P2 BRA spin",
            "@P1 BRA inner",
            "@P0 BRA outer",
            "EXIT",
        )
    )
    assert addresses(code.loops) == [(0x00, 5), (0x10, 3)]
    assert addresses(code.innermost) == [(0x10, 3)]


def test_loops_behind_a_jump_by_a_table_are_found() -> None:
    """Warpgroups with tasks of their own begin with one."""
    one, two = (["EXIT", f"{name}:", PRODUCT, f"@P0 BRA {name}"] for name in ("one", "two"))
    code = code_of(listing("BRX R4 -0x10", *one, *two, "EXIT"))
    assert addresses(code.innermost) == [(0x20, 2), (0x50, 2)]


# -- operands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (["FMUL R89, R3, R4", "FADD R5, R5, R89"], "by FMUL R89, R3, R4 at 0x30, which makes no 16-bit numbers"),
        (["MUFU.EX2 R91, R3"], "MUFU.EX2"),
        (["@P1 IADD3 R90, R3, R4, RZ"], "IADD3"),
        (["IMAD.WIDE R90, R3, 0x4, RZ"], "IMAD.WIDE"),
        (["HGMMA.64x64x16.F32.BF16 R64, gdesc[UR8], RZ, !UPT, gsb0", WAIT], "HGMMA.64x64x16.F32.BF16 R64"),
        (["LDS.64 R88, [R6]", "FADD R5, R88, R89"], "LDS.64 R88, [R6] at 0x30, which is made for FADD R5, R88, R89"),
        (["F2FP.BF16.F32.PACK_AB R88, R3, R4", "STS [R6], R88"], "which is made for STS [R6], R88"),
        (
            [*PACK, "HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR8], R56, gsb0", WAIT],
            "which is made for HGMMA.64x64x16.F32.BF16 R56",
        ),
        (["MOV R7, R3", "FADD R7, R7, R4", "MOV R88, R7"], "R88, set before the loop and overwritten by FADD R7"),
        (["MOV R88, R6"], "becomes a copy of R6"),
        (["F2FP.BF16.F32.PACK_AB R90, R3, R4"], "R88, set before the loop, together with what is not: F2FP"),
    ],
)
def test_an_operand_from_before_the_loop_is_overwritten(body: list[str], why: str) -> None:
    (finding,) = sass.overwritten_operands(loop(PRODUCT, WAIT, *body))
    assert finding.startswith(f"loop at 0x10: {PRODUCT} at 0x10 reads R")
    assert why in finding


def test_an_operand_is_overwritten_ahead_of_its_product() -> None:
    (finding,) = sass.overwritten_operands(loop("IMAD.U32 R90, RZ, RZ, UR6", "R2UR UR8, R90", PRODUCT, WAIT))
    assert "reads R90, written by IMAD.U32 R90" in finding


def test_the_source_of_a_copied_operand_is_overwritten() -> None:
    copies = [f"IMAD.MOV.U32 R{88 + i}, RZ, RZ, R{200 + i}" for i in range(4)]
    assert sass.overwritten_operands(loop(*copies, PRODUCT, WAIT)) == []
    (finding,) = sass.overwritten_operands(loop(*copies, PRODUCT, WAIT, "FADD R202, R3, R4", "FMUL R5, R202, R5"))
    assert "reads R90, set before the loop and overwritten by FADD R202" in finding


def test_an_operand_is_overwritten_outside_the_inner_loop() -> None:
    around = ["outer:", "inner:", PRODUCT, WAIT, "@P1 BRA inner"]
    assert sass.overwritten_operands(listing(*SET, *around, "@P0 BRA outer", "EXIT")) == []
    (finding,) = sass.overwritten_operands(listing(*SET, *around, "FADD R88, R3, R4", "@P0 BRA outer", "EXIT"))
    assert "set before the loop and overwritten by FADD R88" in finding


@pytest.mark.parametrize(
    "body",
    [
        pytest.param([PRODUCT, WAIT, "FADD R92, R3, R4", "FADD R87, R3, R4"], id="as before the loop"),
        pytest.param([PRODUCT, WAIT, *PACK], id="the weights of the tile before"),
        pytest.param([PRODUCT, WAIT, "FADD R90, R3, R4", "FMUL R9, R90, R4", *PACK], id="free for a while"),
        pytest.param([PRODUCT, WAIT, "LDSM.16.M88.4 R88, [R11]"], id="loaded for the next iteration"),
        pytest.param(
            [PRODUCT, WAIT, *(f"PRMT R{8 + i}, R3, 0x5410, R4" for i in range(4))]
            + [f"IMAD.MOV.U32 R{88 + i}, RZ, RZ, R{8 + i}" for i in range(4)],
            id="by copies",
        ),
        pytest.param([*PACK, "STS.128 [R6], R88", PRODUCT, WAIT], id="of the same iteration, and stored"),
        pytest.param(
            ["LDL.64 R90, [R1]", PRODUCT, WAIT, "FADD R90, R3, R4", "FMUL R5, R90, R5"], id="half of it reloaded"
        ),
        pytest.param([PRODUCT.replace("R88, ", ""), WAIT, "FADD R88, R3, R4"], id="from shared memory"),
    ],
)
def test_operands_that_are_as_they_should_be(body: list[str]) -> None:
    assert sass.overwritten_operands(loop(*body)) == []


def test_single_numbers_are_operands_of_tf32() -> None:
    body = ["LDS.128 R88, [R6]", *(f"FADD R{88 + i}, R{88 + i}, R4" for i in range(4)), PRODUCT, WAIT]
    assert len(sass.overwritten_operands(loop(*body))) == 1
    assert sass.overwritten_operands(loop(*body).replace("x16.F32.BF16", "x8.F32.TF32")) == []


FIRST = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24"
SECOND = "HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR8], R24, gsb0"
OTHER = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR12], R56, gsb0"
ONE_LEFT = "WARPGROUP.DEPBAR.LE gsb0, 0x1"


@pytest.mark.parametrize(
    ("lines", "in_time"),
    [
        ([FIRST, SECOND, WAIT, "F2FP.BF16.F32.PACK_AB R88, R3, R4"], True),
        ([FIRST, SECOND, "F2FP.BF16.F32.PACK_AB R88, R3, R4", WAIT], False),
        ([FIRST, "F2FP.BF16.F32.PACK_AB R91, R3, R4", SECOND, WAIT], False),
        ([FIRST, SECOND, ONE_LEFT, "F2FP.BF16.F32.PACK_AB R88, R3, R4", WAIT], False),
        ([FIRST, SECOND, OTHER, ONE_LEFT, "F2FP.BF16.F32.PACK_AB R88, R3, R4", WAIT], True),
        ([FIRST, WAIT, "F2FP.BF16.F32.PACK_AB R88, R3, R4", SECOND], False),
        ([FIRST, SECOND.replace("R24", "R88"), WAIT], True),
    ],
)
def test_an_operand_is_written_to_while_it_is_read(lines: list[str], in_time: bool) -> None:
    found = sass.overwritten_operands(listing(*lines, "EXIT"))
    assert found == [] if in_time else found[0].startswith(f"{FIRST} at 0x0 may still read what F2FP")


def test_the_next_iteration_writes_to_an_operand_too_early() -> None:
    """What Triton 3.7 and ptxas 12.8 make of `acc = tl.dot(a + 1, b, acc)` in a pipelined loop, shortened: the wait at
    its end lets the second group go on, of which the next iteration loads A."""
    body = [
        "LDSM.16.M88.4 R104, [R11+UR11+0x18000]",
        "LDSM.16.M88.4 R88, [R11+UR11+0x18080]",
        *(f"HADD2.BF16_V2 R{i}, R{i}, 1, 1" for i in (104, 105, 106, 107, 88, 89, 90, 91)),
        "WARPGROUP.ARRIVE",
        "HGMMA.64x128x16.F32.BF16 R24, R104, gdesc[UR16].tnspB, R24, gsb0",
        ONE_LEFT,
        "WARPGROUP.ARRIVE",
        "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0",
        ONE_LEFT,
    ]
    (finding,) = sass.overwritten_operands(loop(*body, before=[]))
    assert re.search(r"R24, R88, .* may still read what LDSM.16.M88.4 R88, ", finding)
    assert sass.overwritten_operands(loop(*body[:-1], WAIT, before=[])) == []


# -- signals ----------------------------------------------------------------------------------------------------------

SIGNAL = "@!P1 SYNCS.ARRIVE.TRANS64 RZ, [UR6+0x30], RZ"
MEET = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ([PRODUCT, WAIT, SIGNAL], True),
        ([PRODUCT, MEET, WAIT, SIGNAL], True),
        ([PRODUCT, WAIT, "BAR.ARV 0x2, 0x80", SIGNAL], True),
        ([PRODUCT, WAIT, MEET, SIGNAL], False),
        ([SIGNAL, PRODUCT, WAIT], True),  # in the next iteration
        ([SIGNAL, PRODUCT, WAIT, MEET], False),
        ([PRODUCT, WAIT, "@P2 BRA on", MEET, "on:", SIGNAL], True),
    ],
)
def test_a_signal_may_come_before_other_warps_are_through(lines: list[str], early: bool) -> None:
    found = sass.early_signals(loop(*lines))
    assert bool(found) == early
    assert all(re.search(r"SYNCS.ARRIVE.* may come before other warps are through WARPGROUP", line) for line in found)


# -- spills -----------------------------------------------------------------------------------------------------------


def test_spills_are_told_apart_by_loops() -> None:
    text = loop("LDL.LU R5, [R1+0x4]", PRODUCT, WAIT, before=["STL.64 [R1], R4", *SET], after=("LDL R6, [R1]",))
    in_loops, outside = sass.spills(text)
    assert [i.opcode for i in in_loops] == ["LDL.LU"]
    assert [i.opcode for i in outside] == ["STL.64", "LDL"]


def test_spills_of_a_loop_without_products_are_outside() -> None:
    in_loops, outside = sass.spills(loop("STL [R1], R4", "FADD R4, R4, R5"))
    assert (len(in_loops), len(outside)) == (0, 1)


# -- compiled kernels -------------------------------------------------------------------------------------------------

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
"""A product in a loop, of an operand that stays in registers."""


def read(ptx: str) -> sass.Report:
    """As though Triton had compiled it."""
    cubin, _ = sass.assemble(ptx)
    return sass.read(SimpleNamespace(asm={"ptx": ptx, "cubin": cubin}, metadata=SimpleNamespace(shared=512)))


@needs_triton
def test_a_report_of_a_kernel() -> None:
    report = read(PTX)
    (size,) = report.loops
    assert (size.products, report.shared, report.stack) == (1, 512, 0)
    assert 8 < report.registers < 128
    assert 6 < size.instructions < 30
    assert (report.findings, report.remarks, report.spills_in_loops, report.spills_outside) == ((), (), 0, 0)


@needs_triton
def test_a_report_has_the_remarks_of_ptxas() -> None:
    (remark,) = read(PTX.replace("wgmma.wait_group.sync.aligned 0;", "")).remarks
    assert re.match(r"\(C75\d\d\) ", remark)


@needs_triton
def test_an_overwritten_operand_is_found_in_real_code() -> None:
    """After the wait, where ptxas would put it: the loop's counter, say, in a register of A."""
    text = sass.disassemble(sass.assemble(PTX)[0])
    code = code_of(text)
    (product,) = (code.instructions[i] for i in code.innermost[0].products)
    waits = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    assert text.count(waits) == 1
    for register in product.a_operand:
        line = f"        /*{product.address + 24:04x}*/    VIADD R{register}, R{register}, 0xffffffff ;"
        (finding,) = sass.overwritten_operands(re.sub(f"(.*{waits}.*\n)", rf"\1{line}\n", text))
        assert f"reads R{register}, set before the loop and overwritten by VIADD R{register}" in finding
