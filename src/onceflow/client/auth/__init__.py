"""Logins: JAAS fields, bearer tokens and where they come from."""
