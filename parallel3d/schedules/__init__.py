"""Pipeline schedules as data, with a search, a checker, a simulator, tables and pictures."""
