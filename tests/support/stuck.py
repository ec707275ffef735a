"""When a test gives up on what it waits for."""

STUCK = 240.0  # seconds: what has not come by then never comes; no bound on anybody's pace, and below pytest's 300
