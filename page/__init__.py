"""The page of a run: report.py writes it, and a run writes it at its end."""
