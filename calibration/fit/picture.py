"""Pictures of measured against fitted, one file per class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from calibration.fit.part import FittedPoint


def draw(points: Iterable[FittedPoint], directory: Path) -> list[Path]:
    """For each class, fitted / measured over measured seconds by group; filled: fitted, hollow: held out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    classes: dict[str, dict[str, list[FittedPoint]]] = {}
    for point in points:
        classes.setdefault(point.kind, {}).setdefault(point.group, []).append(point)
    paths = []
    for name, groups in classes.items():
        figure = Figure(figsize=(11, 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.axhspan(0.95, 1.05, color="0.93")
        axes.axhline(1.0, color="0.4", linewidth=0.8)
        for index, (group, some) in enumerate(groups.items()):
            color = f"C{index % 10}"
            for held_out in (False, True):
                chosen = [point for point in some if point.held_out == held_out]
                axes.scatter(
                    [point.measured_s * 1e6 for point in chosen],
                    [point.fitted_s / point.measured_s for point in chosen],
                    s=14,
                    marker="osD^v<>pXP"[index // 10 % 10],
                    facecolors="none" if held_out else color,
                    edgecolors=color,
                    linewidths=0.8,
                    label=None if held_out else group.removeprefix(f"{name}."),
                )
        axes.set(xscale="log", xlabel="measured, us", ylabel="fitted / measured", ylim=(0.4, 1.6))
        axes.set_title(f"{name}: filled fitted, hollow held out; grey: within 5 %", fontsize=10)
        figure.legend(loc="outside right upper", fontsize=7, ncols=1 + len(groups) // 40)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
