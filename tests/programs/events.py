"""All events of programs, by their names, in three tables."""

from programs.events_between import BEFORE
from programs.events_within import PLANS, WITHIN

__all__ = ["BEFORE", "PLANS", "WITHIN"]
