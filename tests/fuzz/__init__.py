"""Coverage-guided fuzzing of everything that reads what strangers wrote; `make fuzz` runs it.

python -m tests.fuzz                            every target, 60 seconds together
python -m tests.fuzz pickle zip --seconds 3600  these two, an hour together
"""
