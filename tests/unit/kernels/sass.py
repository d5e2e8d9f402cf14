"""Reads the machine code (SASS) of kernels for Hopper GPUs, for what ptxas may do to them without a word.

    report = read(kernel.warmup(..., grid=(1,)))
    assert not report.findings, report.findings

1. Operands. The tensor cores read A, the left operand of a product (HGMMA), from four registers or from shared memory.
   Of the latter there is nothing to look at: the instruction names a descriptor (gdesc) in its place. Registers:
   - ptxas 12.8 to 13.0 is known to put other things, inside a loop, into registers that its products read as they were
     set before it. From the second iteration on results are wrong.
   - Until 13.3 it may write to them while the tensor cores still read, where a loop waits for all products but the
     last ones (https://github.com/triton-lang/triton/issues/9433). Results are wrong now and then.
2. Spills: registers put on the stack (STL) and back (LDL).
3. Remarks C7510 to C7520: products that wait for each other.
4. Signals. One thread arrives at a barrier in shared memory (SYNCS.ARRIVE) for its warpgroup, which may say that what
   products read is read. Each warp waits for its own products (WARPGROUP.DEPBAR), so the four have to meet in between
   (BAR.SYNC). The compiler sees to it, as long as something else than products makes it.

How a register that is overwritten is told from one that is meant to change, as the weights of the tile before do:
   - What the loop writes there is packed numbers of 16 bits, or a load. (Not so for TF32, where any number may do.)
   - What it writes there for the next iteration is for that alone: nothing reads it but products of later iterations.
     What was made for another purpose has another reader.
   - Of the four registers all are as before the loop, or reloaded from the stack, or none is.
Copies are followed, both ways.

While a product is under way nothing may write to its A but other products, which are done in order.

Missed: an overwriting of all four, by instructions that might have packed, ahead of the product in its own iteration or
with no reader; one by a function that is called; all that happens to uniform registers (descriptors), to accumulators
and to values on the stack. Of an opcode not known here one register is taken to be written. False alarms: an operand
carried into the next iteration that something else reads as well, be it a store, or a product of its own iteration.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
REMARK = re.compile(r"\(C75(?:1\d|20)\).*")
A_REGISTERS = 4
"""For 64 rows and 32 bytes of columns, whatever the element."""

MAKES_OPERANDS = {"F2FP", "PRMT", "HADD2", "HMUL2", "HFMA2", "HMNMX2", "LOP3", "SEL", "LD", "LDS", "LDSM", "LDL", "LDG"}
WRITES_NO_REGISTER = {"BAR", "BRX", "CALL", "JMX", "NANOSLEEP", "RET", "WARPSYNC"}
PREDICATE_FIRST = {"ATOM", "ATOMG", "ATOMS", "LOP3", "MATCH", "SHFL", "VOTE"}
"""Their register comes after a predicate. After the predicates of all others come the registers they read."""
DOUBLES = {"DADD", "DFMA", "DMUL"}
NOTHING_FOLLOWS = {"BRX", "EXIT", "JMX", "RET"}


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str
    """As "P0" or "!P0"; empty where there is none."""
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)} at {self.address:#x}"

    @cached_property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @cached_property
    def is_product(self) -> bool:
        return self.name.endswith("GMMA")

    @cached_property
    def width(self) -> int:
        """Registers of its result, or of what it stores."""
        parts = self.opcode.split(".")
        if self.is_product:
            columns = int(parts[1].split("x")[1])
            return columns // 4 if parts[2] == "F16" else columns // 2
        if self.name in ("LDSM", "STSM"):
            return int(parts[-1]) if parts[-1].isdigit() else 1
        if self.name.startswith(("LD", "ST", "ATOM")):
            return 4 if "128" in parts else 2 if "64" in parts else 1
        if self.name == "CS2R":
            return 1 if "32" in parts else 2
        return 2 if "WIDE" in parts or self.name in DOUBLES else 1

    @cached_property
    def _result(self) -> int | None:
        """Which operand it is."""
        place = 1 if self.name in PREDICATE_FIRST and self.operands and re.match(r"!?P", self.operands[0]) else 0
        if self.name in WRITES_NO_REGISTER or len(self.operands) <= place:
            return None
        return place if REGISTER.match(self.operands[place]) else None

    @cached_property
    def writes(self) -> range:
        return range(0) if self._result is None else _registers(self.operands[self._result], self.width)

    @cached_property
    def a_operand(self) -> range:
        return _registers(self.operands[1], A_REGISTERS) if self.is_product else range(0)

    @cached_property
    def reads(self) -> frozenset[int]:
        """But for A."""
        found: set[int] = set()
        for place, operand in enumerate(self.operands):
            if place == self._result or (self.is_product and place == 1):
                continue
            wide = self.is_product or (self.name.startswith("ST") and "[" not in operand)
            wide = wide or self.name in DOUBLES or ("WIDE" in self.opcode and place == 3)
            for register, pair in REGISTER.findall(operand):
                found.update(range(int(register), int(register) + (2 if pair else self.width if wide else 1)))
        return frozenset(found)

    @cached_property
    def copied(self) -> int | None:
        """The register of which this is a plain copy."""
        source = {"MOV": self.operands[1:2], "IMAD": self.operands[3:4] if ".MOV" in self.opcode else ()}.get(self.name)
        return int(source[0][1:]) if source and re.fullmatch(r"R\d+", source[0]) else None

    @cached_property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.fullmatch(r"0x([0-9a-f]+)", self.operands[-1]) if self.name == "BRA" and self.operands else None
        return int(found[1], 16) if found else None

    @cached_property
    def falls_through(self) -> bool:
        ends = self.name in NOTHING_FOLLOWS or (self.name == "BRA" and len(self.operands) == 1)
        return bool(self.predicate) or not ends


def _registers(operand: str, count: int) -> range:
    found = REGISTER.match(operand)
    return range(int(found[1]), int(found[1]) + count) if found else range(0)


class Code:
    """One function: its instructions, and the indices of those that may come before and after each."""

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

    def products(self, among: Iterable[int]) -> list[int]:
        return [i for i in sorted(among) if self.instructions[i].is_product]

    @cached_property
    def loops(self) -> list["Loop"]:
        """Those with products. A jump back makes a loop only where there is no other way in: code that is moved to the
        end of a function, as that which waits for a barrier, also jumps back."""
        bodies: dict[int, set[int]] = {}
        for last, following in enumerate(self.after):
            for first in following:
                if first <= last and last not in self._reached(avoiding=first):
                    bodies.setdefault(first, {first}).update(self._back_to(first, last))
        return [Loop(self, first, body) for first, body in sorted(bodies.items()) if self.products(body)]

    @cached_property
    def innermost(self) -> list["Loop"]:
        return [loop for loop in self.loops if not any(inner.body < loop.body for inner in self.loops)]

    @cached_property
    def _entries(self) -> list[int]:
        """Where the function begins; and, as a jump by a table (BRX) does not say where it goes, the first of what
        nothing else leads to."""
        found: list[int] = []
        reached: set[int] = set()
        for i in range(len(self.instructions)):
            if i not in reached:
                found.append(i)
                reached |= _closure([i], self.after, reached)
        return found

    def _reached(self, avoiding: int) -> set[int]:
        return _closure([i for i in self._entries if i != avoiding], self.after, {avoiding})

    def _back_to(self, first: int, last: int) -> set[int]:
        return _closure([last], self.before, {first})


def _closure(start: list[int], edges: list[list[int]], border: set[int]) -> set[int]:
    found: set[int] = set()
    waiting = [i for i in start if i not in border]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [j for j in edges[i] if j not in border]
    return found


class Sources(NamedTuple):
    """Of a register's value at some place of a loop."""

    entering: set[int]
    """Registers that held it before the loop."""
    written: set[tuple[int, int]]
    """Instructions of the loop that make it, and the registers they put it in."""


@dataclass(frozen=True)
class Loop:
    code: Code
    first: int
    body: set[int]

    @property
    def address(self) -> int:
        return self.code.instructions[self.first].address

    @property
    def products(self) -> list[int]:
        return self.code.products(self.body)

    def sources(self, place: int, register: int) -> Sources:
        """Of what the instruction at `place` reads."""
        found = Sources(set(), set())
        seen: set[tuple[int, int]] = set()
        waiting = [(place, register)]
        while waiting:
            i, register = waiting.pop()
            for j in self.code.before[i]:
                if j not in self.body:
                    found.entering.add(register)
                    continue
                if (j, register) in seen:
                    continue
                seen.add((j, register))
                instruction = self.code.instructions[j]
                if register in instruction.writes:
                    if instruction.copied is None:
                        found.written.add((j, register))
                    else:
                        waiting.append((j, instruction.copied))
                if register not in instruction.writes or instruction.predicate:
                    waiting.append((j, register))
        return found

    def other_readers(self, place: int, register: int) -> set[int]:
        """Of what the instruction at `place` writes, but for products that have it as A in a later iteration."""
        found: set[int] = set()
        seen: set[tuple[int, int, bool]] = set()
        waiting = [(place, register, False)]
        while waiting:
            i, register, later = waiting.pop()
            for j in self.code.after[i]:
                state = (j, register, later or j == self.first)
                if j not in self.body or state in seen:
                    continue
                seen.add(state)
                instruction = self.code.instructions[j]
                if instruction.copied == register:
                    waiting.append((j, instruction.writes[0], state[2]))
                elif register in instruction.reads or (register in instruction.a_operand and not state[2]):
                    found.add(j)
                if register not in instruction.writes or instruction.predicate:
                    waiting.append(state)
        return found


@lru_cache(maxsize=1)  # a report asks three times
def parse(sass: str) -> dict[str, Code]:
    """What `cuobjdump -sass` prints, by function."""
    found: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = found.setdefault("", [])
    for line in sass.splitlines():
        if "Function :" in line:
            instructions = found.setdefault(line.split(":", 1)[1].strip(), [])
        elif match := LINE.match(line):
            address, predicate, opcode, operands = match.groups()
            split = tuple(operand.strip() for operand in operands.split(",")) if operands else ()
            instructions.append(Instruction(int(address, 16), predicate or "", opcode, split))
    return {name: Code(instructions) for name, instructions in found.items() if instructions}


def overwritten_operands(sass: str) -> list[str]:
    """A line for each product of which A may be something else than it was meant to be."""
    found: list[str] = []
    for code in parse(sass).values():
        for i in code.products(range(len(code.instructions))):
            around = sorted((loop for loop in code.loops if i in loop.body), key=lambda loop: len(loop.body))
            lines = [*(_overwritten_in_loop(loop, i) for loop in around), _overwritten_early(code, i)]
            found += [line for line in lines if line][:1]
    return found


def _overwritten_in_loop(loop: Loop, product: int) -> str:
    """Of the first register at fault; empty where none is."""
    instructions = loop.code.instructions
    start = f"loop at {loop.address:#x}: {instructions[product]} reads"
    sources = {register: loop.sources(product, register) for register in instructions[product].a_operand}
    for register, (entering, written) in sources.items():
        if len(entering) > 1 and not written:
            return f"{start} R{register}, set before the loop, which becomes a copy of R{min(entering - {register})}"
        for place, holder in sorted(written):
            purpose = _other_purpose(loop, instructions[product], place, holder, carried=bool(entering))
            if purpose:
                how = "set before the loop and overwritten" if entering else "written"
                return f"{start} R{register}, {how} by {instructions[place]}, {purpose}"
    kept = [register for register, source in sources.items() if not source.written]
    # Of an operand that is kept part may be on the stack.
    made = [i for source in sources.values() for i, _ in source.written if instructions[i].name != "LDL"]
    if kept and made:
        return f"{start} R{kept[0]}, set before the loop, together with what is not: {instructions[min(made)]}"
    return ""


def _other_purpose(loop: Loop, product: Instruction, place: int, register: int, *, carried: bool) -> str:
    """Than to be A of this product; empty where there is none. What is not carried into another iteration may be
    stored, or read by other products, as well."""
    instructions = loop.code.instructions
    if instructions[place].name not in MAKES_OPERANDS and "TF32" not in product.opcode:
        return "which makes no 16-bit numbers"
    others = loop.other_readers(place, register) if carried else None
    return f"which is made for {instructions[min(others)]}" if others else ""


def _overwritten_early(code: Code, product: int) -> str:
    """Follows a product to where it is waited for. Products up to one marked gsb0 form a group, and
    `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most the last n groups are under way."""
    operand = code.instructions[product].a_operand
    seen: set[tuple[int, int]] = set()
    waiting = [(product, _groups(code.instructions[product], -1))] if operand else []
    while waiting:
        i, later_groups = waiting.pop()
        for j in code.after[i]:
            if (j, later_groups) in seen:
                continue
            seen.add((j, later_groups))
            instruction = code.instructions[j]
            # Products are done in order, so that another may well write here.
            if not instruction.is_product and set(instruction.writes) & set(operand):
                return f"{code.instructions[product]} may still read what {instruction} overwrites"
            if instruction.opcode.startswith("WARPGROUP.DEPBAR") and later_groups >= int(instruction.operands[1], 16):
                continue
            waiting.append((j, _groups(instruction, later_groups)))
    return ""


def _groups(instruction: Instruction, before: int) -> int:
    """Closed since a product's own; -1 while that is open. Eight at most, so that no walk goes on for ever."""
    return min(before + (instruction.is_product and "gsb0" in instruction.operands), 8)


def early_signals(sass: str) -> list[str]:
    """A line for each arrival that a warp may come to before the others of its warpgroup have waited for products."""
    found: set[tuple[str, str]] = set()
    for code in parse(sass).values():
        meetings = {i for i, x in enumerate(code.instructions) if x.opcode.startswith("BAR.SYNC")}
        for i, wait in enumerate(code.instructions):
            if wait.opcode.startswith("WARPGROUP.DEPBAR"):
                ahead = _closure(code.after[i], code.after, meetings)
                signals = (code.instructions[j] for j in sorted(ahead))
                found |= {(str(x), str(wait)) for x in signals if x.opcode.startswith("SYNCS.ARRIVE")}
    return [f"{signal} may come before other warps are through {wait}" for signal, wait in sorted(found)]


class Spills(NamedTuple):
    """Instructions that move registers to the stack or back."""

    in_loops: list[Instruction]
    """Innermost ones with products."""
    outside: list[Instruction]


def spills(sass: str) -> Spills:
    found = Spills([], [])
    for code in parse(sass).values():
        inside = set().union(*(loop.body for loop in code.innermost))
        for i, instruction in enumerate(code.instructions):
            if instruction.name in ("STL", "LDL"):
                (found.in_loops if i in inside else found.outside).append(instruction)
    return found


class LoopSize(NamedTuple):
    address: int
    instructions: int
    products: int


@dataclass(frozen=True)
class Report:
    registers: int
    stack: int
    """Bytes for each thread."""
    shared: int
    """Bytes."""
    loops: tuple[LoopSize, ...]
    """Innermost ones with products."""
    findings: tuple[str, ...]
    """Operands overwritten, signals given too early."""
    spills_in_loops: int
    spills_outside: int
    remarks: tuple[str, ...]
    """Of ptxas, on products that wait for each other."""


def read(compiled: Any) -> Report:
    """Of a kernel that Triton compiled for sm_90; needs no GPU."""
    sass = disassemble(compiled.asm["cubin"])
    resources = re.search(r"REG:(\d+) STACK:(\d+)", sass)
    assert resources, sass[:2000]
    loops = (loop for code in parse(sass).values() for loop in code.innermost)
    in_loops, outside = spills(sass)
    return Report(
        registers=int(resources[1]),
        stack=int(resources[2]),
        shared=compiled.metadata.shared,
        loops=tuple(LoopSize(loop.address, len(loop.body), len(loop.products)) for loop in loops),
        findings=(*overwritten_operands(sass), *early_signals(sass)),
        spills_in_loops=len(in_loops),
        spills_outside=len(outside),
        remarks=tuple(dict.fromkeys(REMARK.findall(assemble(compiled.asm["ptx"])[1]))),
    )


def disassemble(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assemble(ptx: str) -> tuple[bytes, str]:
    """As Triton does it, also with its choice of ptxas: the code, and what ptxas said."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", "-o", cubin, source]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return cubin.read_bytes(), done.stderr
