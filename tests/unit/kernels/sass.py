"""Reads the machine code (SASS) of Hopper kernels for faults that ptxas reports nowhere, and that tests rarely hit.

    report = read(kernel.warmup(..., grid=(1,)))
    assert not report.hazards, report.hazards

1. Operands overwritten early. A wgmma (HGMMA) reads its left operand A from four registers, asynchronously. Until 13.3
   ptxas may write to them while the tensor cores still read, where a loop waits for all but the last matmuls
   (https://github.com/triton-lang/triton/issues/9433). Results are wrong now and then. A that comes from shared memory
   has a descriptor (gdesc) in place of registers.
2. Early arrivals. One thread arrives at a barrier in shared memory (SYNCS.ARRIVE) for its warpgroup, which may tell the
   producer that the operands have been read. Each warp waits for its own matmuls (WARPGROUP.DEPBAR), so the four warps
   must synchronise in between (BAR.SYNC).
3. Spills: registers stored to the stack (STL) and loaded back (LDL), inside loops above all.
4. Remarks C7510 to C7520 of ptxas: it serialises the matmuls.

Not seen: writes by called functions, uniform registers (descriptors), accumulators. An opcode that is not known here
counts as writing one register.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)")
REMARK = re.compile(r"\(C75(?:1\d|20)\).*")
A_REGISTERS = 4
"""Registers of A: 64 rows and 32 bytes of columns, for every dtype."""

WRITES_NO_REGISTER = {"BAR", "BRX", "CALL", "JMX", "NANOSLEEP", "RET", "WARPSYNC"}
PREDICATE_FIRST = {"ATOM", "ATOMG", "ATOMS", "LOP3", "MATCH", "SHFL", "VOTE"}
"""Opcodes whose result may follow a predicate. In all others a register after a predicate is read."""
DOUBLES = {"DADD", "DFMA", "DMUL"}
ENDS = {"BRX", "EXIT", "JMX", "RET"}
"""Opcodes after which execution does not continue with the next instruction."""


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str
    """For example "P0" or "!P0"; empty where there is none."""
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)} at {self.address:#x}"

    @cached_property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @cached_property
    def is_matmul(self) -> bool:
        return self.name.endswith("GMMA")

    @cached_property
    def width(self) -> int:
        """Number of registers of the result."""
        parts = self.opcode.split(".")
        if self.is_matmul:
            columns = int(parts[1].split("x")[1])
            return columns // 4 if parts[2] == "F16" else columns // 2
        if self.name == "LDSM":
            return int(parts[-1]) if parts[-1].isdigit() else 1
        if self.name.startswith(("LD", "ATOM")):
            return 4 if "128" in parts else 2 if "64" in parts else 1
        if self.name == "CS2R":
            return 1 if "32" in parts else 2
        return 2 if "WIDE" in parts or self.name in DOUBLES else 1

    @cached_property
    def writes(self) -> range:
        """Registers that it writes."""
        operands = self.operands
        if self.name in PREDICATE_FIRST and operands and re.match(r"!?P", operands[0]):
            operands = operands[1:]
        if self.name in WRITES_NO_REGISTER or not operands:
            return range(0)
        return _registers(operands[0], self.width)

    @cached_property
    def a_operand(self) -> range:
        """Registers of A, where a matmul reads it from registers."""
        return _registers(self.operands[1], A_REGISTERS) if self.is_matmul else range(0)

    @cached_property
    def target(self) -> int | None:
        """Address that a branch goes to."""
        found = re.fullmatch(r"0x([0-9a-f]+)", self.operands[-1]) if self.name == "BRA" and self.operands else None
        return int(found[1], 16) if found else None

    @cached_property
    def falls_through(self) -> bool:
        ends = self.name in ENDS or (self.name == "BRA" and len(self.operands) == 1)
        return bool(self.predicate) or not ends


def _registers(operand: str, count: int) -> range:
    found = REGISTER.match(operand)
    return range(int(found[1]), int(found[1]) + count) if found else range(0)


@dataclass(frozen=True)
class Loop:
    address: int
    body: frozenset[int]
    """Indices of its instructions."""


class Code:
    """The instructions of one function, and for each the indices of its possible successors and predecessors."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = instructions
        index = {instruction.address: i for i, instruction in enumerate(instructions)}
        self.after: list[list[int]] = [[] for _ in instructions]
        self.before: list[list[int]] = [[] for _ in instructions]
        for i, instruction in enumerate(instructions):
            if instruction.target in index:
                self.after[i].append(index[instruction.target])
            if instruction.falls_through and i + 1 < len(instructions):
                self.after[i].append(i + 1)
            for j in self.after[i]:
                self.before[j].append(i)

    @cached_property
    def innermost(self) -> list[Loop]:
        """Innermost loops with matmuls. A backward jump makes a loop only where it is the only way in: code that ptxas
        moves to the end of a function, such as a wait for a barrier, also jumps backwards."""
        bodies: dict[int, set[int]] = {}
        for last, following in enumerate(self.after):
            for first in following:
                if first <= last and last not in self._reachable(avoiding=first):
                    bodies.setdefault(first, {first}).update(_closure([last], self.before, {first}))
        kept = {i: body for i, body in bodies.items() if any(self.instructions[j].is_matmul for j in body)}
        return [
            Loop(self.instructions[i].address, frozenset(body))
            for i, body in sorted(kept.items())
            if not any(other < body for other in kept.values())
        ]

    @cached_property
    def _entries(self) -> list[int]:
        """The first instruction and, since a jump by a table (BRX) does not name its targets, the first instruction of
        every part that nothing else leads to."""
        found: list[int] = []
        reached: set[int] = set()
        for i in range(len(self.instructions)):
            if i not in reached:
                found.append(i)
                reached |= _closure([i], self.after, reached)
        return found

    def _reachable(self, avoiding: int) -> set[int]:
        return _closure([i for i in self._entries if i != avoiding], self.after, {avoiding})


def _closure(start: Sequence[int], edges: list[list[int]], border: set[int]) -> set[int]:
    """All that `edges` lead to from `start` without entering `border`."""
    found: set[int] = set()
    waiting = [i for i in start if i not in border]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [j for j in edges[i] if j not in border]
    return found


def parse(sass: str) -> list[Code]:
    """Parse the output of `cuobjdump -sass`: one Code per function."""
    functions: list[list[Instruction]] = [[]]
    for line in sass.splitlines():
        if "Function :" in line:
            functions.append([])
        elif match := LINE.match(line):
            address, predicate, opcode, operands = match.groups()
            split = tuple(operand.strip() for operand in operands.split(",")) if operands else ()
            functions[-1].append(Instruction(int(address, 16), predicate or "", opcode, split))
    return [Code(instructions) for instructions in functions if instructions]


def overwritten_operands(code: Code) -> list[str]:
    """A line for each matmul whose A may be overwritten before the matmul has completed."""
    matmuls = (i for i, instruction in enumerate(code.instructions) if instruction.a_operand)
    return [line for i in matmuls if (line := _overwritten_early(code, i))]


def _overwritten_early(code: Code, matmul: int) -> str:
    """Follow a matmul to the wait for it. Matmuls up to one marked gsb0 form a group, and
    `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most the last n groups are in flight."""
    operand = set(code.instructions[matmul].a_operand)
    seen: set[tuple[int, int]] = set()
    waiting = [(matmul, _groups(code.instructions[matmul], -1))]
    while waiting:
        i, later_groups = waiting.pop()
        for j in code.after[i]:
            if (j, later_groups) in seen:
                continue
            seen.add((j, later_groups))
            instruction = code.instructions[j]
            # Matmuls complete in order, so another one may write here.
            if not instruction.is_matmul and operand.intersection(instruction.writes):
                return f"{code.instructions[matmul]} may still read what {instruction} overwrites"
            if instruction.opcode.startswith("WARPGROUP.DEPBAR") and later_groups >= int(instruction.operands[1], 16):
                continue
            waiting.append((j, _groups(instruction, later_groups)))
    return ""


def _groups(instruction: Instruction, before: int) -> int:
    """Number of groups closed since a matmul's own; -1 while that is open. At most 8, so that the search ends."""
    return min(before + (instruction.is_matmul and "gsb0" in instruction.operands), 8)


def early_arrivals(code: Code) -> list[str]:
    """A line for each arrival that a warp may reach before the other warps have waited for their matmuls."""
    found: set[tuple[str, str]] = set()
    synchronised = {i for i, x in enumerate(code.instructions) if x.opcode.startswith("BAR.SYNC")}
    for i, wait in enumerate(code.instructions):
        if wait.opcode.startswith("WARPGROUP.DEPBAR"):
            ahead = (code.instructions[j] for j in sorted(_closure(code.after[i], code.after, synchronised)))
            found |= {(str(x), str(wait)) for x in ahead if x.opcode.startswith("SYNCS.ARRIVE")}
    return [f"{arrival} may come before other warps are through {wait}" for arrival, wait in sorted(found)]


def spills_in_loops(code: Code) -> list[Instruction]:
    """Instructions of innermost loops with matmuls that store registers to the stack or load them back."""
    inside = sorted(frozenset().union(*(loop.body for loop in code.innermost)))
    return [code.instructions[i] for i in inside if code.instructions[i].name in ("STL", "LDL")]


@dataclass(frozen=True)
class Report:
    """Facts of a compiled kernel. Counts are of instructions in the code, not of executions."""

    registers: int
    stack: int
    """Bytes per thread."""
    shared: int
    """Bytes per program."""
    spills_in_loops: int
    loops: int
    """Innermost loops with matmuls."""
    wgmma: int
    tma: int
    """Tile copies: loads, stores and reductions."""
    barriers: int
    """Operations on barriers in shared memory."""
    setmaxnreg: int
    hazards: tuple[str, ...]
    """Operands overwritten early and early arrivals."""
    remarks: tuple[str, ...]
    """Remarks of ptxas on serialised matmuls."""


def read(compiled: Any) -> Report:
    """Report on a kernel that Triton compiled for sm_90; needs no GPU."""
    sass = disassemble(compiled.asm["cubin"])
    registers, stack = resources(sass)
    functions = parse(sass)
    names = [instruction.name for code in functions for instruction in code.instructions]
    return Report(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        spills_in_loops=sum(len(spills_in_loops(code)) for code in functions),
        loops=sum(len(code.innermost) for code in functions),
        wgmma=sum(name.endswith("GMMA") for name in names),
        tma=sum(name.startswith("UTMA") and name != "UTMACMDFLUSH" for name in names),
        barriers=names.count("SYNCS"),
        setmaxnreg=names.count("USETMAXREG"),
        hazards=tuple(line for code in functions for line in (*overwritten_operands(code), *early_arrivals(code))),
        remarks=tuple(dict.fromkeys(REMARK.findall(assemble(compiled.asm["ptx"])[1]))),
    )


def resources(sass: str) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as `cuobjdump -res-usage` prints them."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", sass)
    assert found, sass[:2000]
    return int(found[1]), int(found[2])


def disassemble(cubin: bytes, *flags: str) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, *(flags or ("-res-usage", "-sass")), file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assemble(ptx: str) -> tuple[bytes, str]:
    """Assemble with the ptxas that Triton chooses and its flags: the code, and the messages of ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", "-o", cubin, source]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return cubin.read_bytes(), done.stderr
