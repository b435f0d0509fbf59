"""Every encoding against its paper's formula written a second time, over the whole registry; the registry itself."""

from __future__ import annotations

import math
import sys
import time
import types

import numpy as np
import pytest
import torch
from cases import CASES, HEAD_DIM, Case, t5_bucket
from support import Inputs, close, make, setting

import relpos
from relpos import UserError, encodings
from relpos.attention import prepare, reference
from relpos.encodings import Encoding, build, parse, slug, split_list
from relpos.encodings.alibi import slope_values
from relpos.encodings.t5 import borders as t5_borders
from relpos.terms import Layout

ids = [case.spec for case in CASES]
every = pytest.mark.parametrize("case", CASES, ids=ids)
additive = pytest.mark.parametrize("case", [c for c in CASES if c.bias], ids=[c.spec for c in CASES if c.bias])


def bias_of(encoding: Encoding, case: Case, inputs: Inputs, causal: bool = True) -> torch.Tensor:
    """[B,H,T,T], whatever bias_matrix must be given for it."""
    needs = {"q": inputs.q, "k": inputs.k} if case.rescores else {}
    hidden = inputs.hidden if case.content else None
    bias = relpos.bias_matrix(encoding, inputs.q.shape[2], hidden, causal=causal, **needs)
    return bias if bias.dim() == 4 else bias.expand(inputs.q.shape[0], -1, -1, -1)


def test_every_name_has_a_case():
    assert {case.name for case in CASES} >= set(encodings.names())


@every
def test_the_case_agrees_with_the_class(case):
    encoding = make(case)
    assert encoding.bidirectional == case.bidirectional
    assert encoding.content == case.content
    assert encoding.rescores == case.rescores
    assert encoding.additive == (case.bias is not None)
    assert encoding.title and encoding.formula and encoding.paper.startswith("https://")


@additive
@pytest.mark.parametrize("heads", [12, 5])
@pytest.mark.parametrize("length", [1, 13])
def test_bias_matrix_is_the_formula(case, heads, length):
    encoding, inputs = make(case, heads), Inputs(heads, length, B=2)
    bias = bias_of(encoding, case, inputs)
    assert bias.dtype == torch.float32
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    assert (bias[..., ~seen] == -math.inf).all()
    for row in range(2):
        close(bias[row][:, seen], case.bias(setting(encoding, inputs, row))[:, seen.numpy()], 2e-5)


@additive
def test_bias_matrix_without_a_causal_mask(case):
    encoding, inputs = make(case, 3), Inputs(3, 9)
    if not case.bidirectional:
        with pytest.raises(UserError, match="causal attention only"):
            bias_of(encoding, case, inputs, causal=False)
        return
    bias = bias_of(encoding, case, inputs, causal=False)
    assert bias.isfinite().all()
    close(bias[1], case.bias(setting(encoding, inputs, 1, causal=False)), 2e-5)


@additive
def test_bias_with_gaps_between_positions(case):
    """Explicit positions reach beyond the number of keys."""
    positions = [0, 1, 4, 5, 150, 151, 700]
    encoding, inputs = make(case, 3), Inputs(3, len(positions), B=1)
    if case.rescores:
        return  # through attention: test_attention.py
    layout = Layout(len(positions), len(positions), torch.device("cpu"), positions=torch.tensor([positions]))
    _, terms = prepare(encoding, layout, inputs.hidden, dtype=torch.float64)
    bias = reference.bias_of(terms, layout, 3)[0].tril()
    close(bias, np.tril(case.bias(setting(encoding, inputs, positions=positions))))


@every
def test_rotated_scores_are_the_formula(case):
    """At lengths on both sides of the training length of `dynamic` and `longrope`."""
    for length in (1, 8, 21):
        encoding, inputs = make(case, 2), Inputs(2, length, B=1)
        layout = Layout(length, length, torch.device("cpu"))
        rotation, _ = prepare(encoding, layout, inputs.hidden, dtype=torch.float64)
        assert (rotation is None) == (case.scores is None)
        if case.scores is None:
            return
        q, k = reference.apply_rotation(inputs.q, inputs.k, rotation)
        close((q @ k.transpose(-1, -2) / HEAD_DIM**0.5)[0].tril(), case.scores(setting(encoding, inputs)))


@every
def test_embedded_vectors_are_the_formula(case):
    encoding, inputs = make(case, 2), Inputs(2, 13, B=1)
    vectors = encoding.embed(torch.arange(13))
    assert (vectors is None) == (case.embed is None)
    if vectors is not None:
        close(vectors, case.embed(setting(encoding, inputs)), 1e-5)
        positions = torch.tensor([[3, 0], [7, 7]])
        close(encoding.embed(positions)[1, 0], case.embed(setting(encoding, inputs))[7], 1e-5)


@every
def test_parameter_counts_of_gpt2_small(case):
    if case.parameters is None:
        return  # longrope's lists fit heads of 8
    encoding = build(case.spec, heads=12, head_dim=64)
    assert encoding.share == case.share
    assert encoding.parameter_count() * (1 if encoding.share else 12) == case.parameters * (
        12 if case.name == "learned" else 1  # a model has one table, in front of its first layer
    )


@every
def test_nothing_lives_in_buffers_and_reset_draws_everything(case):
    encoding = build(case.spec, heads=4, head_dim=HEAD_DIM, reset=False)
    assert not list(encoding.buffers())
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(math.nan)
    encoding.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in encoding.parameters())


@every
def test_builds_on_the_meta_device(case):
    with torch.device("meta"):
        encoding = build(case.spec, heads=4, head_dim=HEAD_DIM, reset=False)
    assert all(parameter.is_meta for parameter in encoding.parameters())


def test_cable_calls_projections_that_are_no_plain_linear():
    """Adapters and quantized layers stand in for them."""

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    cable = encodings.build("cable", heads=2, head_dim=4)
    hidden = torch.randn(1, 5, 8)
    layout = Layout(5, 5, torch.device("cpu"))
    plain = cable.key_state(hidden, layout)
    doubled = Doubled(8, 2)
    doubled.load_state_dict(cable.step.state_dict())
    cable.step = doubled
    state = cable.key_state(hidden, layout)
    torch.testing.assert_close(state, torch.cat([2 * plain[:, :2], plain[:, 2:]], 1))


@every
def test_a_bfloat16_model_keeps_float32_positions(case):
    """600 tokens: beyond 256, bfloat16 does not hold every whole number."""
    T = 600
    narrow = make(case, 2, dtype=torch.float32).bfloat16()
    wide = make(case, 2, dtype=torch.float32).bfloat16().float()  # the same rounded parameters
    hidden = torch.randn(1, T, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    layout = Layout(T, T, torch.device("cpu"))
    state = narrow.key_state(hidden, layout) if case.content else None
    rotation, terms = prepare(narrow, layout, hidden, state, torch.bfloat16)
    expected, same = prepare(wide, layout, hidden.float(), state, torch.float32)
    if rotation is not None:
        assert rotation.q_cos.dtype == torch.float32
        assert torch.equal(rotation.k_sin, expected.k_sin) and torch.equal(rotation.q_cos, expected.q_cos)
    if state is not None:
        assert state.dtype == torch.float32
        sums = state[:, :2]  # behind them CABLE has its gates
        assert (sums.diff(dim=-1) >= 0).all()
        assert (sums.diff(dim=-1) == 0).float().mean() < 0.9  # a bfloat16 sum stalls
    rows = slice(T - 2, T)
    bias, there = reference.bias_of(terms, layout, 2, rows), reference.bias_of(same, layout, 2, rows)
    assert bias.dtype == torch.float32
    # The projections of the hidden state are rounded by the model's dtype, what is made of them is not.
    torch.testing.assert_close(bias, there, rtol=0.02 if case.content else 1e-6, atol=0.02 if case.content else 1e-6)
    vectors = narrow.embed(torch.arange(64))
    if vectors is not None and not list(narrow.parameters()):
        assert vectors.dtype == torch.float32


# ALiBi


def test_alibi_slopes():
    def series(n):
        return [2 ** (-8 * h / n) for h in range(1, n + 1)]

    for rule in ("closest_power_of_two", "geometric"):
        assert slope_values(8, rule) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
        assert slope_values(1, rule) == [1 / 256]
        assert slope_values(16, rule) == series(16)
    twelve = slope_values(12, "closest_power_of_two")
    assert twelve == series(8) + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    plain = slope_values(12, "geometric")
    assert plain == series(12)
    assert set(twelve) & set(plain) == {2**-2, 2**-4, 2**-6, 2**-8}
    # The colour bars of figure 12 of the CABLE paper.
    printed = [322, 203, 128, 80, 51, 32, 20, 12.7, 8, 5, 3.2, 2]
    assert [511 * m for m in plain] == pytest.approx(printed, rel=0.02)
    # Three more lists from the authors' rule, for the sizes of GPT-2.
    for heads, power in ((20, 16), (25, 16), (36, 32)):
        assert slope_values(heads, "closest_power_of_two") == series(power) + series(2 * power)[0::2][: heads - power]


# T5


@pytest.mark.parametrize("buckets,max_distance", [(32, 128), (32, 64), (16, 100), (64, 500), (4, 20)])
@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_those_of_transformers(buckets, max_distance, causal):
    from transformers.models.t5.modeling_t5 import T5Attention

    d = torch.arange(-600, 601)
    theirs = T5Attention._relative_position_bucket(-d, not causal, buckets, max_distance)
    ours = build(f"t5:buckets={buckets},max_distance={max_distance}").index(d, causal)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [t5_bucket(x, causal, buckets, max_distance) for x in d.tolist()]


def test_t5_borders():
    encoding = build("t5")
    one, two = encoding.index(torch.arange(200), True), encoding.index(torch.arange(200), False)
    assert one[:17].tolist() == [*range(16), 16]
    assert (one[112], one[113], one[199]) == (30, 31, 31)
    assert (two[90], two[91], two[199]) == (14, 15, 15)
    assert [int(two[n]) for n in (15, 16, 31, 32, 63, 64)] == [9, 10, 11, 12, 13, 14]
    assert encoding.index(torch.tensor([-1, -16, -400]), False).tolist() == [17, 26, 31]
    # GPT-NeoX's slip: with the query at row 0, a decoded token saw all keys in bucket 0.
    last = relpos.bias_matrix(make(CASES[ids.index("t5")], 2), 40)[:, -1]
    assert last.unique(dim=-1).shape[-1] > 16


@pytest.mark.parametrize("buckets, max_distance", [(2, 2), (3, 9), (32, 128), (64, 4096), (200, 150), (48, 2**40 - 1)])
def test_t5_borders_are_exact(buckets, max_distance):
    exact, found = buckets // 2, t5_borders(buckets, max_distance)
    m = buckets - exact
    assert found[:exact] == list(range(1, exact + 1)) and len(found) == buckets - 1
    for s, n in enumerate(found[exact:], 1):
        right = max_distance**s * exact**m
        assert n**m * exact**s >= right > (n - 1) ** m * exact**s


def test_thousands_of_t5_buckets_are_quick():
    start = time.perf_counter()
    found = t5_borders(4096, 8192)
    assert time.perf_counter() - start < 1
    assert found[-1] == 8187 and found[:2048] == list(range(1, 2049))


# CABLE


def test_cable_is_zero_on_the_diagonal_monotone_and_not_toeplitz():
    for spec in ("cable", "cable:form=unweighted", "cable:form=kernel", "cable:form=softplus"):
        inputs = Inputs(4, 40, B=1)
        bias = relpos.bias_matrix(build(spec, heads=4, head_dim=HEAD_DIM), 40, inputs.hidden.float())[0]
        assert (bias.diagonal(dim1=-2, dim2=-1) == 0).all()
        for i in range(40):
            assert (bias[:, i, : i + 1].diff(dim=-1) >= 0).all()  # nearer keys are penalised less
        steps = bias.diagonal(-1, -2, -1)
        assert (steps != steps[:, :1]).any()


def test_cable_with_constant_steps_is_alibi():
    """`a = 1` and `g = m_h`: the reduction stated in the paper."""
    cable, alibi = build("cable", heads=4, head_dim=HEAD_DIM), build("alibi", heads=4, head_dim=HEAD_DIM)
    with torch.no_grad():
        for parameter in cable.parameters():
            parameter.zero_()
        cable.step.bias.fill_(1)
        cable.gate.bias.copy_(torch.expm1(torch.tensor(slope_values(4, "geometric"))).log())
    close(relpos.bias_matrix(cable, 20, torch.zeros(1, 20, 32))[0].tril(), relpos.bias_matrix(alibi, 20).tril(), 1e-5)


def test_cable_softplus_is_fox_with_the_opposite_sign():
    cable, fox = build("cable:form=softplus", heads=4, head_dim=HEAD_DIM), build("fox", heads=4, head_dim=HEAD_DIM)
    hidden = Inputs(4, 30, B=1).hidden.float()
    with torch.no_grad():
        fox.forget.weight.copy_(-cable.step.weight)
        fox.forget.bias.copy_(-cable.step.bias)
    close(relpos.bias_matrix(cable, 30, hidden).tril(), relpos.bias_matrix(fox, 30, hidden).tril(), 1e-4)


# FIRE


def test_fire_is_toeplitz_up_to_its_length_and_not_beyond():
    encoding = make(CASES[ids.index("fire")], 3)
    with torch.no_grad():
        encoding.multiplier.fill_(20 / 512)
    bias = relpos.bias_matrix(encoding, 40)
    assert torch.equal(bias[:, 1:21, 1:21].tril(), bias[:, :20, :20].tril())
    assert not torch.allclose(bias[:, 1:, 1:].tril(), bias[:, :-1, :-1].tril())


# RoPE against transformers

SCALINGS = {
    "rope:base=500000": {"rope_type": "default", "rope_theta": 500000.0},
    "rope:partial=0.5": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "rope:scaling=linear,factor=4": {"rope_type": "linear", "factor": 4.0},
    "rope:scaling=dynamic,factor=2,original_max_position_embeddings=64": {"rope_type": "dynamic", "factor": 2.0},
    "rope:scaling=yarn,factor=8,original_max_position_embeddings=64": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "rope:scaling=yarn,factor=8,original_max_position_embeddings=64,truncate=false,beta_fast=20,beta_slow=2": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "rope:scaling=yarn,factor=40,original_max_position_embeddings=4096,mscale=1.0,mscale_all_dim=0.7": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "rope:scaling=yarn,factor=8,original_max_position_embeddings=64,attention_factor=1.5": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "rope:scaling=llama3,factor=8,original_max_position_embeddings=64": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rope:scaling=longrope,factor=4,original_max_position_embeddings=64,"
    f"short_factor={';'.join(str(1 + t / 9) for t in range(16))},"
    f"long_factor={';'.join(str(1 + t) for t in range(16))}": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1 + t / 9 for t in range(16)],
        "long_factor": [1.0 + t for t in range(16)],
    },
}


@pytest.mark.parametrize("spec", SCALINGS)
@pytest.mark.parametrize("length", [40, 100])  # on both sides of the training length
def test_rope_is_that_of_transformers(spec, length):
    from transformers import GPTNeoXConfig, LlamaConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    head_dim = 32
    settings = {"rope_theta": 10000.0, **SCALINGS[spec]}
    common = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "rope_parameters": settings}
    if "partial_rotary_factor" in settings:  # Llama's default type has none
        theirs = GPTNeoXRotaryEmbedding(GPTNeoXConfig(max_position_embeddings=64, **common))
    else:
        theirs = LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=64, **common))
    q, k = torch.randn(2, 1, 2, length, head_dim, generator=torch.Generator().manual_seed(0)).unbind()
    cos, sin = theirs(q, torch.arange(length)[None])
    n = cos.shape[-1]
    turned = apply_rotary_pos_emb(q[..., :n], k[..., :n], cos, sin)
    expected = [torch.cat((a, b[..., n:]), -1) for a, b in zip(turned, (q, k), strict=True)]
    rotation, _ = prepare(build(spec, heads=2, head_dim=head_dim), Layout(length, length, torch.device("cpu")))
    for actual, there in zip(reference.apply_rotation(q, k, rotation), expected, strict=True):
        close(actual, there, 1e-4)


def test_rope_layouts_are_a_permutation_of_the_features():
    q, k = torch.randn(2, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
    layout = Layout(9, 9, torch.device("cpu"))
    half, _ = prepare(build("rope", heads=2, head_dim=8), layout)
    pairs, _ = prepare(build("rope:layout=interleaved", heads=2, head_dim=8), layout)
    a, b = reference.apply_rotation(q, k, half)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    c, d = reference.apply_rotation(q[..., order], k[..., order], pairs)
    close(a[..., order], c, 1e-6)
    close(b[..., order], d, 1e-6)
    close(a.norm(dim=-1), q.norm(dim=-1), 1e-5)
    diagonal = (a * b).sum(-1)
    close(diagonal, (q * k).sum(-1), 1e-5)


def test_dynamic_rope_keeps_the_length_of_the_first_call():
    encoding = build("rope:scaling=dynamic,factor=4,original_max_position_embeddings=8", heads=2, head_dim=8)
    grown, _ = prepare(encoding, Layout(1, 30, torch.device("cpu"), first_length=12))
    first, _ = prepare(encoding, Layout(12, 12, torch.device("cpu")))
    other, _ = prepare(encoding, Layout(30, 30, torch.device("cpu")))
    close(grown.k_cos[:, :12], first.k_cos)
    assert not torch.allclose(grown.k_cos, other.k_cos)


# xPos


def test_xpos_stops_before_it_overflows():
    encoding = build("xpos", heads=2, head_dim=64)
    for dtype, last in ((torch.float16, 3399), (torch.bfloat16, 35125), (torch.float32, 35126)):
        assert encoding.limit(dtype) == pytest.approx(last, abs=1)
        fits = Layout(1, encoding.limit(dtype) + 1, torch.device("cpu"))
        rotation, _ = prepare(encoding, fits, dtype=dtype)
        key = torch.full((1, 1, fits.Tk, 64), 16.0, dtype=dtype)
        turned = reference.rotate(key * 0.5, rotation.k_cos, rotation.k_sin, True)
        assert turned.isfinite().all()
        with pytest.raises(UserError, match="xpos keeps keys within"):
            prepare(encoding, Layout(1, fits.Tk + 1, torch.device("cpu")), dtype=dtype)


# learned


def test_learned_has_a_hard_end():
    encoding = build("learned:max_positions=16", heads=2, head_dim=8)
    q = torch.randn(1, 2, 17, 8)
    with pytest.raises(UserError, match="16 positions and the text needs 17"):
        relpos.attention(q, q, q, encoding)
    with pytest.raises(UserError, match="needs 17"):
        encoding.embed(torch.arange(17))
    relpos.attention(q[:, :, :16], q[:, :, :16], q[:, :, :16], encoding)


# bias_matrix: bad input


def test_bias_matrix_bad_input():
    for name in ("none", "learned", "sinusoidal", "rope", "xpos"):
        with pytest.raises(UserError, match="has no bias matrix; look at its scores"):
            relpos.bias_matrix(name, 8)
    cable = build("cable", heads=2, head_dim=8)
    with pytest.raises(UserError, match=r"pass hidden=\[B, Tk, 16\]"):
        relpos.bias_matrix(cable, 8)
    hidden = torch.zeros(1, 8, 16)
    hidden[0, 3, 3] = math.nan
    with pytest.raises(UserError, match="hidden holds NaN"):
        relpos.bias_matrix(cable, 8, hidden)
    with pytest.raises(UserError, match="hidden has 8 tokens; length is 9"):
        relpos.bias_matrix(cable, 9, torch.zeros(1, 8, 16))
    with pytest.raises(UserError, match="hidden has 15 features"):
        relpos.bias_matrix(cable, 8, torch.zeros(1, 8, 15))
    with pytest.raises(UserError, match="rescores whole rows: pass q and k"):
        relpos.bias_matrix(build("cope", heads=2, head_dim=8), 8)
    with pytest.raises(UserError, match="length must be a whole number, at least 1, not 0"):
        relpos.bias_matrix("alibi", 0)
    with pytest.raises(UserError, match="length must be a whole number"):
        relpos.bias_matrix("alibi", 8.0)
    with pytest.raises(UserError, match="encoding must be"):
        relpos.bias_matrix(3, 8)
    with pytest.raises(UserError, match=r"hidden must be \[B,T,hidden_size\], not of the shape \[16\]"):
        relpos.bias_matrix(cable, 8, torch.zeros(16))
    cope, q = build("cope", heads=2, head_dim=8), torch.zeros(1, 2, 8, 8)
    for wrong, message in (
        (q[0], r"q must be \[B,H,T,D\]"),
        (q.repeat(1, 2, 1, 1), "was built for 2 heads and q has 4"),
        (q[..., :4], "do not fit together"),
    ):
        with pytest.raises(UserError, match=message):
            relpos.bias_matrix(cope, 8, q=wrong, k=q)
    with pytest.raises(UserError, match="was built for heads of 8 features and q has 4"):
        relpos.bias_matrix(cope, 8, q=q[..., :4], k=q[..., :4])
    assert relpos.bias_matrix(cable, 8, torch.zeros(8, 16)).shape == (1, 2, 8, 8)
    assert relpos.bias_matrix(cable, 8, torch.zeros(8, 16).bfloat16()).dtype == torch.float32
    assert relpos.bias_matrix("alibi", 8).shape == (12, 8, 8)


# The grammar


def test_split_list():
    assert split_list("alibi") == ["alibi"]
    assert split_list("alibi,t5:form=clipped,clip=16,rope") == ["alibi", "t5:form=clipped,clip=16", "rope"]
    assert split_list("rope:scaling=yarn,factor=8,kerple:form=power") == [
        "rope:scaling=yarn,factor=8",
        "kerple:form=power",
    ]
    assert split_list("dape:version=2,base=kerple:form=power,share=false,alibi") == [
        "dape:version=2,base=kerple:form=power,share=false",
        "alibi",
    ]
    assert split_list("dape:base=kerple,dape:version=2,base=t5") == ["dape:base=kerple", "dape:version=2,base=t5"]
    assert split_list(["alibi,fire", "t5:buckets=8"]) == ["alibi", "fire", "t5:buckets=8"]
    assert split_list("./mine.py:a=1,b=2,alibi") == ["./mine.py:a=1,b=2", "alibi"]
    with pytest.raises(UserError, match="empty item"):
        split_list("alibi,,t5")


def test_parse():
    assert parse("alibi") == ("alibi", {})
    assert parse(" t5:form=clipped, clip=16 ") == ("t5", {"form": "clipped", "clip": "16"})
    assert parse("dape:version=2,base=kerple:form=power,share=false") == (
        "dape",
        {"version": "2", "base": "kerple:form=power,share=false"},
    )
    assert parse("rope:base=500000,layout=interleaved") == ("rope", {"base": "500000", "layout": "interleaved"})
    assert parse("../a/mine.py:opt=1") == ("../a/mine.py", {"opt": "1"})
    for wrong, message in (
        ("", "an encoding is a string"),
        (None, "an encoding is a string"),
        ("t5:clipped", "not of the form option=value"),
        ("t5:=3", "not of the form option=value"),
        ("t5:clip=3,clip=4", "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            parse(wrong)


def test_slug():
    assert slug("t5:form=clipped") == "t5-form-clipped"
    assert slug("alibi") == "alibi"
    assert slug("rope:scaling=yarn,factor=8.5") == "rope-scaling-yarn-factor-8.5"
    assert slug("dape:version=2,base=kerple:form=power") == "dape-version-2-base-kerple-form-power"
    assert slug("../there/mine.py:opt=1") == "mine-opt-1"
    assert slug("rope:sign=-1") != slug("rope:sign=1")
    slugs = [slug(case.spec) for case in CASES]
    assert len(set(slugs)) == len(slugs)
    assert all("/" not in s and ":" not in s and "," not in s for s in slugs)


@pytest.mark.parametrize(
    "spec,message",
    [
        ("alibbi", "there is no encoding 'alibbi'. Did you mean 'alibi'"),
        ("zzz", "there is no encoding 'zzz'. Known: alibi, cable"),
        ("kerple:from=log", "kerple has no option 'from'. Did you mean 'form'"),
        ("none:x=1", "none has no option 'x'. Known: share"),
        ("kerple:form=cubic", "kerple: form='cubic' is not one of log, power"),
        ("t5:buckets=many", "t5: buckets='many' is not a whole number"),
        ("t5:buckets=2.5", "is not a whole number"),
        ("t5:scale=inf", "is not a number"),
        ("t5:share=maybe", "t5: share='maybe' is not true or false"),
        ("t5:buckets=1", "buckets must be at least 2"),
        ("t5:max_distance=" + 24 * "9", "max_distance must be at most 2147483647"),
        ("t5:form=clipped,clip=" + 24 * "9", "too large for this machine, or for a number"),
        ("learned:max_positions=" + 24 * "9", "too large for this machine, or for a number"),
        ("t5:max_distance=16", "max_distance=16 must be above 16"),
        ("t5:form=clipped,clip=0", "clip must be at least 1"),
        ("t5:std=-1", "std must not be negative"),
        ("learned:max_positions=0", "max_positions must be at least 1"),
        ("learned:std=-1", "std must not be negative"),
        ("fire:width=0", "width must be at least 1"),
        ("fire:length=0", "length must be from 1"),
        ("sandwich:dim=7", "dim must be even"),
        ("sandwich:dim=" + 24 * "8", "dim must be even and from 2 to 65536"),
        ("cope:positions=1", "positions must be at least 2"),
        ("inkling:rank=0", "rank must be at least 1"),
        ("inkling:length=0", "length must be at least 1"),
        ("dape:version=3", "version='3' is not one of 1, 2"),
        ("dape:width=0", "width must be at least 1"),
        ("dape:version=2,kernel=4", "kernel must be odd"),
        ("dape:base=rope", "the base must add a bias.*rope adds none"),
        ("dape:base=cope", "the base must add a bias.*cope rescores them itself"),
        ("dape:base=dape:base=kerple", "rescores them itself"),
        ("dape:base=keeple", "there is no encoding 'keeple'. Did you mean 'kerple'"),
        ("dape:base=kerple,version=2", "everything after base= belongs to the base"),
        ("rope:base=1", "base must be above 1"),
        ("rope:base=ten", "base='ten' is not a number"),
        ("rope:layout=pairs", "layout='pairs' is not one of half, interleaved"),
        ("rope:partial=0", "partial is a fraction"),
        ("rope:partial=1.5", "partial is a fraction"),
        ("rope:partial=0.4", "pairs of features"),
        ("rope:factor=8", "factor means nothing with scaling=none; it is read by linear, dynamic, yarn"),
        ("rope:scaling=linear,factor=2,beta_fast=3", "beta_fast means nothing with scaling=linear; it is read by yarn"),
        ("rope:scaling=yarn", "scaling=yarn needs factor"),
        ("rope:scaling=yarn,factor=0.5", "factor must be at least 1"),
        ("rope:scaling=yarn,factor=2,beta_fast=1,beta_slow=2", "must be at least beta_slow"),
        ("rope:scaling=yarn,factor=2,attention_factor=0", "attention_factor must be above 0"),
        ("rope:scaling=llama3,factor=2,low_freq_factor=5", "must be above low_freq_factor"),
        ("rope:scaling=dynamic,factor=2,original_max_position_embeddings=1", "must be at least 2"),
        ("rope:scaling=longrope,factor=2,short_factor=1;2,long_factor=1;2", "needs short_factor, 4 positive numbers"),
        ("rope:scaling=longrope,factor=2,short_factor=1;2;3;4", "needs long_factor"),
        ("rope:scaling=longrope,short_factor=1;2;3;4,long_factor=1;2;3;4", "needs factor or attention_factor"),
        ("rope:scaling=longrope,factor=2,short_factor=1;a", "is not numbers with ; between them"),
        ("xpos:scale_base=0", "scale_base must be above 0"),
        ("xpos:base=0.5", "base must be above 1"),
        ("./there-is-no-such.py", "there is no file"),
    ],
)
def test_build_says_what_is_wrong(spec, message):
    with pytest.raises(UserError, match=message):
        build(spec, heads=4, head_dim=8)


def test_build_checks_the_geometry():
    for wrong in ({"heads": 0}, {"heads": 2.5}, {"head_dim": -1}, {"hidden_size": 0}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} must be a positive whole number"):
            build("alibi", **wrong)
    for name in ("rope", "xpos"):
        with pytest.raises(UserError, match="pairs of features"):
            build(name, heads=2, head_dim=7)
    with pytest.raises(UserError, match="hidden_size must be even"):
        build("sinusoidal", heads=1, head_dim=7)
    with pytest.raises(UserError, match="even and at least 4"):
        relpos.bias_matrix("t5:buckets=5", 8, causal=False)


def test_options_reach_the_encoding():
    encoding = build("t5:buckets=16,max_distance=64,scale=2,share=no", heads=3, head_dim=4, hidden_size=20)
    assert (encoding.buckets, encoding.max_distance, encoding.scale, encoding.share) == (16, 64, 2.0, False)
    assert (encoding.heads, encoding.head_dim, encoding.hidden_size) == (3, 4, 20)


# Encodings from outside

OUTSIDE = """
import torch
from relpos.encodings import DistanceEncoding

class {name}(DistanceEncoding):
    title = "Gap"
    formula = "-weight sqrt(d)"
    paper = "https://example.org"

    def __init__(self, *, heads, head_dim, hidden_size, weight: float = 1.0, share: bool = False):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.weight = weight

    def by_distance(self, d):
        return -self.weight * d.abs().sqrt().expand(self.heads, *d.shape)
"""


@pytest.fixture
def registry(monkeypatch):
    """What a test registers does not outlive it."""
    monkeypatch.setattr(encodings, "_registered", dict(encodings._registered))


def write(path, name="Gap"):
    path.write_text(OUTSIDE.format(name=name))
    return path


def test_from_a_file(tmp_path, registry):
    path = write(tmp_path / "gap.py")
    encoding = build(f"{path}:weight=2", heads=2, head_dim=4)
    assert (encoding.name, encoding.weight) == ("gap", 2.0)
    assert "gap" in encodings.names()
    assert build("gap:weight=3", heads=2, head_dim=4).weight == 3
    assert float(relpos.bias_matrix(encoding, 5)[0, 4, 0]) == -4
    assert build(f"dape:base={path}:weight=2", heads=2, head_dim=4).base.weight == 2
    with pytest.raises(UserError, match="gap has no option 'wait'. Did you mean 'weight'"):
        build(f"{path}:wait=2")
    # Another file of the same stem takes the name over; one that takes a built-in name does not.
    other = tmp_path / "other"
    other.mkdir()
    build(str(write(other / "gap.py", "Other")))
    assert type(build("gap")).__name__ == "Other"


def test_a_file_with_no_or_two_encodings(tmp_path, registry):
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(UserError, match="must define exactly one subclass of Encoding; it defines 0"):
        build(str(empty))
    two = tmp_path / "two.py"
    two.write_text(OUTSIDE.format(name="One") + OUTSIDE.format(name="Two"))
    with pytest.raises(UserError, match="it defines 2"):
        build(str(two))
    broken = tmp_path / "broken.py"
    broken.write_text("class (:\n")
    with pytest.raises(UserError, match="broken.py could not be imported: SyntaxError"):
        build(str(broken))


def test_a_checkpoint_never_imports_a_path(tmp_path, registry):
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n" + OUTSIDE.format(name="Trap"))
    for spec in (str(trap), f"dape:base={trap}", f"dape:version=2,base={trap}:weight=2"):
        with pytest.raises(UserError, match="loading one never imports code"):
            build(spec, allow_file=False)
    assert not (tmp_path / "sprung").exists()


def test_register(registry):
    @encodings.register
    class Mine(Encoding):
        name = "mine"

    assert "mine" in encodings.names() and isinstance(build("mine"), Mine)
    assert encodings.register(Mine) is Mine  # twice is the same
    for wrong, message in ((int, "subclass of"), ("x", "subclass of")):
        with pytest.raises(UserError, match=message):
            encodings.register(wrong)
    with pytest.raises(UserError, match="lower-case word"):
        encodings.register(Mine, "Not A Name")
    with pytest.raises(UserError, match="already taken"):
        encodings.register(type("Other", (Encoding,), {}), "mine")
    with pytest.raises(UserError, match="already taken"):
        encodings.register(type("Alibi2", (Encoding,), {}), "alibi")
    encodings._registered.pop("fire", None)  # not asked for yet
    with pytest.raises(UserError, match="already taken"):
        encodings.register(type("Fire2", (Encoding,), {}), "fire")


def test_entry_points(monkeypatch, registry):
    """As an installed package would offer one; a stub stands for the package's metadata only."""
    module = types.ModuleType("some_package")
    exec(OUTSIDE.format(name="Gap"), module.__dict__)
    module.Gap.__module__ = "some_package"
    monkeypatch.setitem(sys.modules, "some_package", module)
    from importlib.metadata import EntryPoint

    point = EntryPoint(name="faraway", value="some_package:Gap", group="relpos.encodings")
    monkeypatch.setattr(encodings, "entry_points", lambda group: [point] if group == "relpos.encodings" else [])
    assert "faraway" in encodings.names()
    assert build("faraway:weight=2", heads=2, head_dim=4).weight == 2
    point = EntryPoint(name="broken", value="some_package:Nothing", group="relpos.encodings")
    with pytest.raises(UserError, match="'broken' of an installed package .* 'some_package:Nothing': AttributeError"):
        build("broken")


def test_a_compiled_step_leaves_the_pieces_of_fire_in_float32():
    """Autocast reaches every product of matrices in a compiled backward pass."""
    encoding = build("fire", heads=12, head_dim=8)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    weights = torch.randn(2, 12, 33, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        _, slope, offset = encoding.pieces()
        return (weights[0] * slope + weights[1] * offset).sum()

    grads = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        encoding.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = run()
        value.backward()
        grads.append([encoding.inner.weight.grad, encoding.inner.bias.grad, encoding.outer.weight.grad])
    for eager, compiled in zip(*grads):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
