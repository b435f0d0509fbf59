"""Wrong machine code, found without a GPU, by following the data through what nvdisasm prints.

`lost`: reads of a register to which no number leads on any way through the kernel. Either nothing was written there, or
it holds predicates that had no place of their own. ptxas 12.8 once made addresses of such bits (`_Call.blocks` in
relpos/attention/fused.py), which a GPU answers with an illegal memory access.

`strayed`: matrix products whose descriptor of an operand in shared memory depends on what the kernel was given. That is
made of constants and of the thread's place alone. Where descriptors had no uniform registers left, ptxas 12.8 once
saved several in one register, and put strides in their place.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

NOTHING, PREDICATES, NUMBER = 1, 2, 4  # what a register may hold: a set of these
NO_RESULT = (
    "ST", "RED", "LDGSTS", "BRA", "BAR", "MEMBAR", "WARPSYNC", "EXIT", "BSSY", "BSYNC", "LDGDEPBAR", "DEPBAR",
    "WARPGROUP", "NOP", "R2UR", "R2P", "ISETP", "UISETP", "FSETP", "DSETP", "HSETP2", "FCHK", "PLOP3", "UPLOP3",
)  # fmt: skip
COPIES = ("MOV", "IMAD.MOV", "STL", "LOP3", "PLOP3", "R2P", "SEL", "PRMT", "CS2R")  # of whatever it is
ONE_BIT = re.compile(r"LOP3\.LUT R(\d+), R\1(?:\.reuse)?, (0x[0-9a-f]+), RZ, (0xfc|0xc0), !PT")  # set or cleared


class Instruction(NamedTuple):
    text: str
    op: str
    guarded: bool  # by a predicate
    writes: list[int]
    reads: list[int]
    one_bit: bool


def nvdisasm() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def instruction(text: str) -> Instruction:
    guard, body = re.match(r"(@!?U?P\w+\s+)?(.*)", text).groups()  # type: ignore[union-attr] - it always matches
    op, _, rest = body.partition(" ")
    operands = [x.strip() for x in rest.split(",")]
    bit = ONE_BIT.match(body)
    if bit:
        register, mask, kind = int(bit[1]), int(bit[2], 16).bit_count(), bit[3]
        if mask == (1 if kind == "0xfc" else 31):
            return Instruction(text, op, bool(guard), [register], [], True)
    writes: list[int] = []
    if not op.startswith(NO_RESULT):
        while operands and re.match(r"!?U?P(\d|T)", operands[0]):
            operands.pop(0)
        if operands and (result := re.fullmatch(r"R(\d+)", operands[0])):
            count = 1
            if op.startswith("HGMMA"):
                count = int(re.search(r"64x(\d+)x", op)[1]) // 2  # type: ignore[index]
            elif op.startswith("LDSM"):
                count = int(op[-1]) if op.endswith((".2", ".4")) else 1
            elif ".128" in op or op.startswith("HMMA"):
                count = 4
            elif ".64" in op or ".WIDE" in op or op == "CS2R":
                count = 2
            writes = [int(result[1]) + n for n in range(count)]
        operands = operands[1:]
    reads = [] if op.startswith("HGMMA") else [int(r) for x in operands for r in re.findall(r"\bR(\d+)\b", x)]
    return Instruction(text, op, bool(guard), writes, reads, False)


def listed(cubin: bytes, folder: Path) -> tuple[list[str], dict[str, int]]:
    """The instructions of a kernel, and at which of them its labels are."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    listing = subprocess.run([nvdisasm(), "-c", file], capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(found[1].strip())
    return code, labels


def following(this: Instruction, i: int, labels: dict[str, int]) -> list[int]:
    """Which instructions may come next."""
    if this.op in ("EXIT", "RET") and not this.guarded:
        return []
    target = re.search(r"`\((\.L_\w+)\)", this.text)
    if this.op.startswith("BRA") and target:
        conditional = this.guarded or re.search(r"BRA\S* U?!?U?P", this.text)
        return [labels[target[1]], *([i + 1] if conditional else [])]
    return [i + 1]


def lost(cubin: bytes, folder: Path) -> list[str]:
    """The instructions that read such a register."""
    texts, labels = listed(cubin, folder)
    code = [instruction(text) for text in texts]
    held: list[list[int] | None] = [None] * len(code)  # before each instruction, of each register
    held[0] = [NOTHING, NUMBER, *[NOTHING] * 254]  # R1 is the stack
    todo = [0]
    while todo:
        i = todo.pop()
        this, after = code[i], list(held[i] or [])
        for register in this.writes:
            if this.one_bit:
                if after[register] != NUMBER:
                    after[register] = PREDICATES
            else:
                after[register] = NUMBER | (after[register] if this.guarded else 0)
        for j in following(this, i, labels):
            if j < len(code):
                known = held[j]
                merged = after if known is None else [a | b for a, b in zip(known, after)]
                if merged != known:
                    held[j] = merged
                    todo.append(j)
    return [
        this.text
        for this, before in zip(code, held)
        if before and not this.op.startswith(COPIES)
        for register in this.reads
        if register < 255 and not before[register] & NUMBER and (before[register] & PREDICATES or not this.guarded)
    ]


UNIFORM, STACK = 256, 512  # where uniform registers, and places on the stack, begin among the bits of a set of them


def _bits(operand: str, pair: bool) -> int:
    """The registers that an operand names."""
    found = 0
    for kind, number in re.findall(r"\b(U?R)(\d+)\b", operand):
        at = int(number) + (UNIFORM if kind == "UR" else 0)
        found |= (3 if pair or ".64" in operand else 1) << at
    return found


def strayed(cubin: bytes, folder: Path) -> list[str]:
    """The products with such a descriptor."""
    texts, labels = listed(cubin, folder)
    code = [instruction(text) for text in texts]
    flows: list[tuple[int, int, bool]] = []  # of each instruction what it writes and reads, and whether it was given it
    for this in code:
        operands = [x.strip() for x in this.text.split(this.op, 1)[1].split(",")]
        while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
            operands.pop(0)
        wide = ".64" in this.op or ".WIDE" in this.op
        writes = sum(1 << r for r in this.writes)
        if operands and re.fullmatch(r"UR\d+", operands[0]) and not this.op.startswith("UISETP"):
            writes = _bits(operands[0], wide)
        reads = 0
        if not this.op.startswith("HGMMA"):
            for operand in operands[1:]:
                reads |= _bits(operand, wide)
        # R1 is the stack: it comes with the parameters, but only places on it are made of it.
        given = "c[0x" in this.text and writes != 1 << 1 or this.op.startswith(("LDG", "LDS", "LDC", "ULDC", "ATOM"))
        if place := re.search(r"\[R1(?:\+0x([0-9a-f]+))?\]", this.text):
            words = 15 if ".128" in this.op else 3 if wide else 1
            words <<= STACK + int(place[1] or "0", 16) // 4
            if this.op.startswith("STL"):
                writes, reads = words, _bits(operands[1], wide)
            elif this.op.startswith("LDL"):
                reads = words
        flows.append((writes, reads, given))
    held: list[int | None] = [None] * len(code)  # before each instruction, the registers that depend on what was given
    held[0] = 0
    todo = [0]
    while todo:
        i = todo.pop()
        before = held[i] or 0
        writes, reads, given = flows[i]
        after = before if code[i].guarded else before & ~writes
        if given or before & reads:
            after |= writes
        for j in following(code[i], i, labels):
            if j < len(code):
                known = held[j]
                merged = after if known is None else known | after
                if merged != known:
                    held[j] = merged
                    todo.append(j)
    found = []
    for this, before in zip(code, held):
        descriptor = re.search(r"gdesc\[UR(\d+)\]", this.text) if this.op.startswith("HGMMA") else None
        if descriptor and before is not None:
            both = re.match(r"\S+ R\d+, gdesc", this.text) is not None  # else one operand is in registers
            words = 0b1111 if both else 0b1100
            if before >> (UNIFORM + int(descriptor[1])) & words:
                found.append(this.text)
    return found
