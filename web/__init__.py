"""The page and the API: what `reshard.client` says, over HTTP."""
