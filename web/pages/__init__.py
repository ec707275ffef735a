"""The pages of `reshard web`: made on the server, read without scripts, and kept up to date by a small one."""
