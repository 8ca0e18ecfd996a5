"""Pipeline parallelism: schedules as data (no torch), their checker, clock and pictures."""
