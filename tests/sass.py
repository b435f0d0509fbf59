"""Wrong machine code, found without a GPU, by following the data through what nvdisasm prints.

`lost`: reads of a register to which no number leads on any way through the kernel. Either nothing was written there, or
it holds predicates that had no place of their own. ptxas 12.8 once made addresses of such bits (`_Call.blocks` in
relpos/attention/fused.py), which a GPU answers with an illegal memory access.

`strayed`: matrix products that take an operand from nowhere. Where it lies and how, two words in uniform registers, is
made of constants, and how is a constant. Where no uniform registers were left, ptxas 12.8 once saved several of these
in one other register, and put strides in their place.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

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


def flow(code: list[Instruction], labels: dict[str, int], start: Any, after: Any, joined: Any) -> list[Any]:
    """What is held before each instruction, None before those that never run: `start` before the first, behind one what
    `after` makes of it, and where ways meet what `joined` makes of both."""
    held: list[Any] = [None] * len(code)
    held[0] = start
    todo = [0]
    while todo:
        i = todo.pop()
        then = after(code[i], held[i])
        for j in following(code[i], i, labels):
            if j < len(code):
                both = then if held[j] is None else joined(held[j], then)
                if both != held[j]:
                    held[j] = both
                    todo.append(j)
    return held


def _kinds(this: Instruction, before: list[int]) -> list[int]:
    """What each register may hold behind an instruction."""
    after = list(before)
    for register in this.writes:
        if this.one_bit:
            if after[register] != NUMBER:
                after[register] = PREDICATES
        else:
            after[register] = NUMBER | (after[register] if this.guarded else 0)
    return after


def lost(cubin: bytes, folder: Path) -> list[str]:
    """The instructions that read such a register."""
    texts, labels = listed(cubin, folder)
    code = [instruction(text) for text in texts]
    start = [NOTHING, NUMBER, *[NOTHING] * 254]  # R1 is the stack
    held = flow(code, labels, start, _kinds, lambda one, other: [a | b for a, b in zip(one, other)])
    return [
        this.text
        for this, before in zip(code, held)
        if before and not this.op.startswith(COPIES)
        for register in this.reads
        if register < 255 and not before[register] & NUMBER and (before[register] & PREDICATES or not this.guarded)
    ]


Known = dict[str, int]  # registers, carries and places on the stack, and what is in them, where it is always the same


def _number(operand: str, known: Known, high: bool = False) -> int | None:
    """What an operand is, or its second word."""
    name = operand.removesuffix(".reuse").lstrip("-")
    if name in ("RZ", "URZ"):
        return 0
    if name.startswith("0x"):
        number: int | None = int(name, 16) >> (32 if high else 0)
    else:
        found = re.fullmatch(r"(U?R)(\d+)", name)
        number = known.get(f"{found[1]}{int(found[2]) + high}") if found else None
    if number is None:
        return None
    return (-number if operand.startswith("-") else number) % 2**32


def _sum(terms: list[int | None], carry: int = 0) -> tuple[int | None, int]:
    """And what is carried: nothing, as far as is known."""
    if None in terms:
        return None, 0
    total = sum(x for x in terms if x is not None) + carry
    return total % 2**32, total >> 32


def _after(this: Instruction, before: Known) -> Known:
    """What is known behind an instruction: of those that make descriptors, what they do; of others, what they spoil."""
    known = dict(before)
    if not this.op:
        if this.text.startswith("SWAP"):
            for name, other in itertools.permutations(this.text[5:].split(", ")):
                known.pop(name, None)
                if other in before:
                    known[name] = before[other]
        return known
    operands = [x.strip() for x in this.text.split(this.op, 1)[1].split(",")]
    while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
        operands.pop(0)
    place = re.search(r"\[R1(?:\+0x([0-9a-f]+))?\]", this.text)
    wide = ".64" in this.op or "WIDE" in this.op
    if place and this.op.startswith("STL"):
        at = int(place[1] or "0", 16)
        for word in range(4 if ".128" in this.op else 1 + wide):
            given = re.sub(r"\d+", lambda n, more=word: str(int(n[0]) + more), operands[1])  # type: ignore[misc]
            number = _number(given, before)
            known.pop(f"S{at + 4 * word}", None)
            if number is not None:
                known[f"S{at + 4 * word}"] = number
        return known
    names = [f"R{r}" for r in this.writes]
    target = re.fullmatch(r"(UR)(\d+)", operands[0]) if operands else None
    if target and not this.op.startswith("UISETP"):
        names = [f"UR{int(target[2]) + word}" for word in range(1 + wide)]
    for name in names:
        known.pop(name, None)
    carries = [x for x in operands[1:] if re.fullmatch(r"!?U?P(\d|T)", x)]
    terms = [x for x in operands[1:] if x not in carries]
    results: list[int | None] = []
    op = this.op.removeprefix("U")  # of uniform registers or others
    if place and this.op.startswith("LDL"):
        results = [before.get(f"S{int(place[1] or '0', 16) + 4 * word}") for word in range(len(names))]
    elif op in ("MOV", "R2UR"):
        results = [_number(terms[0], before)]
    elif this.op in ("IMAD.U32", "IMAD.MOV.U32") and terms[0] == "RZ":
        results = [_number(terms[2], before)]
    elif op == "CS2R" and terms == ["SRZ"]:
        results = [0] * len(names)
    elif op == "IADD3.64":
        low, carry = _sum([_number(x, before) for x in terms])
        results = [low, _sum([_number(x, before, True) for x in terms], carry)[0]]
    elif op in ("IADD3", "IADD3.X", "VIADD"):
        carry = before.get(carries[0], 0) if op == "IADD3.X" and carries else 0
        result, carry = _sum([_number(x, before) for x in terms[:3]], carry)
        results = [result]
        if op == "IADD3" and carries:
            known[carries[0]] = carry
    elif op == "LEA" and len(terms) == 3:
        x, y, by = (_number(term, before) for term in terms[:3])
        results = [None if x is None or y is None or by is None else ((x << by) + y) % 2**32]
    elif op == "SHF.R.U32.HI":
        x, by = _number(terms[2], before), _number(terms[1], before)
        results = [None if x is None or by is None else x >> by]
    elif op == "SGXT.U32":
        x, bits = _number(terms[0], before), _number(terms[1], before)
        results = [None if x is None or bits is None else x & ((1 << bits) - 1)]
    elif this.op == "S2UR" and "SR_CgaCtaId" in this.text:
        results = [0]
    for name, result in zip(names, results):
        if result is not None and (not this.guarded or before.get(name) == result):
            known[name] = result
    return known


def _with_swaps(code: list[Instruction]) -> list[Instruction]:
    """Three exclusive ors of the same two registers, which change places so, are a SWAP for the last of them."""
    code, begun = list(code), dict[frozenset, list[int]]()
    for i, this in enumerate(code):
        found = re.match(r"ULOP3\.LUT UR\d+, (UR\d+), (UR\d+), URZ, 0x3c", this.text)
        if not found:
            continue
        pair = frozenset(found.groups())
        begun[pair] = [*(x for x in begun.get(pair, []) if i - x < 40), i]
        if len(begun[pair]) == 3:
            for x in begun.pop(pair):
                text = f"SWAP {', '.join(found.groups())}" if x == i else "NOP"
                code[x] = Instruction(text, "", False, [], [], False)
    return code


def strayed(cubin: bytes, folder: Path) -> list[str]:
    """The products with a descriptor whose second word, how an operand lies, is not one that the compiler wrote."""
    texts, labels = listed(cubin, folder)
    code = _with_swaps([instruction(text) for text in texts])
    held = flow(code, labels, {}, _after, lambda one, other: dict(one.items() & other.items()))
    found = []
    for this, known in zip(code, held):
        descriptor = re.search(r"gdesc\[UR(\d+)\]", this.text) if this.op.startswith("HGMMA") else None
        if descriptor and known is not None:
            # One operand may be in registers: then only the second half of the four words counts.
            words = (1, 3) if re.match(r"\S+ R\d+, gdesc", this.text) else (3,)
            layouts = [known.get(f"UR{int(descriptor[1]) + word}", 0) for word in words]
            if any(x >> 24 not in (0x40, 0x80, 0xC0) for x in layouts):
                found.append(this.text)
    return found
