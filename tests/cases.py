"""The case table: every encoding and variant, with its formula written a second time.

The formulas here are plain Python and numpy in float64, from the papers, and import nothing of relpos: an error shared
by code and test cannot hide in them. A new encoding adds one formula and one `Case`; every test over the registry then
runs on it. Specs are valid for heads of 8 features (`HEAD_DIM`) and any number of heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

HEAD_DIM = 8


@dataclass
class Setting:
    """One text, no batch: what a formula may look at. Queries and keys are the same T tokens."""

    positions: list[int]
    heads: int
    causal: bool
    parameters: dict[str, np.ndarray]  # by the module's names
    hidden: np.ndarray  # [T, hidden_size]
    q: np.ndarray  # [H, T, D]
    k: np.ndarray  # [H, T, D]

    @property
    def length(self) -> int:
        return len(self.positions)

    def visible(self, i: int) -> range:
        """The keys of the query at index i."""
        return range(i + 1) if self.causal else range(self.length)

    def fill(self, cell: Callable[[int, int, int], float]) -> np.ndarray:
        """[H, T, T] from a function of head (from 0), query index and key index; 0 where the query cannot see."""
        out = np.zeros((self.heads, self.length, self.length))
        for h in range(self.heads):
            for i in range(self.length):
                for j in self.visible(i):
                    out[h, i, j] = cell(h, i, j)
        return out

    def distance(self, i: int, j: int) -> int:
        return self.positions[i] - self.positions[j]

    def scores(self) -> np.ndarray:
        return self.fill(lambda h, i, j: float(self.q[h, i] @ self.k[h, j]) / math.sqrt(self.q.shape[-1]))


Formula = Callable[[Setting], np.ndarray]


def zero(s: Setting) -> np.ndarray:
    return np.zeros((s.heads, s.length, s.length))


# ALiBi


def alibi(slopes: str) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        if "slopes" in s.parameters:
            m = list(s.parameters["slopes"])
        elif slopes == "geometric":
            m = [2 ** (-8 * (h + 1) / s.heads) for h in range(s.heads)]
        else:
            whole = 1
            while 2 * whole <= s.heads:
                whole *= 2
            m = [2 ** (-8 * (h + 1) / whole) for h in range(whole)]
            m += [2 ** (-4 * (2 * n + 1) / whole) for n in range(s.heads - whole)]
        return s.fill(lambda h, i, j: -m[h] * abs(s.distance(i, j)))

    return bias


# T5


def t5_bucket(d: int, causal: bool, buckets: int, max_distance: int) -> int:
    """The formula of the T5 code; the rounding puts 16, 32 and 64 where real numbers have them."""
    start = 0
    if not causal:
        buckets //= 2
        start = buckets if d < 0 else 0
        d = abs(d)
    d = max(d, 0)
    exact = buckets // 2
    if d < exact:
        return start + d
    steps = math.log(d / exact) / math.log(max_distance / exact) * (buckets - exact)
    return start + min(exact + math.floor(round(steps, 9)), buckets - 1)


def t5(buckets: int = 32, max_distance: int = 128, scale: float = 1) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        table = s.parameters["table"]
        return s.fill(lambda h, i, j: scale * table[t5_bucket(s.distance(i, j), s.causal, buckets, max_distance), h])

    return bias


def t5_clipped(clip: int) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        table = s.parameters["table"]
        return s.fill(lambda h, i, j: table[clip + max(-clip, min(clip, s.distance(i, j))), h])

    return bias


# KERPLE


def kerple_log(s: Setting) -> np.ndarray:
    p, a = (np.maximum(s.parameters[n], 0.01) for n in "pa")
    return s.fill(lambda h, i, j: -p[h] * math.log(1 + a[h] * abs(s.distance(i, j))))


def kerple_power(s: Setting) -> np.ndarray:
    p, a = np.clip(s.parameters["p"], 0.01, 2), np.maximum(s.parameters["a"], 0.01)
    return s.fill(lambda h, i, j: -a[h] * abs(s.distance(i, j)) ** p[h])


# FIRE


def fire(length: int) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        P = s.parameters
        c, L = abs(float(P["c"])), abs(float(P["multiplier"]) * length)

        def cell(h: int, i: int, j: int) -> float:
            u = math.log(c * abs(s.distance(i, j)) + 1) / (math.log(c * max(L, s.positions[i]) + 1) + 1e-6)
            inner = np.maximum(P["inner.weight"][:, 0] * u + P["inner.bias"], 0)
            return float(P["outer.weight"][h] @ inner + P["outer.bias"][h])

        return s.fill(cell)

    return bias


# Sandwich


def sandwich(dim: int) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        def cell(h: int, i: int, j: int) -> float:
            waves = sum(math.cos(s.distance(i, j) / 10000 ** (2 * t / dim)) for t in range(dim // 2))
            return (waves - dim / 2) / (8 * (h + 1) / s.heads)

        return s.fill(cell)

    return bias


# CABLE, FoX


def relu(z: np.ndarray) -> np.ndarray:
    return np.maximum(z, 0)


def softplus(z: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(z))


def cable(step: Callable[[np.ndarray], np.ndarray] = relu, gated: bool = True, log: bool = False) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        P = s.parameters
        steps = step(s.hidden @ P["step.weight"].T + P["step.bias"])  # [T, H]
        g = softplus(s.hidden @ P["gate.weight"].T + P["gate.bias"]) if gated else np.ones_like(steps)

        def cell(h: int, i: int, j: int) -> float:
            way = sum(steps[l, h] for l in range(min(i, j) + 1, max(i, j) + 1))
            return -g[i, h] * (math.log(way**2 + 1) if log else way)

        return s.fill(cell)

    return bias


def fox(s: Setting) -> np.ndarray:
    P = s.parameters
    f = 1 / (1 + np.exp(-(s.hidden @ P["forget.weight"].T + P["forget.bias"])))
    return s.fill(lambda h, i, j: sum(math.log(f[l, h]) for l in range(j + 1, i + 1)))


# CoPE, DAPE: what they add to the plain scores


def cope(positions: int) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        table, scores = s.parameters["table"], s.scores()

        def cell(h: int, i: int, j: int) -> float:
            p = sum(1 / (1 + math.exp(-scores[h, i, l])) for l in range(j, i + 1))
            p = min(p, positions - 1)
            low, high = math.floor(p), math.ceil(p)
            z = s.q[h, i] @ table
            return float(z[low] * (1 - (p - low)) + z[high] * (p - low))

        return s.fill(cell)

    return bias


def dape(base: Formula, kernel: int = 1) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        inside = {n.removeprefix("base."): v for n, v in s.parameters.items() if n.startswith("base.")}
        b = base(Setting(s.positions, s.heads, s.causal, inside, s.hidden, s.q, s.k))
        w1, b1 = s.parameters["inner.weight"][:, :, 0], s.parameters["inner.bias"]  # [width, 2H, kernel]
        w2, b2 = s.parameters["outer.weight"][:, :, 0], s.parameters["outer.bias"]
        both = np.concatenate([s.scores(), b])  # [2H, T, T], zero where masked
        T, half = s.length, kernel // 2
        seen = np.zeros((T, T), bool)
        for i in range(T):
            seen[i, list(s.visible(i))] = True

        def layer(w: np.ndarray, add: np.ndarray, cells: np.ndarray) -> np.ndarray:
            out = np.zeros((w.shape[0], T, T))
            for i in range(T):
                for j in range(T):
                    total = add.copy()
                    for step in range(kernel):
                        other = j + step - half
                        if 0 <= other < T and seen[i, other]:
                            total += w[:, :, step] @ cells[:, i, other]
                    out[:, i, j] = total
            return out

        middle = layer(w1, b1, both)
        out = b + layer(w2, b2, np.where(middle > 0, middle, 0.01 * middle))
        return np.where(seen, out, 0)

    return bias


# Inkling


def inkling(length: int) -> Formula:
    def bias(s: Setting) -> np.ndarray:
        bank = s.parameters["bank"]
        rank = bank.shape[0]
        r = s.hidden @ s.parameters["mix.weight"].T  # [T, heads * rank]

        def cell(h: int, i: int, j: int) -> float:
            d = s.distance(i, j)
            return float(r[i, h * rank : (h + 1) * rank] @ bank[:, d]) if 0 <= d < length else 0.0

        return s.fill(cell)

    return bias


# Rotations: the scaled score itself


def spectrum(dim: int, base: float = 10000) -> list[float]:
    return [1 / base ** (2 * t / dim) for t in range(dim // 2)]


def rotary(
    frequencies: Callable[[int, int], list[float]] = lambda dim, n: spectrum(dim),
    *,
    interleaved: bool = False,
    part: float = 1,
    sign: int = 1,
    factor: float = 1,
    shrink: Callable[[int, int], float] | None = None,
) -> Formula:
    """Scores with pairs of features as complex numbers, turned by position times frequency. `frequencies(dim, n)`
    depends on the length n; `factor` multiplies q and k; `shrink(t, dim)` is the factor per step of distance (xPos)."""

    def scores(s: Setting) -> np.ndarray:
        D = s.q.shape[-1]
        dim = int(D * part)
        w = frequencies(dim, max(s.positions) + 1)

        def pair(x: np.ndarray, t: int) -> complex:
            a, b = (2 * t, 2 * t + 1) if interleaved else (t, t + dim // 2)
            return complex(x[a], x[b])

        def cell(h: int, i: int, j: int) -> float:
            total = float(s.q[h, i, dim:] @ s.k[h, j, dim:])
            d = s.distance(i, j)
            for t in range(dim // 2):
                turn = complex(math.cos(sign * d * w[t]), math.sin(sign * d * w[t]))
                product = pair(s.q[h, i], t) * turn * pair(s.k[h, j], t).conjugate()
                total += factor**2 * product.real * (shrink(t, dim) ** d if shrink else 1)
            return total / math.sqrt(D)

        return s.fill(cell)

    return scores


def yarn(factor: float, length: int, fast: float = 32, slow: float = 1, whole: bool = True, base: float = 10000):
    """A pair makes `length * w / 2 pi` turns within the training length. Solved for the index of the pair, the borders
    of the ramp are where that number is `fast` and `slow`."""

    def frequencies(dim: int, n: int) -> list[float]:
        def index(turns: float) -> float:
            return dim / 2 * math.log(length / (2 * math.pi * turns), base)

        first, last = index(fast), index(slow)
        if whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 * (first == last)
        out = []
        for t, w in enumerate(spectrum(dim, base)):
            slowed = min(1.0, max(0.0, (t - first) / (last - first)))
            out.append(slowed * w / factor + (1 - slowed) * w)
        return out

    return frequencies


def llama3(factor: float, length: int, low: float = 1, high: float = 4):
    def frequencies(dim: int, n: int) -> list[float]:
        out = []
        for w in spectrum(dim):
            wavelength = 2 * math.pi / w
            if wavelength < length / high:
                out.append(w)
            elif wavelength > length / low:
                out.append(w / factor)
            else:
                smooth = (length / wavelength - low) / (high - low)
                out.append((1 - smooth) * w / factor + smooth * w)
        return out

    return frequencies


def dynamic(factor: float, length: int):
    def frequencies(dim: int, n: int) -> list[float]:
        n = max(n, length)
        return spectrum(dim, 10000 * (factor * n / length - (factor - 1)) ** (dim / (dim - 2)))

    return frequencies


def longrope(short: list[float], long: list[float], length: int):
    def frequencies(dim: int, n: int) -> list[float]:
        return [w / f for w, f in zip(spectrum(dim), long if n > length else short, strict=True)]

    return frequencies


# Vectors added to the token embedding, [T, hidden_size]


def sinusoidal(kind: str = "interleaved", scale: float = 1) -> Formula:
    def vectors(s: Setting) -> np.ndarray:
        D = s.hidden.shape[1]
        out = np.zeros((s.length, D))
        for row, p in enumerate(s.positions):
            for t in range(D // 2):
                w = 10000 ** (-t / (D / 2 - 1)) if kind == "tensor2tensor" else 10000 ** (-2 * t / D)
                a, b = (2 * t, 2 * t + 1) if kind == "interleaved" else (t, t + D // 2)
                out[row, a], out[row, b] = scale * math.sin(p * w), scale * math.cos(p * w)
        return out

    return vectors


def learned(s: Setting) -> np.ndarray:
    return s.parameters["table"][s.positions]


# The table.


@dataclass(frozen=True)
class Case:
    spec: str
    bias: Formula | None = None  # what is added to the scaled scores; None: nothing is
    scores: Formula | None = None  # the scaled scores, where they are not the plain ones (rotations)
    embed: Formula | None = None
    bidirectional: bool = True
    content: bool = False  # reads the layer's input
    rescores: bool = False  # reads q and k
    parameters: int | None = 0  # of GPT-2 Small, all layers together; None where the spec does not fit its heads of 64
    share: bool = False
    holes: bool = True  # False: padding inside a text is not the same as the text without it
    by_length: bool = False  # the scores depend on the length of the text
    distinct: bool = True  # False: another case differs from it in numbers only, so slow tests leave it out
    name: str = field(init=False)

    def __post_init__(self) -> None:
        name = self.spec.partition(":")[0]
        object.__setattr__(self, "name", name.rpartition("/")[2].removesuffix(".py"))


SHORT, LONG = [1.0, 1.1, 1.3, 2.0], [1.0, 2.0, 4.0, 8.0]
LONGROPE = "factor=4,original_max_position_embeddings=9,short_factor=1.0;1.1;1.3;2.0,long_factor=1.0;2.0;4.0;8.0"

CASES = [
    Case("none"),
    Case("learned", embed=learned, parameters=1024 * 768),
    Case("learned:max_positions=700", embed=learned, parameters=700 * 768, distinct=False),
    Case("sinusoidal", embed=sinusoidal()),
    Case("sinusoidal:scale=0.1", embed=sinusoidal(scale=0.1), distinct=False),
    Case("sinusoidal:layout=halves", embed=sinusoidal("halves"), distinct=False),
    Case("sinusoidal:layout=tensor2tensor", embed=sinusoidal("tensor2tensor")),
    Case("rope", scores=rotary()),
    Case("rope:layout=interleaved", scores=rotary(interleaved=True), distinct=False),
    Case("rope:base=500,sign=-1", scores=rotary(lambda dim, n: spectrum(dim, 500), sign=-1), distinct=False),
    Case("rope:layout=interleaved,sign=-1,partial=0.5", scores=rotary(interleaved=True, sign=-1, part=0.5)),
    Case("rope:partial=0.5", scores=rotary(part=0.5)),
    Case("rope:scaling=linear,factor=4", scores=rotary(lambda dim, n: [w / 4 for w in spectrum(dim)]), distinct=False),
    Case(
        "rope:scaling=dynamic,factor=2,original_max_position_embeddings=9",
        scores=rotary(dynamic(2, 9)),
        by_length=True,
    ),
    Case(
        "rope:scaling=yarn,factor=8,original_max_position_embeddings=400",
        scores=rotary(yarn(8, 400), factor=0.1 * math.log(8) + 1),
        distinct=False,
    ),
    Case(
        "rope:scaling=yarn,factor=8,original_max_position_embeddings=400,truncate=false,beta_fast=20,beta_slow=2,"
        "mscale=0.7,mscale_all_dim=0.4",
        scores=rotary(
            yarn(8, 400, 20, 2, whole=False),
            factor=(0.1 * 0.7 * math.log(8) + 1) / (0.1 * 0.4 * math.log(8) + 1),
        ),
    ),
    Case(
        "rope:scaling=llama3,factor=8,original_max_position_embeddings=200",
        scores=rotary(llama3(8, 200)),
        distinct=False,
    ),
    Case(
        "rope:scaling=longrope," + LONGROPE,
        scores=rotary(longrope(SHORT, LONG, 9), factor=math.sqrt(1 + math.log(4) / math.log(9))),
        parameters=None,
        by_length=True,
    ),
    Case(
        "xpos",
        scores=rotary(interleaved=True, shrink=lambda t, dim: ((2 * t + 0.4 * dim) / (1.4 * dim)) ** (1 / 512)),
        bidirectional=False,
    ),
    Case(
        "xpos:scale_base=10",
        scores=rotary(interleaved=True, shrink=lambda t, dim: ((2 * t + 0.4 * dim) / (1.4 * dim)) ** (1 / 10)),
        bidirectional=False,
        distinct=False,
    ),
    Case("alibi", alibi("closest_power_of_two")),
    Case("alibi:slopes=geometric", alibi("geometric"), distinct=False),
    Case("alibi:learn=true", alibi("parameters"), parameters=144),
    Case("t5", t5(), parameters=384, share=True),
    Case("t5:buckets=8,max_distance=10,scale=8", t5(8, 10, 8), parameters=96, share=True, distinct=False),
    Case("t5:form=clipped", t5_clipped(256), parameters=73_872),
    Case("t5:form=clipped,clip=3", t5_clipped(3), parameters=12 * 7 * 12, distinct=False),
    Case("kerple", kerple_log, parameters=24, share=True),
    Case("kerple:share=false", kerple_log, parameters=288, distinct=False),
    Case("kerple:form=power", kerple_power, parameters=24, share=True),
    Case("fire", fire(512), parameters=5_544, distinct=False),
    Case("fire:width=8,length=6", fire(6), parameters=12 * (16 + 8 * 12 + 12 + 2)),
    Case("sandwich", sandwich(128)),
    Case("sandwich:dim=6", sandwich(6), distinct=False),
    Case("cable", cable(), content=True, parameters=221_472),
    Case("cable:form=unweighted", cable(gated=False), content=True, parameters=110_736),
    Case("cable:form=kernel", cable(log=True), content=True, parameters=221_472),
    Case("cable:form=softplus", cable(softplus, gated=False), content=True, parameters=110_736),
    Case("fox", fox, content=True, bidirectional=False, parameters=110_736),
    Case("cope", cope(64), rescores=True, bidirectional=False, parameters=49_152),
    Case("cope:positions=3", cope(3), rescores=True, bidirectional=False, parameters=12 * 3 * 64, distinct=False),
    Case("dape", dape(kerple_log), rescores=True, parameters=14_352 + 288),
    Case(
        "dape:base=t5:form=clipped,clip=3",
        dape(t5_clipped(3)),
        rescores=True,
        parameters=14_352 + 12 * 7 * 12,
        distinct=False,
    ),
    Case(
        "dape:version=2,base=alibi",
        dape(alibi("closest_power_of_two"), 3),
        rescores=True,
        holes=False,
        parameters=12 * (3 * 24 * 32 + 32 + 3 * 32 * 12 + 12),
    ),
    Case(
        "dape:version=2,kernel=5,width=4,base=cable",
        dape(cable(), 5),
        rescores=True,
        content=True,
        holes=False,
        parameters=221_472 + 12 * (5 * 24 * 4 + 4 + 5 * 4 * 12 + 12),
    ),
    Case("inkling", inkling(1024), content=True, bidirectional=False, parameters=12 * (768 * 192 + 16 * 1024)),
    Case(
        "inkling:rank=3,length=5",
        inkling(5),
        content=True,
        bidirectional=False,
        distinct=False,
        parameters=12 * (768 * 36 + 15),
    ),
]
