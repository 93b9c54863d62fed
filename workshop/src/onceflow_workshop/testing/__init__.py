"""Helpers of onceflow's own tests and of chaos runs: proxies, servers with TLS and S3, links that are cut."""
