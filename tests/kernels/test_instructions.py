"""Counts of instructions of compiled kernels: loops of machine code, and the figures that the tables hold."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'specmamba[gpu]'")

from specmamba.kernels.aot.command import TABLES
from specmamba.kernels.aot.instructions import count_instructions, trips_of
from specmamba.kernels.aot.table import Resources, read_table
from specmamba.kernels.gpu import ROOM
from specmamba.kernels.state_records.tiles import COUNTED_TOKENS

LINES = {1: "def kernel(x):", 2: "    for i in range(num_nodes):", 3: "for j in tl.range(0, count, 4):", 4: "x = 1"}

# a prologue of two, a loop of four with an empty one, in it a loop of two, an end, and what fills the memory after it
ASSEMBLY = """
    //## File "/k.py", line 1
            /*0000*/                   LDC R1, c[0x0][0x28] ;
            /*0010*/               @P0 BRA `(.L_x_9) ;
    .L_x_3:
    //## File "/k.py", line 4
            /*0020*/                   FADD R1, R2, R3 ;
    .L_x_4:
            /*0030*/              @!P2 LDG.E.64 R2, desc[UR28][R2.64] ;
            /*0040*/                   NOP ;
    //## File "/k.py", line 3
            /*0050*/               @P1 BRA `(.L_x_4) ;
    //## File "/k.py", line 4 inlined at "/k.py", line 2
            /*0060*/             @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;
    //## File "/k.py", line 2
            /*0070*/               @P0 BRA.U `(.L_x_3) ;
    .L_x_9:
            /*0080*/                   EXIT ;
    .L_x_7:
            /*0090*/                   BRA `(.L_x_7);
            /*00a0*/                   NOP;
"""


def line_of(_: str, number: int) -> str:
    return LINES[number]


def test_instructions_of_loops_count_as_often_as_these_run() -> None:
    count = count_instructions(dedent(ASSEMBLY), {"num_nodes": 3, "count": 9}, line_of)
    assert count == 2 + 3 * (3 + 3 * 2) + 2


def test_a_loop_of_no_trips_counts_as_a_branch() -> None:
    assert count_instructions(dedent(ASSEMBLY), {"num_nodes": 1, "count": 0}, line_of) == 2 + 3 + 2 + 2


def test_a_loop_that_was_unrolled_is_no_count() -> None:
    twice = dedent(ASSEMBLY).replace('"/k.py", line 3', '"/k.py", line 2')
    with pytest.raises(ValueError, match="several loops"):
        count_instructions(twice, {"num_nodes": 3, "count": 9}, line_of)
    assert count_instructions(twice, {"num_nodes": 0, "count": 9}, line_of) == 2 + 3 + 2 + 2  # if it does not run it is


@pytest.mark.parametrize(
    ("source", "trips"),
    [
        ("for i in range(n):", 5),
        ("for i in tl.range(1, n, 3):", 2),
        ("for i in range(0, 7):", 7),
        ("for i in range(n, 2):", 1),
        ("for i in range(tl.cdiv(n, 2)):", 3),
        ("for i in range(1, tl.cdiv(9, n), 1):", 1),
    ],
)
def test_trips_follow_from_the_source(source: str, trips: int) -> None:
    assert trips_of(source, {"n": 5}) == trips


@pytest.mark.parametrize(
    ("source", "what"), [("x = f(y)", "no range"), ("for i in range(m, tl.cdiv(k, 2)):", "m, k has no value")]
)
def test_a_loop_without_known_trips_is_an_error(source: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        trips_of(source, {"n": 5})


# The committed figures

RECURRENT = ("gated_delta_rule", "selective_scan", "ssd")


def rows_of(target: str) -> dict[str, Resources]:
    """Of the verify kernels of recurrent layers, by variant."""
    rows = read_table(TABLES / f"{target}.json").rows
    return {name: row for (operator, name), row in rows.items() if operator == "gated_delta_rule" and "verify" in name}


def test_a_short_chain_takes_few_instructions() -> None:
    """With eight records pending, of a state in either type; the tree kernel issues more than twice as many."""
    rows = rows_of("sm_90")
    assert 0 < rows["tree_verify chain N=4 fp32 K=128 V=128"].instructions <= 31_000
    assert 0 < rows["tree_verify chain N=4 bf16 K=128 V=128"].instructions <= 31_000
    assert rows["tree_verify N=4 fp32 K=128 V=128"].instructions > 62_000


def test_a_tree_of_a_16_bit_model_takes_few_instructions() -> None:
    rows = rows_of("sm_90")
    assert 0 < rows["tree_verify N=16 split fp32 K=128 V=128"].instructions <= 32_000
    assert 0 < rows["tree_verify few N=16 split bf16 K=128 V=128"].instructions <= 40_000
    assert rows["tree_verify N=16 fp32 K=128 V=128"].instructions > 80_000


def test_products_once_for_a_key_head_take_fewer_instructions() -> None:
    """A tree and its part of the launch that makes them, which two value heads share; and a tree that makes them."""
    rows, of_layer = rows_of("sm_90"), read_table(TABLES / "sm_90.json").rows
    made = of_layer["delta_net", "tree_inputs N=16 split K=128"].instructions / 2
    assert made > 0
    for name in ("tree_verify N=16 split fp32 K=128 V=128", "tree_verify few N=16 split bf16 K=128 V=128"):
        assert 0 < rows[f"{name} products"].instructions + made < 0.85 * rows[name].instructions
    assert rows["tree_verify N=16 split fp32 K=128 V=128 products"].instructions <= 21_000


def test_products_once_for_a_group_take_fewer_instructions() -> None:
    """A tree and its part of the launch that makes them, of 8 heads and with step sizes; and one that makes them."""
    rows = {name: row for (_, name), row in read_table(TABLES / "sm_90.json").rows.items()}
    made = rows["tree_step N=16 split S=128 P=64"].instructions / 8
    assert made > 0
    for name in ("tree_verify split fp32 N=8 S=128 P=64", "tree_verify few split fp32 N=16 S=128 P=64"):
        for folds in ("", " no folds"):
            found = rows[f"{name} products{folds}"]
            assert 0 < found.instructions + made < 0.7 * rows[name + folds].instructions


def test_a_short_chain_of_mamba2_takes_few_instructions() -> None:
    row = read_table(TABLES / "sm_90.json").rows["ssd", "tree_verify chain fp32 N=4 S=128 P=64"]
    assert 0 < row.instructions <= 31_000 // 2  # half of the values of a head of a gated delta net
    assert row.registers <= 168
    assert row.spills == 0


@pytest.mark.parametrize("target", ["sm_100", "sm_80", "sm_90"])
def test_verify_kernels_leave_room_for_other_blocks(target: str) -> None:
    """168 registers of a thread let three blocks of 128 threads run on one multiprocessor."""
    rows = read_table(TABLES / f"{target}.json").rows
    large = re.compile(r"N=(32|64)\b|snapshots")
    is_own = re.compile(rf"({'|'.join(RECURRENT)}): .*tree_verify|delta_net: tree_inputs|mamba2: tree_step")
    own = {name: row for (operator, name), row in rows.items() if is_own.match(f"{operator}: {name}")}
    small = {name: row.registers for name, row in own.items() if not large.search(name)}
    assert len(small) >= 55
    assert {name for name, registers in small.items() if registers > ROOM} == set()


@pytest.mark.parametrize("target", ["gfx942", "sm_100", "sm_80", "sm_90"])
def test_no_verify_kernel_of_recurrent_layers_spills(target: str) -> None:
    rows = read_table(TABLES / f"{target}.json").rows
    own = {name: row.spills for (operator, name), row in rows.items() if operator in RECURRENT and "verify" in name}
    assert len(own) >= 67
    assert set(own.values()) == {0}


def test_a_long_prompt_takes_few_instructions() -> None:
    """The kernels for chunks of 16-bit models together, against the one for short prompts; nothing of them spills."""
    rows = read_table(TABLES / "sm_90.json").rows
    long = [
        rows["state_records", "prefill grams delta rule fp32 K=128 V=128"],
        rows["gated_delta_rule", "prefill systems"],
        rows["gated_delta_rule", "prefill updates K=128 V=128"],
        rows["state_records", "prefill states delta rule fp32 K=128 V=128"],
        rows["state_records", "prefill outputs delta rule fp32 K=128 V=128"],
    ]
    assert all(row.instructions > 0 for row in long)
    assert sum(row.instructions for row in long) <= 1_100 * COUNTED_TOKENS
    assert rows["gated_delta_rule", "extend split fp32 K=128 V=128"].instructions > 3_000 * COUNTED_TOKENS


@pytest.mark.parametrize("target", ["gfx942", "sm_100", "sm_80", "sm_90"])
def test_no_kernel_of_long_prompts_spills(target: str) -> None:
    table = read_table(TABLES / f"{target}.json")
    own = {key: row.spills for key, row in table.rows.items() if key[1].startswith("prefill")}
    assert len(own) >= 10
    assert set(own.values()) == {0}
