"""Studies: one file per claim of the paper. Each runs it and holds the outcome against the printed numbers."""
