"""A program as text: it comes back as it was, and what cannot be read is named by its line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.config import load_workload
from simulator.lowering import build_program, schedule_program
from simulator.program import (
    Attention,
    Batch,
    Block,
    Collective,
    Compute,
    Fixed,
    Matmul,
    Memory,
    PointToPoint,
    Program,
    ProgramError,
    Role,
    Step,
    from_text,
    to_text,
)
from simulator.schedules import SCHEDULES
from tests.support.grids import one_in
from tests.support.jobs import job, layouts

LAYOUTS = list(layouts(16))[::3]

GOLDEN = """\
program name='two by two'
block 0 name='F layer'
  compute 'mlp fc1' F matmul m=4 n=8 k=16
  comm 'tp.all_reduce mlp' all_reduce nbytes=32.0 axis=tp purpose=tp
block 1 name='B layer'
  compute fc1.wgrad W matmul m=8 n=16 k=4 role=wgrad out_dtype=fp32 accumulate=True
  compute attn B attention batch=1 heads=2 kv_heads=1 q_len=4 kv_len=4 head_dim=8 causal=False backward=True
  compute norm B memory op=norm read_bytes=64.0 write_bytes=32.0
  compute wait B host_waits=True fixed seconds=0.25
role stage0 ranks=0-1
  lane compute
    step 0F0 block=0 phase=F microbatch=0 stage=0 alloc_bytes=1000000.0
    step 0B0 block=1 after=0SEND_F0+0RECV_B0 after=0F0 phase=B microbatch=0 stage=0 free_bytes=1000000.0
  lane pp
    step 0SEND_F0+0RECV_B0 batch=2 after=0F0
      comm send_fwd send nbytes=64.0 axis=pp purpose=pp peer=1 tag=0F0
      comm recv_bwd recv nbytes=64.0 axis=pp purpose=pp peer=1 tag=1B0
role stage1 ranks=2-3
  lane compute
    step 1F0 block=0 after=take phase=F microbatch=0 stage=1
    step 1B0 block=1 phase=B microbatch=0 stage=1
  lane pp
    step take
      comm recv_fwd recv nbytes=64.0 axis=pp purpose=pp peer=0 tag=0F0
    step give after=1B0
      comm send_bwd send nbytes=64.0 axis=pp purpose=pp peer=0 tag=1B0
  later pp
    comm recv_fwd recv nbytes=64.0 axis=pp purpose=pp peer=0 tag=0F0
    comm send_bwd send nbytes=64.0 axis=pp purpose=pp peer=0 tag=1B0
group tp 0,1
group tp 2,3
group pp 0,2
group pp 1,3
"""


def golden_program() -> Program:
    forward = Block(
        "F layer",
        (
            Compute("mlp fc1", Matmul(4, 8, 16), "F"),
            Collective("tp.all_reduce mlp", "all_reduce", 32.0, "tp", "tp"),
        ),
    )
    backward = Block(
        "B layer",
        (
            Compute("fc1.wgrad", Matmul(8, 16, 4, role="wgrad", out_dtype="fp32", accumulate=True), "W"),
            Compute("attn", Attention(1, 2, 1, 4, 4, 8, causal=False, backward=True), "B"),
            Compute("norm", Memory("norm", 64.0, 32.0), "B"),
            Compute("wait", Fixed(0.25), "B", host_waits=True),
        ),
    )
    out = PointToPoint("send_fwd", "send", 64.0, "pp", "pp", peer=1, tag="0F0")
    back = PointToPoint("recv_bwd", "recv", 64.0, "pp", "pp", peer=1, tag="1B0")
    both = "0SEND_F0+0RECV_B0"
    first = Role(
        "stage0",
        {
            "compute": (
                Step("0F0", forward, (), "F", 0, 0, alloc_bytes=1e6),
                Step("0B0", backward, (both, "0F0"), "B", 0, 0, free_bytes=1e6),
            ),
            "pp": (Step(both, Batch((out, back)), ("0F0",)),),
        },
    )
    take, give = replace(out, name="recv_fwd", op="recv", peer=0), replace(back, name="send_bwd", op="send", peer=0)
    last = Role(
        "stage1",
        {
            "compute": (Step("1F0", forward, ("take",), "F", 0, 1), Step("1B0", backward, (), "B", 0, 1)),
            "pp": (Step("take", take), Step("give", give, ("1B0",))),
        },
        {"pp": (take, give)},
    )
    groups = {"tp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}
    return Program((first, last), (0, 0, 1, 1), groups, "two by two")


def test_golden() -> None:
    """Every kind of line: blocks with all kernels, in-line collectives, steps that run a block, a comm or a batch, wait
    for several others, hold memory; what extensions may bring to a lane; names with spaces are quoted; what has its
    default is left out."""
    assert to_text(golden_program()) == GOLDEN
    assert from_text(GOLDEN) == golden_program()


def test_comments_and_blank_lines_say_nothing() -> None:
    spaced = "\n\n# a comment\n" + GOLDEN.replace("role stage1", "\n   # another\nrole stage1")
    assert from_text(spaced) == golden_program()


@pytest.mark.parametrize("section", one_in(2, LAYOUTS), ids=lambda s: "-".join(str(v) for v in list(s.values())[:5]))
def test_built_programs_come_back(section: dict[str, object]) -> None:
    """Read and write are inverse on programs of every kind of layout, and equal blocks are still one block."""
    program = build_program(load_workload(job() | {"parallelism": section}))
    text = to_text(program)
    again = from_text(text)
    assert again == program
    assert to_text(again) == text

    def blocks(p: Program) -> int:
        return len({id(step.op) for role in p.roles for _, _, step in role.steps() if isinstance(step.op, Block)})

    assert blocks(again) == blocks(program)


@pytest.mark.parametrize("servers", [1, 2])
def test_parameter_servers_come_back(servers: int) -> None:
    section = {"dp": 4, "data_parallel": "async", "servers": servers}
    program = build_program(load_workload(job() | {"parallelism": section}))
    text = to_text(program)
    assert len(program.servers) == servers
    assert from_text(text) == program
    with pytest.raises(ProgramError, match="twice"):
        from_text(text + "servers 0\n")


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_come_back(name: str) -> None:
    program = schedule_program(SCHEDULES[name], 2, 4, SCHEDULES[name].chunks or 2, 1 / 3, 2 / 3)
    assert from_text(to_text(program)) == program


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 1e300, 2.0**53 + 2, 0.0])
def test_numbers_come_back_to_the_last_digit(value: float) -> None:
    step = Step("s", Block("b", (Compute("k", Fixed(value), "F"),)), alloc_bytes=value, free_bytes=-value)
    program = Program((Role("r", {"compute": (step,)}),), (0,), {})
    assert from_text(to_text(program)) == program


@pytest.mark.parametrize("name", ["plain", "two words", "it's", 'a "b"', "x=y", "#1", "", "a\\b", "naïve"])
def test_names_come_back_whatever_is_in_them(name: str) -> None:
    comm = Collective(name, "barrier", 0.0, "tp", "tp")
    lanes = {"compute": (Step(name, Block(name, (Compute(name, Fixed(1.0), "F"), comm))),), name: ()}
    program = Program((Role(name, lanes), Role("unused", {})), (0, 0), {"tp": ((0, 1),)}, name)
    assert from_text(to_text(program)) == program


@pytest.mark.parametrize(
    ("before", "after", "line", "reason"),
    [
        ("role stage0", "rolle stage0", 10, "unknown word 'rolle'"),
        ("m=4 n=8", "m=4.5 n=8", 3, "4.5"),
        ("m=4 n=8", "m 4 n=8", 3, "'m' is not KEY=VALUE"),
        ("m=4 n=8", "n=8", 3, "'m'"),
        ("m=4 n=8", "m=4 width=8", 3, "no field 'width'; there are m, n, k, batch"),
        (
            "F matmul",
            "F matmull",
            3,
            "no kernel 'matmull'; there are matmul, grouped_matmul, attention, tiled, memory, fixed",
        ),
        ("host_waits=True", "host_wait=True", 9, "no field 'host_wait'; there are host_waits"),
        ("'tp.all_reduce mlp'", "'tp.all_reduce mlp", 4, "No closing quotation"),
        ("accumulate=True", "accumulate=yes", 6, "yes"),
        ("nbytes=32.0 axis=tp", "nbytes=many axis=tp", 4, "many"),
        ("nbytes=32.0 axis=tp purpose=tp", "nbytes=32.0 axis=tp", 4, "purpose"),
        ("step 0F0 block=0", "step 0F0 block=7", 12, "there is no block 7"),
        ("step 0F0 block=0 phase=F", "step 0F0 block=0 fase=F", 12, "no field 'fase'"),
        ("phase=F microbatch=0 stage=0", "phase=F microbatch=first stage=0", 12, "first"),
        ("batch=2", "batch=3", 15, "2 comm lines follow, not 3"),
        ("step take\n", "step take block=0\n", 23, "1 comm lines follow, not 0"),
        ("step take\n", "step take\n    step another\n", 23, "0 comm lines follow, not 1"),
        (
            "      comm recv_fwd",
            "      compute k F fixed seconds=1\n      comm recv_fwd",
            23,
            "kernels stand in blocks",
        ),
        ("block 0 name='F layer'\n", "", 2, "it stands in no block or step"),
        ("block 1", "block 0", 5, "block 0 stands there twice"),
        ("lane pp\n    step take", "lane compute\n    step take", 22, "lane compute stands there twice"),
        ("role stage1 ranks=2-3", "role stage1 ranks=1-3", 18, "rank 1 stands there twice"),
        ("role stage1 ranks=2-3", "role stage1 ranks=two", 18, "two"),
        ("later pp\n", "later pp\n    compute k F fixed seconds=1\n", 27, "kernels stand in blocks"),
        ("later pp\n", "later pp\n  later pp\n", 28, "later pp stands there twice"),
        ("group tp 0,1", "group tp zero", 30, "zero"),
        ("group tp 0,1", "group tp", 30, "index"),
        ("role stage0 ranks=0-1\n", "", 10, "it stands in no role"),
        ("  lane compute\n    step 0F0", "    step 0F0", 11, "it stands in no lane"),
    ],
)
def test_errors_name_the_line_and_what_is_wrong_with_it(before: str, after: str, line: int, reason: str) -> None:
    assert before in GOLDEN
    text = GOLDEN.replace(before, after, 1)
    with pytest.raises(ProgramError) as caught:
        from_text(text)
    message = str(caught.value)
    where = text.splitlines()[line - 1].strip()
    assert message.startswith(f"line {line}: cannot read {where!r}: ")
    assert reason in message


def test_ranks_must_be_covered_without_a_gap() -> None:
    with pytest.raises(ProgramError, match="without a gap"):
        from_text(GOLDEN.replace("ranks=2-3", "ranks=3-4"))


def test_what_is_read_is_validated() -> None:
    with pytest.raises(ProgramError, match="step '0F0' waits for 'nothing'"):
        from_text(GOLDEN.replace("step 0F0 block=0", "step 0F0 block=0 after=nothing"))
