"""Wrong machine code, found without a GPU: reads of a register to which no number leads on any way through the kernel.

Either nothing was written there, or it holds predicates that had no place of their own. ptxas 12.8 once made addresses
of such bits (`_Call.blocks` in relpos/attention/fused.py), which a GPU answers with an illegal memory access. This
follows the data through what nvdisasm prints.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

NOTHING, PREDICATES, NUMBER = 1, 2, 4  # what a register may hold: a set of these
NO_RESULT = (
    "ST", "RED", "LDGSTS", "BRA", "BAR", "MEMBAR", "WARPSYNC", "EXIT", "BSSY", "BSYNC", "LDGDEPBAR", "DEPBAR",
    "WARPGROUP", "NOP", "R2UR", "R2P",
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
                count = int(op[-1]) if op[-1].isdigit() else 1
            elif ".128" in op or op.startswith("HMMA"):
                count = 4
            elif ".64" in op or ".WIDE" in op or op == "CS2R":
                count = 2
            writes = [int(result[1]) + n for n in range(count)]
        operands = operands[1:]
    reads = [] if op.startswith("HGMMA") else [int(r) for x in operands for r in re.findall(r"\bR(\d+)\b", x)]
    return Instruction(text, op, bool(guard), writes, reads, False)


def lost(cubin: bytes, folder: Path) -> list[str]:
    """The instructions that read such a register."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    listing = subprocess.run([nvdisasm(), "-c", file], capture_output=True, text=True, check=True).stdout
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(instruction(found[1].strip()))
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
        target = re.search(r"`\((\.L_\w+)\)", this.text)
        following = [] if this.op in ("EXIT", "RET") and not this.guarded else [i + 1]
        if this.op.startswith("BRA") and target:
            conditional = this.guarded or re.search(r"BRA\S* U?!?U?P", this.text)
            following = [labels[target[1]], *(following if conditional else [])]
        for j in following:
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
