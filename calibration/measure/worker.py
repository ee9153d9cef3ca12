"""`python -m calibration.measure.worker`: measures the cases that its agent tells it to, and reports each.

It may die at any case: reported rows are kept, and its agent starts another worker.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback

import torch
import torch.distributed as dist

from calibration.measure import collectives, interference, launch, layers, moving, plan, shared
from calibration.measure.bench import Bench, MeasuredFigures
from calibration.measure.case import Case, UnavailableError, Work
from calibration.measure.gpu import environment
from calibration.measure.hosts import beside_probes
from calibration.measure.start import Reporter, device_of, end_with_parent, join, reporting
from calibration.measure.team import Team, collective_time
from calibration.train.host import Probe

#: Kinds of cases that are of the host, and measured beside probes of it.
OF_HOSTS = ("launch", "layers")
HEAT_S = {"smoke": 0.1, "quick": 3.0, "full": 15.0}


def main() -> None:
    """Reads its orders (JSON) from standard input; writes reports to the file descriptor that they name."""
    orders = json.load(sys.stdin)
    end_with_parent(int(orders["agent"]))
    rank, world, device = int(orders["rank"]), int(orders["world"]), device_of(orders)
    torch.manual_seed(rank)
    gc.disable()  # collected after each case instead of within one
    gc.freeze()
    cases = plan.plan(orders["level"], orders["kinds"], world, orders["local_world"], orders["groups"])
    pending = [cases[index] for index in orders["pending"]]
    with reporting(orders) as report:
        bench = Bench(device)
        teams: dict[tuple[int, ...], Team] = {}
        if world > 1 and any(len(case.ranks) > 1 for case in pending):
            join(orders)
            groups = dict.fromkeys(case.ranks for case in pending if len(case.ranks) > 1)
            teams = {ranks: Team.from_ranks(ranks) for ranks in groups}
        report({"environment": environment(device, world, orders["command"])})
        by_key = {case.key: case for case in cases}
        probe = Probe(device) if bench.cuda and any(case.kind in OF_HOSTS for case in pending) else None
        if any(case.kind in ("matmul", "attention", "memory", "shared") for case in pending) and rank == 0:
            bench.heat(HEAT_S[orders["level"]])
        for case in pending:
            if rank in case.ranks:
                _one(case, bench, teams.get(case.ranks), by_key, probe, report)
        if teams:
            dist.barrier(Team.from_ranks(tuple(range(world))).control)


def _one(
    case: Case, bench: Bench, team: Team | None, by_key: dict[str, Case], probe: Probe | None, report: Reporter
) -> None:
    """Measure one case and report it; an error that leaves the GPU or the other ranks unusable goes up."""
    report({"start": case.key, "limit_s": case.limit_s})
    try:
        row = _measured(case, bench, team, by_key, probe)
    except UnavailableError as error:
        row = {"error": str(error)}
    except torch.OutOfMemoryError:
        if team is not None:
            raise
        row = {"error": "out of memory"}
    except Exception as error:
        if team is not None or "CUDA error" in str(error):
            raise
        row = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        traceback.print_exc()
    if "error" in row and bench.cuda:
        torch.cuda.empty_cache()
    gc.collect()
    report({"row": {"kind": case.kind, "op": case.op, "params": case.params, "ranks": list(case.ranks), **row}})


def _measured(
    case: Case, bench: Bench, team: Team | None, by_key: dict[str, Case], probe: Probe | None
) -> MeasuredFigures:
    if case.kind == "layers":
        return layers.measure(case, bench, probe, team)
    if case.kind == "launch":
        return beside_probes(bench.issuing(launch.prepare(case, bench)), bench, probe, team)
    if team is not None:
        if case.kind == "interference":
            return interference.measure(case, bench, team)
        if case.kind == "moving":
            return moving.measure(case, bench, team)
        work = team.together(lambda: _tried(collectives.prepare(case, bench, team.data), bench))
        return {"bytes": work.nbytes, **collective_time(bench, work, team)}
    if case.kind == "kernels":
        profiled = by_key[str(case.params["of"])]
        return {"kernels": bench.kernels(plan.MODULES_ALONE[profiled.kind].prepare(profiled, bench))}
    if case.kind == "shared":
        product, other = shared.prepare(case, bench)
        parts = (float(case.params[name]) for name in ("seconds", "share", "period_s"))
        return {"flops": product.flops, "bytes": product.nbytes, **bench.shared(product, other, *parts)}
    work = plan.MODULES_ALONE[case.kind].prepare(case, bench)
    if case.kind == "sustained":
        return {"flops": work.flops, "bytes": work.nbytes, **bench.sustained(work, float(case.params["seconds"]))}
    return {"flops": work.flops, "bytes": work.nbytes, **bench.device_time(work)}


def _tried(work: Work, bench: Bench) -> Work:
    work.run(0)
    bench.synchronize()
    return work


if __name__ == "__main__":
    main()
