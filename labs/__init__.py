"""Eight notebooks to learn INSPO by doing; README.md says in which order."""
