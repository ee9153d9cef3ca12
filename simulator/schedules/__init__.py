"""Pipeline schedules, one file each. Adding one: write its file, add its module to the list below."""

from simulator.schedules import gpipe, interleaved, naive, one_f_one_b
from simulator.schedules.actions import Action, Order, Schedule, Slot, requires

SCHEDULES: dict[str, Schedule] = {
    module.SCHEDULE.name: module.SCHEDULE for module in (naive, gpipe, one_f_one_b, interleaved)
}

__all__ = ["SCHEDULES", "Action", "Order", "Schedule", "Slot", "requires"]
