"""The configuration of a run: schema, fields, overrides and every check. No torch."""
