"""When a test gives up on what it waits for."""

STUCK = 300.0  # seconds: what has not come by then never comes; no bound on anybody's pace
