"""Pipeline schedules as values."""
