"""Pipeline schedules as data: named and searched ones, checker, simulator, tables and pictures."""
