"""What may be asked of the service: its queue as records, what it knows as data, and the acts on it."""

SCHEMA = 1  # of every document; raised when a field goes or changes its meaning, not when one is added
ROOT = "/api/v1"  # of the API; another one when a document changes its schema
PAGE_MAX = 500  # jobs or schedules of one answer; that many take some milliseconds
