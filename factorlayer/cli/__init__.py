"""The command line: check, profile, bench and tune a case, convert and report a model, and the cache."""
