"""Logins: JAAS fields, bearer tokens and their sources."""
