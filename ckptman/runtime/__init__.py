"""The process and the run: signals, deadline, watchdog, outcome, journal."""
