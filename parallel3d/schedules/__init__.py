"""Pipeline schedules as data: forms, checker, clock, search, tables, pictures; no process."""
