"""Pipeline schedules as data: their forms, checker, clock, search, tables and pictures; no process."""
