"""Pipeline schedules, one file each. Adding one: write its file, add its module to the list below."""

from simulator.schedules import (
    async_1f1b,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from simulator.schedules.actions import Action, Cell, Need, Order, Post, Schedule, Slot, Times, in_a_row, requires
from simulator.schedules.csv_form import from_csv, to_csv
from simulator.schedules.paired import paired

SCHEDULES: dict[str, Schedule] = {
    module.SCHEDULE.name: module.SCHEDULE
    for module in (
        naive,
        gpipe,
        one_f_one_b,
        interleaved,
        looped_bfs,
        zb_h1,
        zb_h2,
        zb_auto,
        interleaved_zb,
        zb_v,
        dualpipe_v,
        dualpipe,
        async_1f1b,
    )
}

__all__ = [
    "SCHEDULES",
    "Action",
    "Cell",
    "Need",
    "Order",
    "Post",
    "Schedule",
    "Slot",
    "Times",
    "from_csv",
    "in_a_row",
    "paired",
    "requires",
    "to_csv",
]
