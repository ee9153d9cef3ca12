"""Fit a calibration profile to measurements.

DIR holds what `python -m calibration measure` wrote (.jsonl, .jsonl.gz), or tables of aiconfigurator
(.csv: products with m, n, k, latency; collectives). Its folder `steps` holds records of narrow models that `train` made
with other frameworks. Every second size is fitted and the others are held out; the
profile says how far both are off. What was not measured stays as the base profile has it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibration.fit import collectives, frameworks, hosts, interference, kernels, launch, picture, power
from calibration.fit.cases import MEASURED, Cases, files_of, read
from calibration.fit.part import FittedPoint, residuals
from calibration.fit.writer import written
from calibration.folders import folder
from calibration.gpus import card_of, driver_of
from simulator.cli.outputs import check_outputs
from simulator.config import catalog
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.hardware.device_names import is_of_type
from simulator.hardware.profile import Profile
from simulator.input_files import with_changes

EXAMPLE = """examples:
  python -m calibration fit calibration/measurements/h100-sxm-80gb \\
      --out h100-sxm-80gb.yaml --plots plots
  python -m calibration fit h100 --base h100-sxm-80gb --hold-out 8 \\
      --out from_2_and_4.yaml
  python -m calibration fit aiconfigurator/a100 --base a100-sxm-80gb \\
      --out a100-sxm-80gb.yaml"""
#: What stands below the table of residuals.
UNCOUNTED = "a case that alone tells one of the figures meets it exactly, and is not counted"
PARTS = (kernels.fit, launch.fit, frameworks.fit, collectives.fit, interference.fit, power.fit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measured", type=Path, metavar="DIR", help="measurements")
    parser.add_argument("--out", type=Path, required=True, metavar="PROFILE.yaml", help="the profile to write")
    parser.add_argument(
        "--base", metavar="PROFILE", help="what was not measured is taken from it [the shipped profile of that name]"
    )
    parser.add_argument(
        "--hold-out",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="predict collectives and interference of N GPUs from the others [3 from 2 and 4, 5 to 7 from 4 and 8]",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="pictures of measured against fitted")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 when the profile was written. Raises `InputError`."""
    check_outputs({"--out": arguments.out}, {"--out": (".yaml", ".yml")}, inputs=files_of(arguments.measured))
    if arguments.plots is not None:
        folder("--plots", arguments.plots)
    cases = replace(read(arguments.measured), hold_out=frozenset(arguments.hold_out))
    _held_out(cases)
    base, shipped = arguments.base or arguments.out.stem, catalog.names("profile")
    if arguments.base is None and base not in shipped:
        problem = f"no profile called {base} is shipped that what was not measured could be taken from"
        raise InputError(
            problem, key="--base", allowed=", ".join(shipped), fix="give --base, a profile of a GPU like it"
        )
    profile, points = fit(cases, load_profile(base), arguments.out.stem)
    arguments.out.write_text(written(profile), encoding="utf-8")
    if arguments.plots is not None:
        picture.draw(points, arguments.plots)
    print("\n".join([table(profile), *collectives.by_gpus(points)]), file=sys.stderr)
    return 0


def fit(cases: Cases, base: Profile, name: str) -> tuple[Profile, list[FittedPoint]]:
    """The profile that ``cases`` give and the points behind it; raises `InputError` where they are of another GPU."""
    data = as_data(replace(base, name=name, like=None), nulls=False)
    if cases.environments:
        provenance = _provenance(cases, base)
        data |= {"provenance": provenance, "date": provenance["date"], "kind": "measured"}
        data["sources"] |= {MEASURED: _source(provenance)}
    profile = _checked(data)
    points: list[FittedPoint] = []
    for part in PARTS:
        fitted = part(cases, profile)
        data = with_changes(data, fitted.figures, {})
        points += fitted.points
        profile = _checked(data)
    data["residuals"] = residuals(points)
    cited = [figure for _, figure in profile.cited()]
    named = {figure.source for figure in cited} | {word for figure in cited for word in re.findall(r"\w+", figure.note)}
    data["sources"] = {key: text for key, text in data["sources"].items() if key in named}
    return _checked(data), points


def _held_out(cases: Cases) -> None:
    """Raise `InputError` where of what is to be held out nothing was measured, or nothing else."""
    for kind in ("collective", "interference"):
        there = {len(case.ranks) for case in cases.rows_of(kind)}
        if there and there <= cases.hold_out:
            sizes = ", ".join(map(str, sorted(there)))
            raise InputError(f"leaves no {kind} to fit", key="--hold-out", found=sizes, allowed="some of these")
    there = {len(case.ranks) for case in (*cases.rows_of("collective"), *cases.rows_of("interference"))}
    if unknown := sorted(cases.hold_out - there):
        allowed = ", ".join(map(str, sorted(there))) or "none: no collectives or interference were measured"
        raise InputError("not measured on so many GPUs", key="--hold-out", found=unknown[0], allowed=allowed)


def table(profile: Profile) -> str:
    """The residuals as text."""
    lines = [f"{'class':34} {'fitted':^28} {'held out':^28}"]
    for name, halves in profile.residuals.items():
        cells = [
            f"{r.n:5d} {r.mean:7.1%} {r.max:7.0%} {r.bias:+6.1%}" if r else " " * 28
            for r in (halves.fitted, halves.held_out)
        ]
        lines.append(f"{name:34} {cells[0]} {cells[1]}")
    return "\n".join([*lines, "each: cases, mean error, largest error, bias", UNCOUNTED])


def _provenance(cases: Cases, base: Profile) -> dict[str, Any]:
    first = cases.environments[0]
    if not is_of_type(str(first["gpu"]), base.gpu):
        fix = f"--base with a file of its own: gpu, gpu_spec, and like: {base.name} for the rest"
        raise InputError(
            "measurements are of another GPU than the base profile", found=first["gpu"], allowed=base.gpu, fix=fix
        )
    card = card_of(first)
    clocks = [float(case.row["sm_mhz"]) for case in cases.rows_of("matmul") if case.row.get("sm_mhz")]
    limit = re.search(r"([\d.]+) W", card)
    highest = re.search(r"(\d+) MHz", card)
    provenance: dict[str, Any] = {
        "gpu": first["gpu"],
        "driver": driver_of(first),
        "cuda": first.get("cuda"),
        "nccl": first.get("nccl"),
        "torch": first.get("torch"),
        "date": max(str(environment["date"]) for environment in cases.environments),
        "power_limit_w": limit and float(limit[1]),
        "highest_sm_mhz": highest and float(highest[1]),
        "median_sm_mhz": clocks and statistics.median(clocks),
        "nvls": collectives.nvls(cases),
        **_host(cases),
        "commands": list(dict.fromkeys(str(environment["command"]) for environment in cases.environments)),
    }
    return {key: value for key, value in provenance.items() if value not in (None, "", [])}


def _host(cases: Cases) -> dict[str, float]:
    """How fast the host was whose costs are fitted."""
    usual = hosts.usual_pace(cases)
    return {} if usual is None else {"host_forward_s": usual.forward, "host_backward_s": usual.backward}


def _source(provenance: dict[str, Any]) -> str:
    return (
        f"own measurements, {provenance['date']}: {provenance['gpu']}, torch {provenance.get('torch')}; "
        f"fitted by python -m calibration fit"
    )


def _checked(data: dict[str, Any]) -> Profile:
    return validated(Profile, data, Path("profile"))
