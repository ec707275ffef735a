"""The Xet content store: chunks in xorbs, files as lists of chunk ranges, over HTTP under ``/_cas``."""
