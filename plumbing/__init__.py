"""What every program of the project needs."""
