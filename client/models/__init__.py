"""Every document of --json and of the HTTP API; tests hold each one to these models."""
