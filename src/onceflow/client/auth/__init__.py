"""Logins: JAAS fields, bearer tokens and their sources.

It may import ``client``, of which it is a part. Start reading at ``logins.py``.
"""
